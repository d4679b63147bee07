"""The kernel of a decode step's heads compiled for an H200, and the steps that call it."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from target import abstract, compiled_in_a_process, needs_compiler
from test_generation_compiles import innermost_loops, options_of_a_run

from jaxrl_llm.generation.engine import FEWEST_WITHOUT_TRITON, generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.decode_attention.heads import HeadNorms, StepHeads, queries_and_entries
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.shapes import SHAPES

pytestmark = needs_compiler
KERNEL, ATTENTION = "heads_of_decode_step", "prefix_decode_attention"
SIZES = {  # slots, query heads, KV heads, head dim, norms
    "Llama 1B": (256, 32, 8, 64, False),
    "Qwen2.5 3B": (256, 16, 2, 128, False),
    "Qwen3 4B": (64, 32, 8, 128, True),
    "Qwen3 32B": (64, 64, 8, 128, True),
    "Gemma 3": (64, 8, 4, 256, True),
}


def compile_all():
    """Each size, in order."""
    for B, N, K, H, normed in SIZES.values():
        array = jax.ShapeDtypeStruct
        weight, table = array((H,), jnp.bfloat16), array((B, H // 2), jnp.float32)
        norms = HeadNorms(weight, weight, 1e-6, H == 256) if normed else None
        step = StepHeads(array((B, N + 2 * K, H), jnp.bfloat16), table, table, norms, 1.0)
        run = jax.jit(functools.partial(queries_and_entries, num_kv_heads=K))
        run.lower(abstract(step)).compile()


def test_nothing_spills_and_ctas_share_an_sm():
    logs, _ = compiled_in_a_process(f"from {Path(__file__).stem} import *; compile_all()")
    assert len(logs) == len(SIZES)
    for log in logs:
        (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
        assert sum(map(int, re.findall(r"(\d+) bytes spill", log))) == 0
        assert registers <= 128  # so four CTAs of 128 threads are on an SM


def step_of(config, slots):
    """The lines of a decode step of one layer, by slots at once."""
    config = replace(config, num_layers=1, sliding_window=(None,))
    spec = model_spec(config, dtype="bfloat16")
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    sampling = SamplingParams(max_new_tokens=64)
    settings = GenerationSettings(sampling=sampling, group=8, attention="pallas")
    inputs = (spec.params, ints((slots, 128)), ints((slots,)), ints((slots,)), key)
    lowered = jax.jit(functools.partial(generate, spec, settings=settings)).lower(*abstract(inputs))
    (body,) = innermost_loops(lowered.compile(compiler_options=options_of_a_run(slots)).as_text())
    return body


@pytest.mark.nightly
@pytest.mark.parametrize("normed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_kernel_between_the_matmul_and_attention(normed):
    """It reads what cuBLAS wrote, and attention reads what it wrote: views lie between them."""
    config = replace(SHAPES["llama-3.1-8b"], family="qwen3", qk_norm=True, rope_scaling=None)
    body = step_of(config if normed else SHAPES["llama-3.1-8b"], FEWEST_WITHOUT_TRITON)
    made = {name[1]: line for line in body if (name := re.match(r"%(\S+) = ", line))}

    def maker(line, operand):
        """The line that made an operand, views left out."""
        (operands,) = re.findall(r"custom-call\(([^)]*)\)", line) or re.findall(
            r" (?:bitcast|get-tuple-element)\(([^)]*)\)", line
        )
        found = made[re.findall(r"%([\w.-]+)", operands)[operand]]
        return maker(found, 0) if re.search(r" (bitcast|get-tuple-element)\(", found) else found

    (attention,) = [x for x in body if f"{ATTENTION}/" in x and " custom-call(" in x]
    for queries_or_entries in (0, 1):
        kernel = maker(attention, queries_or_entries)
        assert f"{KERNEL}/" in kernel and "mosaic" in kernel
    assert "__cublas" in maker(kernel, 0)


@pytest.mark.slow
def test_few_slots_without_norms_stay_with_xla():
    """There XLA adds up the parts of a split matmul, turns heads and joins them in one kernel."""
    config = replace(SHAPES["llama-3.1-8b"], num_heads=16)
    assert not any(KERNEL in line for line in step_of(config, 64))
