"""Generation on a mesh of eight devices equals generation on one."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from pieces import Pieces
from tiny import DEEPSEEK, EXPERTS, GPT_OSS, HYBRID, MODEL, model_config

from jaxrl_llm.distributed.layout import Layout, cuts_for, generation_layout, train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import batch_sharding, shardings
from jaxrl_llm.generation.engine import generate, generate_on_mesh
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.stop_strings import stop_strings
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.families import config_from_hf

VOCAB, P, R, N = 24, 6, 10, 24
SPEC = model_spec(model_config(vocab_size=VOCAB, num_layers=1))
QWEN3_NEXT = (
    EXPERTS
    | HYBRID
    | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
)


def inputs(spec=SPEC):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (N, P)).astype(np.int32)
    lengths = rng.integers(1, P + 1, N).astype(np.int32)
    lengths[5] = 0  # a padding row
    params = jax.tree.map(
        lambda x: x * 6 if x.ndim > 1 else x, init_params(spec, jax.random.key(3))
    )
    return params, tokens, lengths, np.arange(N, dtype=np.uint32), jax.random.key(1)


STRINGS = stop_strings(("aba", "bbb"), Pieces())
SAMPLED = SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2, 5), stop_strings=STRINGS)
GREEDY = SamplingParams(max_new_tokens=R, temperature=0.0, stop_token_ids=(1,))
KV_HEADS = SPEC.config.num_kv_heads


def layout_of(mesh, tensor=0, **whole):
    layout = generation_layout(mesh, KV_HEADS, tensor=tensor)
    return Layout(mesh, layout.rules.replace(**whole))


def stored_in(mesh, **whole):
    return Layout(mesh, train_layout(mesh, KV_HEADS).rules.replace(**whole))


def on_mesh(layout, stored, sampling, **how):
    settings = GenerationSettings(sampling=sampling, num_slots=3, **how)
    run = functools.partial(generate_on_mesh, SPEC, settings=settings, layout=layout, stored=stored)
    return jax.jit(run)


def place(layout, params, tokens, lengths, ids, key, *, spec=SPEC):
    mesh = layout.mesh
    params = jax.device_put(params, shardings(spec.axes, spec.params, mesh, layout.rules))
    return params, *(jax.device_put(x, batch_sharding(mesh)) for x in (tokens, lengths, ids)), key


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param({}, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.nightly),
        pytest.param(GPT_OSS, {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"fsdp": 4, "expert": 2}, marks=pytest.mark.slow),
        pytest.param(QWEN3_NEXT, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK, {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=[
        "dense",
        "gpt_oss",
        "experts",
        "whole heads",
        "hybrid of experts",
        "deepseek",
    ],
)
def test_a_float8_rollout_on_eight_devices(model, sizes):
    """Rounding to 8 bits may differ where sums do, so log-probs of equal tokens are compared."""
    spec = model_spec(config_from_hf(MODEL | model)) if model else SPEC
    settings = GenerationSettings(sampling=GREEDY, num_slots=3, quantization="float8")
    one = jax.jit(functools.partial(generate, spec, settings=settings))(*inputs(spec))
    mesh = make_mesh(**sizes)
    heads = spec.config.num_kv_heads
    layout, stored = generation_layout(mesh, heads), train_layout(mesh, heads)
    run = functools.partial(generate_on_mesh, spec, settings=settings)
    compiled = jax.jit(functools.partial(run, layout=layout, stored=stored))
    two = compiled(*place(stored, *inputs(spec), spec=spec))
    same = np.cumprod(np.asarray(two.tokens == one.tokens), axis=1).astype(bool)
    assert same.mean() > 0.9
    gap = np.abs(np.asarray(two.logprobs - one.logprobs))[same]
    assert gap.max() < 0.05 and gap.mean() < 1e-3


@functools.cache
def on_one_device(sampling):
    settings = GenerationSettings(sampling=sampling, num_slots=5)
    return jax.jit(functools.partial(generate, SPEC, settings=settings))(*inputs())


def check(sizes, sampling, *, tensor=0, **whole):
    """Tokens equal one device's, replicas stop by themselves, collectives keep to their axis.

    `tensor` is generation's own tensor size. `whole` names logical axes that are not split, each
    with None.
    """
    one = on_one_device(sampling)
    cuts = () if whole else cuts_for(sizes, [tensor], [KV_HEADS])
    mesh = make_mesh(**sizes, cuts=cuts)
    layout, stored = layout_of(mesh, tensor, **whole), stored_in(mesh, **whole)
    arguments = place(stored, *inputs())
    compiled = on_mesh(layout, stored, sampling).lower(*arguments).compile()
    output = compiled(*arguments)
    np.testing.assert_array_equal(output.tokens, one.tokens)
    np.testing.assert_array_equal(output.mask, one.mask)
    np.testing.assert_array_equal(output.finished, one.finished)
    np.testing.assert_allclose(output.logprobs, one.logprobs, atol=1e-5)
    if output.steps.size > 1:
        assert len(set(np.asarray(output.steps).tolist())) > 1  # own trip counts
    assert int(output.live_slot_steps.sum()) == int(one.live_slot_steps)
    check_collectives(compiled.as_text(), layout)


def check_collectives(text, layout):
    """Before the loops the switch alone, which moves weights once; in them only heads' groups."""
    mesh = layout.mesh
    ids = np.vectorize(lambda device: device.id)(mesh.devices)

    def groups_along(axes):
        kept = [i for i, axis in enumerate(mesh.axis_names) if axis in axes]
        size = np.prod([ids.shape[i] for i in kept])
        moved = np.moveaxis(ids, kept, range(-len(kept), 0)).reshape(-1, int(size))
        return {frozenset(group.tolist()) for group in moved}

    def groups_of(axes):
        sets = [itertools.combinations(axes, n) for n in range(1, 4)]
        return set().union(*map(groups_along, itertools.chain.from_iterable(sets)))

    any_groups, of_heads = groups_of(mesh.axis_names), groups_of(layout.axes("mlp"))
    entry = text[text.index("\nENTRY") :].splitlines()
    seen = 0
    for line in text.splitlines():
        found = re.search(r" (all-\w+|collective-\w+|reduce-scatter)(-start)?\(", line)
        if not found:
            continue
        seen += 1
        groups = replica_groups(line)
        if line in entry:
            switches = found[1] in ("all-gather", "all-to-all") and groups <= any_groups
            assert switches or groups <= of_heads, line
        else:
            assert groups <= of_heads, line
            assert f"{VOCAB}]" not in line.split(found[0])[0], f"whole logits are moved: {line}"
    assert seen, "no collective was recognised"


