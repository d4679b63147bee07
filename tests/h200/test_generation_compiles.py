"""Generation compiled for an H200: what the decode loop must not do, read in the program."""

import functools
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from target import abstract, h200_mesh, needs_compiler

from jaxrl_llm.distributed.layout import generation_layout, train_layout
from jaxrl_llm.distributed.sharding import TRAIN_RULES, batch_sharding, replicated, shardings
from jaxrl_llm.generation.engine import (
    FEWEST_WITHOUT_TRITON,
    GenerationLoops,
    compiler_options,
    generate,
    generate_on_mesh,
)
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import FEWEST_SLOTS
from jaxrl_llm.kernels.decode_attention.heads import MIN_SLOTS_WITHOUT_NORMS
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.frozen import FEW_ROWS, Quantized, quantized_matmul
from jaxrl_llm.models.layers import Projection
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.shapes import SHAPES

pytestmark = needs_compiler

CONFIG = replace(SHAPES["qwen2.5-1.5b"], num_layers=2, sliding_window=(None, None))
ONE_LAYER = replace(CONFIG, num_layers=1, sliding_window=(None,))
SAMPLES, PROMPT, GROUP = 1024, 512, 8


@dataclass(frozen=True)
class Case:
    """A rollout as runs compile it: many slots with cuBLAS' products, few with Triton's."""

    slots: int
    response: int
    tails: tuple[int, ...]
    launched: int  # by a step of two layers
    tail_slots: tuple[int, ...] | None = None  # as the settings give it; None: the engine's own


CASES = {
    "many slots": Case(256, 2048, (64,), 56, tail_slots=(64,)),
    "the tails of a run": Case(256, 2048, (160, 64), 56),
    "few slots": Case(64, 256, (), 53),
    "as few as there are on a GPU": Case(FEWEST_SLOTS, 256, (), 48),
    "1,024 slots": Case(1024, 256, (), 56),
}
MARKS = {name: pytest.mark.slow for name in CASES if name != "many slots"}


@pytest.fixture(scope="module", params=[pytest.param(x, marks=MARKS.get(x, ())) for x in CASES])
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def dump(tmp_path_factory, case):
    """Where the compiler writes what it made."""
    return tmp_path_factory.mktemp("dump")


