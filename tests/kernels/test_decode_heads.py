"""Queries and new entries of a decode step: the kernel, interpreted, against plain jax."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import further
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from tiny_iteration import random_params
from tiny_models import CONFIGS

from jaxrl_llm.generation import kv_cache
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.decode_attention import (
    DecodeInputs,
    DecodeTuning,
    heads,
    prefix_decode_attention,
)
from jaxrl_llm.kernels.decode_attention.heads import (
    MIN_SLOTS_WITHOUT_NORMS,
    HeadNorms,
    StepHeads,
    heads_fit,
    queries_and_entries,
)
from jaxrl_llm.kernels.strict import Strict, strict_scope
from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import Attention, Mixers
from jaxrl_llm.models.base import bind, init_params, merge_projections, model_spec
from jaxrl_llm.models.layers import apply_rope, rope_tables
from jaxrl_llm.numerics import rms_norm

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter loads from references from 0.11 on"
)
CASES = {  # slots, query heads, KV heads, head dim
    "8 queries a KV head": (3, 16, 2, 64),
    "padded, more heads than a step": (2, 32, 8, 128),
    "14 queries in 16 rows": (1, 14, 1, 64),
    "one query a KV head": (2, 5, 5, 128),
    "wide": (2, 12, 4, 256),
}


def step_heads(sizes, *, norms=True, unit_offset=False, query_scale=1.0):
    B, N, K, H = sizes
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * rng.lognormal(), jnp.bfloat16)

    angles = rng.uniform(0, 3000, (B, H // 2)).astype(np.float32)
    of_heads = HeadNorms(normal(H), normal(H), 1e-6, unit_offset) if norms else None
    heads_BAH = normal(B, N + 2 * K, H)
    return StepHeads(heads_BAH, jnp.cos(angles), jnp.sin(angles), of_heads, query_scale)


def plain(step, K):
    """Queries [B, N, H] and new entries [B, K, 2, H] as the layers compute them, unfused."""
    N = step.heads_BAH.shape[1] - 2 * K
    q_BNH, k_BKH, v_BKH = jnp.split(step.heads_BAH, (N, N + K), axis=1)
    if step.norms is not None:
        weights, offset = (step.norms.q_H, step.norms.k_H), step.norms.unit_offset
        if offset:
            weights = [1 + w.astype(jnp.float32) for w in weights]
        q_BNH, k_BKH = (
            rms_norm(x, w, step.norms.eps).astype(x.dtype)
            for x, w in zip((q_BNH, k_BKH), weights, strict=True)
        )
    turn = partial(apply_rope, cos=step.cos_BP[:, None], sin=step.sin_BP[:, None])
    q_BNH, k_BKH = turn(q_BNH), turn(k_BKH)
    if step.query_scale != 1.0:
        q_BNH = (q_BNH * jnp.float32(step.query_scale)).astype(q_BNH.dtype)
    return q_BNH, jnp.stack([k_BKH, v_BKH], axis=2)


def by_kernel(step, K):
    """The same by the kernel, without the rows that pad a KV head."""
    queries_BXH, new_BK2H = queries_and_entries(step, K, InterpretGPUParams())
    B, A, H = step.heads_BAH.shape
    rows_BKLH = queries_BXH.reshape(B, K, -1, H)
    assert rows_BKLH.shape[2] % 8 == 0
    return rows_BKLH[:, :, : A // K - 2].reshape(B, A - 2 * K, H), new_BK2H


def assert_same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(*(np.asarray(z).view(np.uint16) for z in (x, y)))


@interpreted
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("norms", [True, False])
def test_bits_of_plain_jax(sizes, norms):
    """The interpreter adds squares in jax's order, which no GPU does."""
    step = step_heads(sizes, norms=norms)
    assert_same_bits(by_kernel(step, sizes[2]), plain(step, sizes[2]))


@interpreted
@pytest.mark.parametrize("changes", [dict(unit_offset=True), dict(query_scale=0.7)], ids=str)
def test_gemma(changes):
    """Weights of 1 + w in float32, and a query that is rounded before its scale and after it."""
    sizes = (2, 8, 4, 256)
    step, other = step_heads(sizes, **changes), step_heads(sizes)
    assert_same_bits(found := by_kernel(step, 4), plain(step, 4))
    assert (np.asarray(found[0]) != np.asarray(plain(other, 4)[0])).any()