def replica_groups(line):
    """The groups of device ids that a collective joins, from each of the three notations of HLO."""
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if listed:
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return {frozenset(int(i) for i in group.split(",")) for group in groups}
    by_axis = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\},", line)
    if by_axis:
        sizes = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", by_axis[1])}
        joined = re.findall(r"'([\w.]+)'", by_axis[2])
        axes = [list(sizes).index(name) for name in joined]
        ids = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        ids = np.moveaxis(ids, axes, range(-len(axes), 0))
        groups = ids.reshape(-1, np.prod([sizes[name] for name in joined]))
        return {frozenset(group) for group in groups.tolist()}
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert short, line
    shape, dims = ([int(i) for i in short[k].split(",")] for k in (1, 2))
    order = [int(i) for i in short[3].split(",")] if short[3] else list(range(len(dims)))
    ids = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape)
    return {frozenset(group) for group in ids.tolist()}


@pytest.mark.nightly
def test_fsdp_8():
    check({"fsdp": 8}, SAMPLED)


@pytest.mark.slow
def test_fsdp_4_tensor_2():
    check({"fsdp": 4, "tensor": 2}, SAMPLED)


def test_data_2_fsdp_2_tensor_2_with_filters():
    filtered = SamplingParams(
        max_new_tokens=R, temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, stop_token_ids=(1, 2)
    )
    check({"data": 2, "fsdp": 2, "tensor": 2}, filtered)