def options_of_a_run(slots):
    """XLA's options of a rollout on a GPU, where this machine has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        return compiler_options(SAMPLES, slots)


@pytest.fixture(scope="module")
def program(dump, case):
    spec = model_spec(CONFIG, dtype="bfloat16")
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sampling = SamplingParams(max_new_tokens=case.response, stop_token_ids=(151645,))

    def answer(params, prompts, lengths, ids, key):
        return generate(
            spec,
            params,
            prompts,
            lengths,
            ids,
            key,
            GenerationSettings(
                sampling=sampling,
                group=GROUP,
                num_slots=case.slots,
                attention="pallas",
                tail_slots=case.tail_slots,
            ),
        )

    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = (
        spec.params,
        ints((SAMPLES, PROMPT)),
        ints((SAMPLES,)),
        ints((SAMPLES,)),
        key,
    )
    lowered = jax.jit(answer).lower(*abstract(arguments))
    options = options_of_a_run(case.slots)
    assert bool(options) == (case.slots >= FEWEST_WITHOUT_TRITON)
    return lowered.compile(
        compiler_options={"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, **options}
    )


def computations(text):
    """{name: its lines} of a module."""
    found, name = {}, None
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            name = start[1]
            found[name] = []
        elif name is not None:
            found[name].append(line.strip())
    return found


def innermost_loops(text):
    """The lines of each loop that has kernels of ours and no other loop."""
    found = computations(text)
    bodies = {
        re.search(r"body=%?([\w.-]+)", line)[1]
        for lines in found.values()
        for line in lines
        if " while(" in line
    }
    return [
        found[name]
        for name in bodies
        if not any(" while(" in line for line in found[name])
        and any("mosaic_gpu" in line for line in found[name])
    ]


@pytest.fixture(scope="module")
def text(program):
    """The program as text, which takes XLA half a second."""
    return program.as_text()


@pytest.fixture(scope="module")
def decode_bodies(text, case):
    """Loops of decode steps: of all slots, then of the tails."""
    inner = innermost_loops(text)
    assert len(inner) == 1 + len(case.tails)
    return inner


def size(shape):
    dtype, dims = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()
    elements = 1
    for dim in filter(None, dims.split(",")):
        elements *= int(dim)
    return elements * {"pred": 1, "s8": 1, "bf16": 2, "f16": 2}.get(dtype, 4)


def large_copies(found, body):
    """The lines of 1 MB and more that copy, by themselves or as what a fusion makes."""
    result = []
    for line in body:
        called = re.search(r" fusion\(.*calls=%?([\w.-]+)", line)
        root = next((x for x in found[called[1]] if x.startswith("ROOT")), "") if called else line
        made = re.search(r"= (\w+\[[\d,]*\])\S* (?:copy|transpose)\(", root)
        started = re.search(r"= \((\w+\[[\d,]*\]).* copy-start\(", line)
        if any(shape and size(shape[1]) >= 2**20 for shape in (made, started)):
            result.append(line)
    return result


def test_no_large_copy(text, decode_bodies):
    found = computations(text)
    for body in decode_bodies:
        assert large_copies(found, body) == []


def test_large_copies_are_seen():
    """Those that are a copy, that a fusion ends in, and that run in parallel with others."""
    shape, small = "bf16[1024,512]{1,0}", "bf16[1024,511]{1,0}"
    found = {
        "fused": [f"%p = {shape} parameter(0)", f"ROOT %c = {shape} copy(%p)"],
        "used": [f"%c = {shape} copy(%p)", "ROOT %s = f32[] reduce(%c, %z)"],
    }
    copies = [
        f"%a = {shape} copy(%x)",
        f"%b = {shape} fusion(%x), kind=kLoop, calls=%fused",
        f"%c = ({shape}, {shape}, u32[]) copy-start(%x)",
    ]
    others = [
        f"%d = {small} copy(%x)",
        "%e = f32[] fusion(%x), kind=kInput, calls=%used",
        f"%f = {shape} add(%x, %y)",
    ]
    assert large_copies(found, copies + others) == copies


def test_no_float32_weights_and_no_sort(text, decode_bodies):
    D, F, H = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim
    N, merged = CONFIG.num_heads, CONFIG.num_heads + 2 * CONFIG.num_kv_heads
    attention = (f"{D},{merged},{H}", f"{D},{merged * H}", f"{N},{H},{D}", f"{N * H},{D}")
    for body in decode_bodies:
        step = "\n".join(body)
        for shape in (f"{D},{2 * F}", f"{F},{D}", f"{CONFIG.vocab_size},{D}"):
            assert f"bf16[{shape}]" in step and f"f32[{shape}]" not in step
        assert not any(f"f32[{shape}]" in step for shape in attention)
        assert " sort(" not in step
    sorted_lines = [line for line in text.splitlines() if " sort(" in line]
    assert not any(str(CONFIG.vocab_size) in line for line in sorted_lines)


def test_kernels_of_a_step(decode_bodies, case):
    """No more than today's: each launch costs about 1.2 us, and a step of batch 256 takes 3 ms."""
    for body in decode_bodies:
        launched = [
            line
            for line in body
            if re.search(r" (fusion|custom-call|copy|sort)\(", line) and "tuple" not in line[:7]
        ]
        assert CONFIG.num_layers * 9 < len(launched) <= case.launched, "\n".join(
            line[:200] for line in launched
        )


