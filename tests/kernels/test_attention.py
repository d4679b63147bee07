"""Attention of whole rows, against float32 references and each other."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.flash_attention import attention, attention_reference, chosen_attention

# (query heads, KV heads), window
CASES = [
    ((4, 2), None),
    ((3, 1), None),
    ((9, 3), 3),
    ((5, 5), 1),
    ((4, 2), 50),
]


def random_qkv(heads: int, kv_heads: int, *, length: int = 7, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(heads), 3)
    shapes = [(2, length, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


def by_hand(q, k, v, *, window=None, causal=True, lengths=None, sinks=None, softcap=None):
    """Token by token in numpy float64, no mask arrays: an answer independent of the references."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        real = T if lengths is None else int(lengths[b])
        if t >= real:
            continue
        stop = min(t + 1, real) if causal else real
        start = 0 if window is None else max(0, t + 1 - window)
        kv_head = n // (N // k.shape[2])
        scores = k[b, start:stop, kv_head] @ q[b, t, n] / np.sqrt(H)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        sink = 0.0 if sinks is None else np.exp(np.float64(sinks[n]) - scores.max())
        out[b, t, n] = (weights / (weights.sum() + sink)) @ v[b, start:stop, kv_head]
    return out


@pytest.mark.parametrize(("heads", "window"), CASES)
def test_attention_equals_the_sum_by_hand(heads, window):
    q, k, v = random_qkv(*heads)
    expected = by_hand(q, k, v, window=window)
    for function in (attention, attention_reference):
        out = jax.jit(partial(function, window=window))(q, k, v)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_sinks_take_their_share_of_the_weights():
    q, k, v = random_qkv(4, 2)
    sinks = jnp.array([0.3, 90.0, -90.0, 2.0])
    expected = by_hand(q, k, v, window=3, sinks=sinks)

    def both(q, k, v, sinks):
        outs = [f(q, k, v, window=3, sinks=sinks) for f in (attention, attention_reference)]
        return [jnp.sum(jnp.sin(out)) for out in outs], outs

    gradients, outs = jax.jit(jax.jacrev(both, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *gradients)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=2e-6)
    with pytest.raises(ValueError, match="cudnn attention takes no sinks: use pallas"):
        attention(q, k, v, sinks=sinks, implementation="cudnn")


def test_a_soft_cap_bounds_the_scores():
    q, k, v = random_qkv(4, 2)
    how = {"window": 3, "softcap": 0.6}
    for function in (attention, attention_reference):
        out = jax.jit(partial(function, **how))(q, k, v)
        np.testing.assert_allclose(out, by_hand(q, k, v, **how), atol=2e-6)
    with pytest.raises(ValueError, match="cudnn attention takes no soft cap: use pallas"):
        attention(q, k, v, softcap=0.6, implementation="cudnn")


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_hide_padding_and_zero_its_output(causal):
    q, k, v = random_qkv(4, 2)
    lengths = jnp.array([3, 0], jnp.int32)
    expected = by_hand(q, k, v, causal=causal, lengths=lengths)
    for function in (attention, attention_reference):
        out = function(q, k, v, causal=causal, lengths=lengths)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_gradients_equal_the_reference_and_are_finite_for_an_empty_row():
    q, k, v = random_qkv(4, 2)
    lengths = jnp.array([4, 0], jnp.int32)

    def loss(function, *qkv):
        return jnp.sum(function(*qkv, window=3, lengths=lengths) ** 2)

    ours, expected = (
        jax.jit(jax.grad(partial(loss, function), argnums=(0, 1, 2)))(q, k, v)
        for function in (attention, attention_reference)
    )
    for a, b in zip(ours, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("most", [3, 4])
def test_queries_in_parts_have_the_results_and_gradients_of_the_reference(most, monkeypatch):
    monkeypatch.setattr(flash_attention.reference, "MOST_QUERIES", most)
    q, k, v = random_qkv(4, 2)
    weights = jax.random.normal(jax.random.key(9), q.shape)
    lengths = jnp.array([7, 4])

    def weighted(function, q, k, v):
        return jnp.sum(function(q, k, v, window=3, lengths=lengths) * weights)

    found, wanted = (
        jax.jit(jax.value_and_grad(partial(weighted, function), argnums=(0, 1, 2)))(q, k, v)
        for function in (partial(attention, implementation="xla"), attention_reference)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, wanted)


def test_bf16_keeps_its_dtype_and_stays_near_float32():
    q, k, v = random_qkv(4, 2, dtype="bfloat16")
    out = attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), by_hand(q, k, v), atol=0.03)


def test_causal_output_does_not_depend_on_later_tokens():
    q, k, v = random_qkv(9, 3)
    changed = [x.at[:, 4:].set(9.0) for x in (q, k, v)]
    np.testing.assert_array_equal(attention(q, k, v)[:, :4], attention(*changed)[:, :4])