@pytest.mark.slow
def test_tensor_4_with_two_kv_heads_kept_whole():
    check({"fsdp": 2, "tensor": 4}, SAMPLED, kv_heads=None)


@pytest.mark.slow
def test_two_kv_heads_on_four_devices_lie_on_two_devices_each():
    check({"fsdp": 2, "tensor": 4}, SAMPLED)


@pytest.mark.slow
def test_a_larger_tensor_size_than_in_training():
    check({"fsdp": 8}, SAMPLED, tensor=2)


@pytest.mark.nightly  # plain: test_sessions_by_heads.py
def test_more_devices_than_kv_heads_share_heads_in_generation_only():
    check({"fsdp": 4, "sequence": 2}, SAMPLED, tensor=4)


@pytest.mark.slow
def test_a_smaller_tensor_size_than_in_training():
    check({"pipeline": 2, "tensor": 4}, SAMPLED, tensor=2)


@pytest.mark.nightly
def test_drafts_on_two_replicas_with_tensor():
    """The tokens of one device without drafts, in fewer steps."""
    one = on_one_device(GREEDY)
    mesh = make_mesh(data=2, tensor=4, cuts=cuts_for({"data": 2, "tensor": 4}, [], [KV_HEADS]))
    layout, stored = layout_of(mesh), stored_in(mesh)
    outputs = [
        on_mesh(layout, stored, GREEDY, tail_slots=(3,), drafts=n)(*place(stored, *inputs()))
        for n in (0, 3)
    ]
    for output in outputs:
        np.testing.assert_array_equal(output.tokens, one.tokens)
        np.testing.assert_allclose(output.logprobs, one.logprobs, atol=1e-5)
    plain, drafted = outputs
    assert drafted.drafts_accepted.sum() > 0
    assert drafted.steps.sum() < plain.steps.sum()


def test_heads_that_do_not_divide_kept_whole():
    check({"tensor": 8}, SAMPLED, q_heads=None, kv_heads=None)


@pytest.mark.nightly
def test_filters_on_a_split_vocabulary():
    """The tokens that are kept are the same ones. Only maxima of blocks and candidates move."""
    spec = model_spec(model_config(vocab_size=2048, num_layers=1))
    sampling = SamplingParams(max_new_tokens=R, stop_token_ids=(1,), top_k=5, top_p=0.9)
    settings = GenerationSettings(sampling=sampling, num_slots=3, record_kept=True)
    one = jax.jit(functools.partial(generate, spec, settings=settings))(*inputs(spec))
    mesh = make_mesh(fsdp=2, tensor=4, cuts=cuts_for({"fsdp": 2, "tensor": 4}, [], [KV_HEADS]))
    layout, stored = layout_of(mesh), stored_in(mesh)
    run = functools.partial(generate_on_mesh, spec, settings=settings)
    arguments = place(stored, *inputs(spec), spec=spec)
    compiled = jax.jit(functools.partial(run, layout=layout, stored=stored))
    compiled = compiled.lower(*arguments).compile()
    two = compiled(*arguments)
    np.testing.assert_array_equal(two.tokens, one.tokens)
    np.testing.assert_allclose(two.logprobs, one.logprobs, atol=1e-5)
    np.testing.assert_array_equal(np.sort(two.kept, axis=-1), np.sort(one.kept, axis=-1))
    for line in compiled.as_text().splitlines():
        if re.search(r" (all-\w+|collective-\w+|reduce-scatter)(-start)?\(", line):
            assert not re.match(r"\s*\S+ = \(?f32\[\d+,(2048|16,128)\]", line), line


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="'q_heads' of 4 does not divide over tensor=8"):
        on_mesh(layout_of(make_mesh(tensor=8)), None, SAMPLED)(*inputs())
