"""The least time that the hardware allows, against sums by hand."""

import dataclasses
import itertools

import jax
import pytest
from tiny_models import HYBRID_EXPERTS

from benchmarks import workloads
from benchmarks.roofline import (
    H100,
    H200,
    Limits,
    decode_seconds,
    limits_of,
    prefill_seconds,
)
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.flops import kv_bytes_per_token, matmul_parameters, state_bytes_per_slot
from jaxrl_llm.models.shapes import SHAPES, num_parameters

SLOW = Limits(memory=1e9, matmul=1e11, matmul_float8=1.5e11, peak=1e12, link=1e9)


@pytest.mark.parametrize("float8", [False, True])
def test_decode_bound_sums_the_steps(float8):
    """In float8 all but the head is in 8 bits; the tiny model's head is its embedding."""
    config, lengths = SHAPES["tiny"], (3, 9, 1, 9)
    head = config.vocab_size * config.hidden_size
    layers, itemsize = num_parameters(config) - head, 1 if float8 else 2
    seconds = 0.0
    for step in range(max(lengths)):
        live = sum(length > step for length in lengths)
        multiplied = 2 * layers * live / (1.5e11 if float8 else 1e11) + 2 * head * live / 1e11
        dense = max((itemsize * layers + 2 * head) / 1e9, multiplied)
        seconds += dense + live * (7 + step) * kv_bytes_per_token(config, itemsize) / 1e9
    found = decode_seconds(config, 7, lengths, float8=float8, limits=SLOW)
    assert found == pytest.approx(seconds)


def test_decode_bound_of_a_hybrid_reads_and_writes_its_states():
    """Four value heads of 6 x 5 float32 numbers, and windows of three tokens of 44 bf16 numbers."""
    slow = dataclasses.replace(SLOW, matmul=1e20)
    attention = dataclasses.replace(HYBRID_EXPERTS, delta=None)
    with_states, without = (
        decode_seconds(config, 7, (3, 1), limits=slow) for config in (HYBRID_EXPERTS, attention)
    )
    rules = HYBRID_EXPERTS.num_layers - HYBRID_EXPERTS.num_attention_layers
    states = 2 * (3 + 1) * rules * (4 * 4 * 6 * 5 + 2 * 3 * (2 * 2 * 6 + 4 * 5)) / 1e9
    fewer_keys = (
        sum((7 + at) for at in (0, 1, 2, 0))
        * rules
        * (kv_bytes_per_token(attention) / attention.num_layers)
        / 1e9
    )
    weights = 3 * 2 * (matmul_parameters(HYBRID_EXPERTS) - matmul_parameters(attention)) / 1e9
    assert with_states - without == pytest.approx(states - fewer_keys + weights)


def test_decode_bound_of_a_mixture_reads_the_experts_that_tokens_hit():
    """The mean over all choices of four tokens that take two of three experts each."""
    config = dataclasses.replace(
        SHAPES["qwen3-30b-a3b"],
        num_layers=2,
        sliding_window=(None,) * 2,
        mixture=dataclasses.replace(
            SHAPES["qwen3-30b-a3b"].mixture, num_experts=3, experts_per_token=2
        ),
    )
    pairs = [{0, 1}, {0, 2}, {1, 2}]
    choices = list(itertools.product(pairs, repeat=4))
    hit = sum(len(set().union(*each)) for each in choices) / len(choices)
    reads_only = Limits(memory=1e9, matmul=1e30, matmul_float8=1e30, peak=1e12, link=1e9)
    one, four = (decode_seconds(config, 0, (1,) * n, limits=reads_only) for n in (1, 4))
    expert = 3 * config.hidden_size * config.mixture.expert_size
    assert (four - one) * 1e9 == pytest.approx(2 * 2 * expert * (hit - 2))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SHAPES["qwen3-30b-a3b"], num_layers=2, sliding_window=(None,) * 2),
        dataclasses.replace(SHAPES["deepseek-v3"], num_layers=4, sliding_window=(None,) * 4),
        dataclasses.replace(HYBRID_EXPERTS, hidden_size=512),
    ],
    ids=lambda config: config.family,
)
def test_bounds_in_float8_have_the_dtypes_of_the_arrays(config):
    """Of each kernel that a float8 rollout makes: its bytes, and the rate of its matmul."""
    mixture, read, of_token = config.mixture, 0.0, 0.0
    params = model_spec(config, dtype="bfloat16", form="float8").params["decoder"]["layers"]
    for path, kernel in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key != "kernel":
            continue
        chosen = kernel.ndim == 3 and "mlp" in str(path)  # one matrix for each expert
        size = kernel.size * (mixture.experts_per_token / mixture.num_experts if chosen else 1)
        read += size * kernel.dtype.itemsize
        of_token += 2 * size / (1.5e11 if kernel.dtype.itemsize == 1 and not chosen else 1e11)
    head = config.vocab_size * config.hidden_size
    reads_only = dataclasses.replace(SLOW, matmul=1e30, matmul_float8=1e30)
    found = decode_seconds(config, 0, (1,), float8=True, limits=reads_only)
    states = 2 * state_bytes_per_slot(config)
    assert found == pytest.approx((read + 2 * head + states) / 1e9, rel=0.01)
    multiplies_only = dataclasses.replace(SLOW, memory=1e30)
    found = decode_seconds(config, 0, (1,), float8=True, limits=multiplies_only)
    assert found == pytest.approx(of_token + 2 * head / 1e11, rel=0.01)
    in_bf16 = 2 * (matmul_parameters(config) - head) / 1e11
    attention = prefill_seconds(config, (1,), limits=SLOW) - in_bf16
    found = prefill_seconds(config, (1,), float8=True, limits=SLOW)
    assert found == pytest.approx(of_token + attention, rel=0.01)


@pytest.mark.parametrize(
    ("device_kind", "limits"),
    [("NVIDIA H200", H200), ("NVIDIA H100 80GB HBM3", H100), ("NVIDIA H100 PCIe", None)],
)
def test_each_card_has_its_own_limits(device_kind, limits):
    assert limits_of(device_kind) is limits


def test_prefill_bound_leaves_the_head_out():
    config = SHAPES["qwen2.5-1.5b"]
    D, F, L = config.hidden_size, config.intermediate_size, config.num_layers
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    multiplied = L * (2 * D * heads + 2 * D * kv_heads + 3 * D * F)
    lengths = (512, 7)
    projections = sum(2 * multiplied * n for n in lengths)
    attention = sum(L * 2 * heads * n**2 for n in lengths) / 1e11
    # Norms and biases are counted along.
    found, small = (prefill_seconds(config, lengths, float8=x, limits=SLOW) for x in (False, True))
    assert found == pytest.approx(projections / 1e11 + attention, rel=1e-3)
    assert small == pytest.approx(projections / 1.5e11 + attention, rel=1e-3)


def test_decode_bound_of_the_mix_is_the_known_one():
    lengths = workloads.rl_mix_lengths()
    rate = lengths.sum() / decode_seconds(SHAPES["qwen2.5-1.5b"], 512, tuple(lengths))
    assert rate == pytest.approx(87_000, rel=0.03)