@interpreted
def test_a_slot_is_computed_by_itself():
    """A free slot's heads, which may be NaN, reach no other slot, and values are copied."""
    step = step_heads((3, 8, 2, 64))
    hurt = replace(step, heads_BAH=step.heads_BAH.at[1].set(jnp.nan))
    found, wanted = (by_kernel(x, 2) for x in (hurt, step))
    live = jnp.array([0, 2])
    assert_same_bits([x[live] for x in found], [x[live] for x in wanted])
    np.testing.assert_array_equal(wanted[1][:, :, 1], step.heads_BAH[:, -2:])


@interpreted
def test_no_races():
    interpret = InterpretGPUParams(detect_races=True)
    jax.block_until_ready(queries_and_entries(step_heads((2, 12, 4, 64)), 4, interpret))
    assert not interpret_pallas_call.get_races().races_found


@interpreted
@pytest.mark.parametrize("G", [3, 8])
def test_attention_reads_the_rows(G):
    """The same output and pages as from queries that attention pads, whatever pads them here."""
    B, K, H = 2, 2, 128
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    q_BNH, new_BK2H = normal(B, K * G, H), normal(B, K, 2, H)
    ints = partial(jnp.array, dtype=jnp.int32)
    lengths, pages = ints([5, 0]), ints([[1], [0]])
    of_cache = (normal(1, K, 2, 64, H), ints([0, 0]), ints([64, 0]), normal(2, K, 2, 64, H))
    inputs = DecodeInputs(q_BNH, new_BK2H, *of_cache, pages, lengths)
    rows_BKLH = jnp.full((B, K, 8, H), jnp.nan, jnp.bfloat16)
    rows_BKLH = rows_BKLH.at[:, :, :G].set(q_BNH.reshape(B, K, G, H))
    how = dict(num_splits=1, tuning=DecodeTuning(), interpret=InterpretGPUParams())
    run = partial(prefix_decode_attention, implementation="pallas", **how)
    # No other query is read where the rows are given.
    given = inputs._replace(q_BNH=jnp.zeros_like(q_BNH), queries_BXH=rows_BKLH.reshape(B, K * 8, H))
    assert_same_bits(run(given), run(inputs))


def config_of(family, **changes):
    sizes = dict(head_dim=64, num_heads=4, num_kv_heads=2, num_layers=2)
    return replace(CONFIGS[family], **(sizes | changes))


SERVED = {
    "llama": config_of("llama"),
    "qwen2": config_of("qwen2"),
    "qwen3": config_of("qwen3"),
    "gemma2": config_of("gemma2", attention_softcap=1e-3),
    "gemma3": config_of("gemma3"),
    "smollm3": config_of("smollm3"),
}
NOT_SERVED = {
    "norms of all heads": config_of("olmo2"),
    "pairs of neighbours": config_of("glm4", rotary_factor=1.0),
    "half of a head": config_of("phi3"),
    "other head dims": config_of("qwen3", head_dim=32),
}


def decoded(config, monkeypatch, attend_heads, dtype="bfloat16", slots=2, merged=True):
    """Hidden states and caches of two decode steps, and how often the kernel was called."""
    calls = []

    def counted(step, num_kv_heads):
        calls.append(step)
        return queries_and_entries(step, num_kv_heads, InterpretGPUParams())

    monkeypatch.setattr(kv_cache, "_queries_and_entries", counted)
    monkeypatch.setattr(heads, "MIN_SLOTS_WITHOUT_NORMS", 0)
    spec = model_spec(config, dtype=dtype)
    params = init_params(spec, jax.random.key(0))
    if merged:
        spec, params = merge_projections(spec, params)
    rows = jnp.arange(slots)
    cache = kv_cache.init_cache(
        config,
        num_prompts=slots,
        prompt_length=4,
        num_pages=slots,
        page_entries=kv_cache.page_entries(config, jnp.dtype(dtype), 4),
        num_slots=slots,
        dtype=jnp.dtype(dtype),
        state_dtype=jnp.dtype(dtype),
    )
    found = []
    for length in (1, 2):
        context = kv_cache.decode_context(
            config,
            kv_cache.keys_and_values(cache),
            rows,
            jnp.full((slots,), 3),
            rows[:, None],
            jnp.full((slots,), length),
            slots_per_prompt=1,
            heads=None,
        )
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "on_hopper", lambda: attend_heads)
            of_heads = kv_cache.decode_attend_heads(context, jnp.dtype(dtype), "auto", None)
        attend = kv_cache.decode_attend(context, "auto", None)
        mixers = Mixers(attend, kv_cache.decode_recur(None, rows >= 0, rows, None), of_heads)
        hidden, cache, _ = bind(spec, params).routed(
            rows[:, None] + 7,
            jnp.full((slots, 1), 2 + length),
            attend=mixers,
            cache=cache,
            residual_dtype="float32",
        )
        found.append(hidden)
    return [*found, *jax.tree.leaves(cache)], len(calls)