def test_a_step_is_one_cuda_graph(program, dump, case):
    """The sequence of a decode loop holds nothing but one captured graph, our kernels in it."""
    (file,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    bodies = [part.splitlines() for part in file.read_text().split("body:")[1:]]
    each = [1 + (slots >= MIN_SLOTS_WITHOUT_NORMS) for slots in (case.slots, *case.tails)]
    kernels, loops = [CONFIG.num_layers * number for number in each], 0
    for body in bodies:
        depth = [len(line) - len(line.lstrip()) for line in body]
        end = next((i for i, d in enumerate(depth) if i > 1 and d < depth[1]), len(body))
        body, depth = body[:end], depth[:end]
        steps = [
            line.strip() for line, d in zip(body, depth, strict=True) if line and d == depth[1]
        ]
        captured = [line for line, d in zip(body, depth, strict=True) if d > depth[1]]
        # One kernel a layer for shared prompts and what each slot added, and of many slots one for
        # the heads before that; the outer loop has more.
        if sum("kCustomCall" in line for line in captured) in kernels:
            assert [step.split()[1] for step in steps] == ["kCommandBuffer"], steps
            loops += 1
    assert loops == 1 + len(case.tails)


@pytest.mark.slow
def test_a_step_with_drafts_copies_nothing_large():
    """The loop around a tail's plain steps, whose own step has drafts: new entries are written in
    place. It launches one kernel a layer more, and some that find the drafts."""
    spec, slots = model_spec(CONFIG, dtype="bfloat16"), 256
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    settings = GenerationSettings(
        sampling=SamplingParams(max_new_tokens=2048, stop_token_ids=(151645,)),
        group=GROUP,
        num_slots=slots,
        attention="pallas",
        tail_slots=(64,),
        drafts=7,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = (ints((SAMPLES, PROMPT)), ints((SAMPLES,)), ints((SAMPLES,)), key)
    answer = jax.jit(functools.partial(generate, spec, settings=settings))
    lowered = answer.lower(*abstract((spec.params, *inputs)))
    text = lowered.compile(compiler_options=options_of_a_run(slots)).as_text()
    found = computations(text)
    tail, plain = re.compile(r"tail_steps/while/body/"), re.compile(r"tail_steps/while/body/while/")
    steps = [lines for lines in found.values() if any("mosaic_gpu" in line for line in lines)]
    (step,) = [
        lines
        for lines in steps
        if any(tail.search(line) and not plain.search(line) for line in lines)
        and any(" while(" in line for line in lines)
    ]
    assert large_copies(found, step) == []
    assert sum("mosaic_gpu" in line for line in step) == CONFIG.num_layers
    launched = [line for line in step if re.search(r" (fusion|custom-call|copy|sort)\(", line)]
    assert len([line for line in launched if "tuple" not in line[:7]]) <= 74
    assert " sort(" not in "\n".join(step)


@pytest.mark.slow
def test_a_step_joins_no_weights_where_adapters_are_computed_apart():
    """XLA would write the kernels of gate and up into one array in every step: 55 MB a layer."""
    projections = ("q", "k", "v", "o")
    modules = frozenset(f"model.layers.0.self_attn.{name}_proj" for name in projections)
    lora = Lora(rank=16, alpha=32, modules=modules, dtype="bfloat16", merge=False)
    spec = model_spec(ONE_LAYER, dtype="bfloat16", lora=lora)
    slots = FEWEST_WITHOUT_TRITON
    sampling = SamplingParams(max_new_tokens=64)
    settings = GenerationSettings(sampling=sampling, group=GROUP, attention="pallas")
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = (spec.params, ints((slots, PROMPT)), ints((slots,)), ints((slots,)), key)
    answer = jax.jit(functools.partial(generate, spec, settings=settings))
    lowered = answer.lower(*abstract(inputs))
    text = lowered.compile(compiler_options=options_of_a_run(slots)).as_text()
    (body,) = innermost_loops(text)
    made = re.compile(rf"= bf16\[{ONE_LAYER.hidden_size},\d+\]\S* (?:fusion|concatenate)\(")
    assert [line for line in body if made.search(line)] == []
    assert sum("__cublas" in line for line in body) > 7  # the base's, and the adapters'


def test_a_bias_is_added_by_its_product():
    """By cuBLAS, as with many slots: written out for every token it would be a kernel a layer."""
    slots = FEWEST_WITHOUT_TRITON
    heads = CONFIG.num_heads, CONFIG.head_dim
    layer = Projection(
        (CONFIG.hidden_size, *heads), ("embed", "q_heads", "head_dim"), bias=True, dtype="bfloat16"
    )
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((slots, 1, CONFIG.hidden_size), jnp.bfloat16)
    lowered = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(*abstract((state, x)))
    text = lowered.compile(compiler_options=options_of_a_run(slots)).as_text()
    assert text.count('"epilogue":"BIAS"') == 1 and "fusion(" not in text


def test_memory(program, case):
    """Weights and caches once, merged weights, and the logits; no second copy of a cache."""
    memory = program.memory_analysis()
    entry = 2 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    caches = entry * (case.slots * case.response + SAMPLES // GROUP * PROMPT)
    logits = 4 * case.slots * CONFIG.vocab_size
    merged = memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes < 1.15 * (caches + 2 * logits + merged) + 2**28


@pytest.mark.slow  # an update on four cards is compiled in test_training_compiles.py
@pytest.mark.parametrize(("stops", "sizes"), [((), (1, 4, 1)), ((151645,), (1, 2, 2))])
def test_several_cards(stops, sizes):
    """The layout switch and the loops of the replicas, with whole heads and with heads that two
    cards share; stop ids or none."""
    mesh = h200_mesh(sizes)
    spec = model_spec(ONE_LAYER)
    rows, whole = batch_sharding(mesh), replicated(mesh)
    layout = shardings(spec.axes, spec.params, mesh, TRAIN_RULES)
    array = jax.ShapeDtypeStruct
    params = jax.tree.map(lambda x, s: array(x.shape, x.dtype, sharding=s), spec.params, layout)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = (
        params,
        array((64, 128), jnp.int32, sharding=rows),
        array((64,), jnp.int32, sharding=rows),
        array((64,), jnp.uint32, sharding=rows),
        array(key.shape, key.dtype, sharding=whole),
    )

    def answer(params, *inputs):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return generate_on_mesh(
            model_spec(spec.config, dtype="bfloat16"),
            params,
            *inputs,
            GenerationSettings(
                sampling=SamplingParams(max_new_tokens=16, stop_token_ids=stops),
                group=8,
                attention="pallas",
            ),
            layout=generation_layout(mesh, spec.config.num_kv_heads),
            stored=train_layout(mesh, spec.config.num_kv_heads),
        )

    text = jax.jit(answer).lower(*arguments).compile().as_text()
    assert "all-gather" in text and "f32[151936,1536]" not in text  # gathered in bf16


# Triton's products, cuBLAS'
@pytest.mark.nightly
@pytest.mark.parametrize(
    "samples", [pytest.param(64, marks=pytest.mark.slow), FEWEST_WITHOUT_TRITON]
)
def test_float8(samples, monkeypatch):
    """Products of a float8 rollout are float8 products, and their inputs come from our kernels."""
    monkeypatch.setattr("jaxrl_llm.kernels.float8.on_hopper", lambda: True)
    spec = model_spec(ONE_LAYER, dtype="bfloat16")

    def answer(params, prompts, lengths, ids, key):
        return generate(
            spec,
            params,
            prompts,
            lengths,
            ids,
            key,
            GenerationSettings(
                sampling=SamplingParams(max_new_tokens=64),
                group=GROUP,
                attention="pallas",
                quantization="float8",
            ),
        )

    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = (spec.params, ints((samples, PROMPT)), ints((samples,)), ints((samples,)), key)
    lowered = jax.jit(answer).lower(*abstract(inputs))
    text = lowered.compile(compiler_options=options_of_a_run(samples)).as_text()
    (body,) = innermost_loops(text)
    assert large_copies(computations(text), body) == [] and not any(" sort(" in x for x in body)
    assert all(f'"{name}"' in text for name in ("gated_float8", "rms_norm_float8"))
    triton = re.findall(r"%gemm_fusion_dot\S* \(\S+ (\w+)\S+ \S+ (\w+)", text)
    float8 = triton.count(("f8e4m3fn", "f8e4m3fn")) + text.count('"__cublas$lt$matmul$f8"')
    others = set(triton) - {("f8e4m3fn", "f8e4m3fn"), ("bf16", "bf16")}
    assert float8 >= 4 * ONE_LAYER.num_layers and not others
    assert bool(triton) == (samples < FEWEST_WITHOUT_TRITON)
    # No "__cublas$gemm", which knows no float8, nor any other that is not counted here.
    cublas = set(re.findall(r'"(__cublas[^"]*)"', text))
    assert cublas == (set() if triton else {"__cublas$lt$matmul", "__cublas$lt$matmul$f8"})
    # The head's stays in bf16: its rounding would go straight into the log-probs.
    assert triton.count(("bf16", "bf16")) + text.count('"__cublas$lt$matmul"') == 1


@pytest.mark.slow  # test_float8 has the products of a dense rollout
def test_a_decode_step_reads_experts_in_float8_as_they_are(monkeypatch):
    """The grouped matmuls take them; no step writes them in bf16."""
    for module in ("kernels.float8", "kernels.grouped_matmul", "models.expert_rows"):
        monkeypatch.setattr(f"jaxrl_llm.{module}.on_hopper", lambda: True)
    whole = SHAPES["qwen3-30b-a3b"]
    mixture = replace(whole.mixture, num_experts=16)
    config = replace(whole, num_layers=1, sliding_window=(None,), mixture=mixture)
    spec = model_spec(config, dtype="bfloat16")
    sampling, slots = SamplingParams(max_new_tokens=64), FEWEST_WITHOUT_TRITON
    settings = GenerationSettings(
        sampling=sampling, group=GROUP, attention="pallas", quantization="float8"
    )
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = (spec.params, ints((slots, PROMPT)), ints((slots,)), ints((slots,)), key)
    lowered = jax.jit(functools.partial(generate, spec, settings=settings)).lower(*abstract(inputs))
    text = lowered.compile(compiler_options=options_of_a_run(slots)).as_text()
    (body,) = innermost_loops(text)
    assert large_copies(computations(text), body) == []
    experts = [line for line in body if "mosaic_gpu" in line and "f8e4m3fn[16," in line]
    assert sum("[16,2048,768]" in x or "[16,768,2048]" in x for x in experts) == 3
    assert not any(f"bf16[16,{sizes}]" in x for sizes in ("2048,768", "768,2048") for x in body)
    # Attention is computed in 8 bits, and the head is not.
    assert sum('"__cublas$lt$matmul$f8"' in line for line in body) == 2


def test_a_decode_step_reads_a_base_in_float8_as_it_is():
    """A copy of 4,096 x 8,192 weights in bf16 would take 67 MB."""
    values = jax.ShapeDtypeStruct((4096, 8192), FLOAT8)
    kernel = abstract(Quantized(values, jax.ShapeDtypeStruct((8192,), jnp.float32)))
    matmul = jax.jit(functools.partial(quantized_matmul, contract=1))

    def temporaries(rows):
        x = abstract(jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16))
        compiled = matmul.lower(kernel, x).compile(options_of_a_run(rows))
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(64) < 10e6
    assert temporaries(2 * FEW_ROWS) > 60e6


@pytest.mark.nightly
def test_a_tail_as_a_program_copies_neither_weights_nor_cache():
    """A chain hands them from one program to the next: see program/chain.py."""
    slots, tail = FEWEST_WITHOUT_TRITON, 64
    sampling = SamplingParams(max_new_tokens=64)
    settings = GenerationSettings(
        sampling=sampling, group=GROUP, num_slots=slots, attention="pallas", tail_slots=(tail,)
    )
    spec = model_spec(ONE_LAYER, dtype="bfloat16")
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = abstract((ints((slots, PROMPT)), ints((slots,)), ints((slots,)), key))

    def generation(params, prompts, lengths, ids, key):
        return GenerationLoops(
            model=lambda trained: (spec, trained),
            trained=params,
            prompts_NP=prompts,
            lengths_N=lengths,
            sample_ids_N=ids,
            seed_key=key,
            settings=settings,
        )

    def begin(params, *inputs):
        return generation(params, *inputs).begin()

    def go_on(params, kept, state, cache, *inputs):
        return generation(params, *inputs).go_on(0, kept, state, cache)

    params = abstract(spec.params)
    carried = abstract(jax.eval_shape(begin, params, *inputs))
    assert len(jax.tree.leaves(carried[0])) == 3  # qkv, its bias, gate and up: the others are given
    lowered = jax.jit(go_on, donate_argnums=3).lower(params, *carried, *inputs)
    compiled = lowered.compile(compiler_options=options_of_a_run(slots))
    cache = sum(size(f"bf16[{','.join(map(str, x.shape))}]") for x in jax.tree.leaves(carried[2]))
    assert compiled.memory_analysis().alias_size_in_bytes == cache
    found = computations(compiled.as_text())
    for lines in found.values():
        assert large_copies(found, lines) == []
