"""Decode attention compiled for an H200: registers, shared memory, no spills."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from target import abstract, compiled_in_a_process, needs_compiler, one_h200

from jaxrl_llm.kernels.decode_attention import (
    DecodeInputs,
    decode_schedule,
    default_tuning,
    prefix_decode_attention,
)
from jaxrl_llm.kernels.decode_attention.pipeline import MatmulForms, padded_rows
from jaxrl_llm.kernels.hopper import SHARED_BYTES_RESERVED, SM_SHARED_BYTES

pytestmark = needs_compiler

SM_REGISTERS = 64 * 1024
SLOTS, PROMPTS, P, R, PAGE = 64, 8, 512, 1024, 128
SHAPES = {  # KV heads, query heads, head dim
    "0.5B": (2, 14, 64),
    "SmolLM2": (3, 9, 64),
    "1.5B": (2, 12, 128),
    "7B": (4, 28, 128),
    "8B": (8, 32, 128),
    "16 queries a head": (2, 32, 128),
    "20 queries a head": (1, 20, 128),
}
WIDE = (4, 8, 256)  # no schedule lets slots share its prompts


@dataclass(frozen=True)
class Resources:
    """What the compiler says of a kernel."""

    registers: int  # a thread
    spilled_bytes: int
    shared_bytes: int  # a CTA, barriers included

    def ctas_per_sm(self) -> int:
        # Registers are handed out to warps in units of 256.
        registers = -(-self.registers * 32 // 256) * 256 * 4
        shared = self.shared_bytes + SHARED_BYTES_RESERVED
        return min(SM_REGISTERS // registers, SM_SHARED_BYTES // shared)


def lower_decode(
    shape: str,
    num_splits: int,
    window: int | None,
    cache: str,
    shared: bool = False,
    calls: int = 1,
) -> jax.stages.Lowered:
    """Some decode attention calls for the card, prompts `shared` by a schedule."""
    K, N, H = SHAPES.get(shape, WIDE)
    q, new, prefix, own = (
        jax.ShapeDtypeStruct(dims, dtype)
        for dims, dtype in (
            ((SLOTS, N, H), "bfloat16"),
            ((SLOTS, K, 2, H), cache),
            ((PROMPTS, K, 2, P, H), cache),
            ((SLOTS * R // PAGE, K, 2, PAGE, H), cache),
        )
    )
    int32 = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    pages = jax.ShapeDtypeStruct((SLOTS, R // PAGE), jnp.int32)
    arguments = (q, own, new, prefix, int32, int32, pages, int32)

    schedule = None
    if shared:
        sizes = dict(group_size=N // K, num_kv_heads=K, prefix_capacity=P, own_capacity=R)
        sizes |= dict(slots_per_prompt=SLOTS // PROMPTS, num_splits=num_splits)
        tuning = default_tuning(H, jnp.dtype(cache))
        make = partial(decode_schedule, tuning=tuning, **sizes)
        schedule = jax.eval_shape(make, int32, int32, int32)

    def decode(schedule: Any, q: jax.Array, own: jax.Array, *others: jax.Array) -> Any:
        new, *prompts, pages, lengths = others
        for _ in range(calls):
            q, own = prefix_decode_attention(
                DecodeInputs(q, new, *prompts, own, pages, lengths),
                window=window,
                implementation="pallas",
                num_splits=None if shared else num_splits,
                schedule=schedule,
            )
        return q, own

    jitted = jax.jit(decode, donate_argnames="own")
    return jitted.lower(*abstract((schedule, *arguments), one_h200()))


def compile_decode(*arguments: Any, **settings: Any) -> str:
    """The optimised HLO of what `lower_decode` lowers."""
    return lower_decode(*arguments, **settings).compile().as_text()


# Parts of a slot, window, cache, whether a schedule lets slots share prompts.
CASES = [
    (1, None, "bfloat16", False),
    (4, None, "bfloat16", False),
    (1, 300, "bfloat16", False),
    (1, None, "float8_e4m3fn", False),
    (1, None, "bfloat16", True),
    (4, None, "bfloat16", True),
    (1, None, "float8_e4m3fn", True),
]


def resources_of(shape: str, cases: list[tuple[Any, ...]]) -> list[Resources]:
    """The kernel's resources at a shape, one a case."""
    logs, resources = compiled_in_a_process(
        f"from {Path(__file__).stem} import *; [compile_decode({shape!r}, *c) for c in {cases}]"
    )
    assert len(logs) == len(cases), logs
    # Compiled one after the other, so both are in the order of the cases.
    return [_resources_in(*found) for found in zip(logs, resources, strict=True)]