@interpreted
@pytest.mark.parametrize("family", SERVED)
def test_a_model_takes_the_kernel(family, monkeypatch):
    """Two steps, of which the second reads the keys that the first wrote."""
    config = SERVED[family]
    # Unjitted layers, so that no rounding is fused away.
    with jax.disable_jit():
        wanted, none = decoded(config, monkeypatch, False)
        found, calls = decoded(config, monkeypatch, True)
    with_rope = sum(table is not None for _, table in config.layer_kinds)
    assert none == 0 and calls == 2 * with_rope > 0
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("config", further(NOT_SERVED.values()), ids=NOT_SERVED)
def test_other_layers_are_computed_as_before(config, monkeypatch):
    _, calls = decoded(config, monkeypatch, True)
    assert calls == 0


@pytest.mark.parametrize("gate", [False, True])
def test_a_query_with_a_gate_is_computed_as_before(gate):
    """Its rows of the merged projection are not a head each."""
    config = config_of("qwen3", attention_gate=gate)
    graphdef, state = nnx.split(Attention(config, kind=(None, 0), form="merged", dtype="bfloat16"))
    layer = nnx.merge(graphdef, random_params(nnx.to_pure_dict(state), 0))
    rope = rope_tables(config, jnp.zeros((2, 1)))
    step = layer._step_heads(jnp.zeros((2, 1, config.hidden_size), jnp.bfloat16), rope)
    assert (step is None) == gate


def test_separate_projections_are_computed_as_before(monkeypatch):
    _, calls = decoded(SERVED["qwen3"], monkeypatch, True, merged=False)
    assert calls == 0


def test_where_attention_takes_heads(monkeypatch):
    config = SERVED["qwen3"]
    rows = jnp.arange(2)
    cache = kv_cache.LayerCache(*(jnp.zeros((2, 2, 2, 128, 64), jnp.bfloat16),) * 2)
    shape = (config, cache, rows, rows, rows[:, None], rows)
    context = kv_cache.decode_context(*shape, slots_per_prompt=1, heads=None)
    takes = partial(kv_cache.decode_attend_heads, context)
    bfloat16, float8 = jnp.bfloat16, jnp.float8_e4m3fn
    assert takes(bfloat16, "auto", None) is None  # no Hopper GPU is here
    assert takes(bfloat16, "pallas", None) is not None
    monkeypatch.setattr(kv_cache, "on_hopper", lambda: True)
    assert takes(bfloat16, "auto", None) is not None
    assert takes(bfloat16, "xla", None) is None
    assert takes(float8, "auto", None) is None
    assert takes(bfloat16, "auto", kv_cache.HeadAxes(("tensor",), ("tensor",))) is None
    without = context._replace(schedule=None)
    assert kv_cache.decode_attend_heads(without, bfloat16, "auto", None) is None
    with strict_scope(Strict(rows=8, block=64)):
        assert takes(bfloat16, "auto", None) is None


def test_what_fits():
    fits = partial(heads_fit, dtype=jnp.bfloat16, num_pairs=64, with_norms=True)
    few, many = MIN_SLOTS_WITHOUT_NORMS - 1, MIN_SLOTS_WITHOUT_NORMS
    assert fits((1, 48, 128)) and fits((1, 256, 128)) and not fits((1, 257, 128))
    assert not fits((1, 48, 128), dtype=jnp.float32) and not fits((1, 48, 128), num_pairs=32)
    assert not fits((1, 48, 96), num_pairs=48)
    assert not fits((few, 48, 128), with_norms=False) and fits((many, 48, 128), with_norms=False)


@pytest.mark.parametrize("quantization", ["none", "float8"])
def test_weights_that_were_cast_meet_kernels_in_their_dtype(quantization, monkeypatch):
    """A role's spec has the dtype of its stored weights, which no kernel may be chosen by."""
    spec, seen = model_spec(SERVED["qwen3"]), []
    assert spec.dtype == "float32"

    def fits(shape, dtype, *_, **__):
        seen.append(jnp.dtype(dtype))
        return False

    def attended(q, k, v, **_):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q

    monkeypatch.setattr(attention, "heads_fit", fits)
    monkeypatch.setattr(kv_cache, "attention", attended)
    settings = GenerationSettings(
        sampling=SamplingParams(max_new_tokens=4), attention="pallas", quantization=quantization
    )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), spec.params)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = (params, ints((2, 128)), ints((2,)), ints((2,)), key)
    jax.eval_shape(partial(generate, spec, settings=settings), *arguments)
    assert len(seen) >= 3 and set(seen) == {jnp.dtype("bfloat16")}