CUDNN_CASES = [
    {},
    {"window": 3},
    {"lengths": (4, 0)},
    {"window": 3, "lengths": (4, 7)},
    {"causal": False, "lengths": (4, 7)},
    {"causal": False},
]


def gradient(implementation, case, *qkv):
    """Gradients of the sum of squares of attention's output by q, k and v."""
    case = {k: jnp.array(v, jnp.int32) if k == "lengths" else v for k, v in case.items()}

    def loss(*qkv):
        out = attention(*qkv, implementation=implementation, **case)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(*qkv)


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("case", CUDNN_CASES, ids=str)
def test_cudnn_call_lowers_for_a_gpu_without_a_bias(case, length, monkeypatch):
    private = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(private + "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(private + "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private + "is_cuda_compute_capability_equal", lambda capability: False)
    qkv = random_qkv(9, 3, length=length, dtype="bfloat16")
    traced = jax.jit(partial(gradient, "cudnn", case)).trace(*qkv)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__cudnn$fmha" in line]
    assert len(calls) == 2  # forward and backward
    causal = case.get("causal", True)
    padding = "lengths" in case or (length == 7 and not causal)
    mask = "_".join(["PADDING"] * padding + ["CAUSAL"] * causal) or "NO_MASK"
    for call in calls:
        assert "ScaleBias" not in call
        assert f"mask_type\\22: \\22{mask}\\22" in call
        assert f"sliding_window_length\\22: {case.get('window', 0)}" in call


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("case", CUDNN_CASES, ids=str)
def test_cudnn_equals_xla_on_a_gpu(case, length):
    qkv = random_qkv(9, 3, length=length, dtype="bfloat16")
    ours, expected = (jax.jit(partial(gradient, name, case))(*qkv) for name in ("cudnn", "xla"))
    for a, b in zip(ours, expected, strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        np.testing.assert_allclose(a, b, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    "word, dtype, head_dim, plain_length, expected",
    [
        ("auto", jnp.bfloat16, 128, 4096, "pallas"),
        ("auto", jnp.bfloat16, 64, 1024, "pallas"),
        ("auto", jnp.bfloat16, 128, 8192, "cudnn"),  # whose backward pass is ahead there
        ("auto", jnp.bfloat16, 64, 512, "cudnn"),
        ("auto", jnp.bfloat16, 96, 1024, "pallas"),
        ("auto", jnp.bfloat16, 96, 16384, "pallas"),
        ("auto", jnp.bfloat16, 96, 32768, "cudnn"),  # not measured
        ("auto", jnp.bfloat16, 128, 1100, "cudnn"),  # which needs no padded copy
        ("auto", jnp.bfloat16, 256, 1024, "cudnn"),
        ("auto", jnp.bfloat16, 128, None, "cudnn"),  # a window, or lengths
        ("auto", jnp.float16, 128, 1024, "cudnn"),
        ("auto", jnp.float32, 128, 1024, "xla"),
        ("auto", jnp.bfloat16, 80, 1024, "cudnn"),
        ("exact", jnp.bfloat16, 128, 8192, "pallas"),
        ("cudnn", jnp.bfloat16, 128, 1024, "cudnn"),
    ],
)
def test_the_fastest_is_chosen_on_hopper(
    word, dtype, head_dim, plain_length, expected, monkeypatch
):
    for name in ("on_hopper", "_on_nvidia_gpu"):
        monkeypatch.setattr(flash_attention, name, lambda: True)
    chosen = chosen_attention(word, dtype, head_dim, ranges=False, plain_length=plain_length)
    assert chosen == expected


def test_another_nvidia_gpu_takes_cudnn(monkeypatch):
    monkeypatch.setattr(flash_attention, "_on_nvidia_gpu", lambda: True)
    chosen = partial(chosen_attention, "auto", jnp.bfloat16, 128)
    assert chosen(ranges=False, plain_length=1024) == "cudnn"
    assert chosen(ranges=True) == "xla"


@pytest.mark.parametrize(
    "masks, plain_length",
    [
        ({}, 128),
        ({"window": 16}, None),
        ({"causal": False}, None),
        ({"lengths": jnp.array([128])}, None),
    ],
)
def test_rows_that_are_causal_and_no_more_are_told_as_such(masks, plain_length, monkeypatch):
    told = []

    def choose(word, *args, ranges, plain_length):
        told.append((ranges, plain_length))
        return "xla"

    monkeypatch.setattr(flash_attention, "chosen_attention", choose)
    x = jnp.ones((1, 128, 2, 8))
    attention(x, x, x, **masks)
    assert told == [(False, plain_length)]