def _resources_in(ptxas: str, resources: str) -> Resources:
    barriers = sum(map(int, re.findall(r"num_barriers=(\d+).*?\): \d", resources)))
    return Resources(
        registers=int(re.findall(r"Used (\d+) registers", ptxas)[0]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", ptxas))),
        shared_bytes=int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0]) + 16 * barriers,
    )


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ("7B", [CASES[4]]),
        pytest.param("7B", CASES, marks=pytest.mark.nightly),
        *(pytest.param(s, CASES, marks=pytest.mark.slow) for s in SHAPES if s != "7B"),
    ],
)
def test_no_spills_and_several_ctas_per_sm(shape: str, cases: list[tuple[Any, ...]]):
    K, N, H = SHAPES[shape]
    for case, resources in zip(cases, resources_of(shape, cases), strict=True):
        assert resources.spilled_bytes == 0, case
        _, _, cache, shared = case
        L, cache_dtype = padded_rows(N // K), jnp.dtype(cache)
        forms = MatmulForms.of(L, with_prompt_tiles=shared)
        launched = forms.ctas_per_sm(default_tuning(H, cache_dtype), H, L, cache_dtype)
        assert launched == (3 if not shared and L == 8 else 2), case
        assert resources.ctas_per_sm() >= launched, case


@pytest.mark.slow
def test_wide_heads_spill_nothing():
    cases = [case[:3] for case in CASES if not case[3]]
    logs, resources = compiled_in_a_process(
        f"from {Path(__file__).stem} import *; [compile_decode('wide', *c) for c in {cases}]"
    )
    assert len(logs) == len(cases)
    for found in zip(logs, resources, strict=True):
        assert _resources_in(*found).spilled_bytes == 0 < _resources_in(*found).ctas_per_sm()


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_positions_are_counted_along_the_last_dimension(cache: str, monkeypatch):
    """jax adds a place in a register to the last index, whichever dimension registers run along."""
    real, seen = fragmented_array.FragmentedArray.broadcasted_iota, []

    def counted(dtype: Any, shape: tuple[int, ...], dimension: int, layout: Any, **options: Any):
        if isinstance(layout, fragmented_array.TiledLayout) and layout.vector_length > 1:
            last = layout.tiling.tile_dimension(len(shape) - 1)[layout.vector_dim]
            seen.append((shape, dimension, last))
        return real(dtype, shape, dimension, layout, **options)

    monkeypatch.setattr(fragmented_array.FragmentedArray, "broadcasted_iota", staticmethod(counted))
    lower_decode("1.5B", 1, None, cache)
    assert seen and all(last for *_, last in seen), seen


def test_lowering_starts_ptxas_once_at_most_to_ask_for_its_version():
    """jax asks at every conversion of a truth value, and would start a process each time."""
    bindings = vars(fragmented_array)["mgpu_lib"]
    ask = bindings._mosaic_gpu_ext._get_ptxas_isa_version
    lower_decode("1.5B", 1, None, "bfloat16")
    assert ask.cache_info().hits > 20 and ask.cache_info().misses <= 1


def operations(hlo: str) -> list[str]:
    """What the program executes, views left out."""
    entry = hlo[hlo.index("ENTRY") :]
    kinds = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", entry, re.MULTILINE)
    return sorted(set(kinds) - {"parameter", "bitcast", "tuple", "get-tuple-element"})


@pytest.mark.parametrize(("num_splits", "most_fusions"), [(1, 1), (4, 2)])
def test_one_kernel_and_small_fusions(num_splits: int, most_fusions: int):
    """One rounds the queries up to whole groups of rows, one merges parts and takes the rows off.

    The result of a slot's only part is written as it is.
    """
    hlo = compile_decode("1.5B", num_splits, None, "bfloat16")
    assert operations(hlo) == ["custom-call", "fusion"]
    assert hlo.count(" custom-call(") == 1
    assert hlo.count(" fusion(") <= most_fusions


@pytest.mark.nightly
@pytest.mark.parametrize("num_splits", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_prompts_add_no_kernel(num_splits: int):
    """Rounding up the next layer's queries is part of merging; lengths are compared once."""
    hlo = compile_decode("1.5B", num_splits, None, "bfloat16", shared=True, calls=2)
    assert operations(hlo) == ["custom-call", "fusion"]
    assert hlo.count(" custom-call(") == 2
    assert hlo.count(" fusion(") <= 2 + 2
