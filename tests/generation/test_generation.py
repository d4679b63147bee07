"""In-graph generation against a naive full forward, and its freedom from slots and batches."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_prompts import packed_by_hand
from tiny import model_config

from jaxrl_llm.generation import engine
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.packed_prompts import RowSizes
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.tail import SHORTEST_RESPONSE, default_tails
from jaxrl_llm.kernels.decode_attention import cache_length
from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.models.base import bind, init_params, model_spec
from jaxrl_llm.models.config import Mixture

VOCAB = 23
P, R = 6, 12
CONFIG = model_config(vocab_size=VOCAB, num_layers=1, sliding_window=(None,))
TWO_LAYERS = {"num_layers": 2, "sliding_window": (None, None)}


@functools.cache
def model(family="qwen2"):
    features = {
        "qwen2": {},
        "qwen3": {"family": "qwen3", "attention_bias": False, "qk_norm": True} | TWO_LAYERS,
        "mistral": {
            "family": "mistral",
            "attention_bias": False,
            "num_layers": 2,
            "sliding_window": (4, 4),
        },
        "experts": {
            "family": "qwen3_moe",
            "attention_bias": False,
            "qk_norm": True,
            "mixture": Mixture(num_experts=4, experts_per_token=2, expert_size=8, normalized=True),
        }
        | TWO_LAYERS,
        "gpt_oss": {
            "family": "gpt_oss",
            "attention_out_bias": True,
            "attention_sinks": True,
            "expert_bias": True,
            "swiglu_limit": 0.5,
            "num_layers": 2,
            "sliding_window": (4, None),
            "intermediate_size": 8,
            "mixture": Mixture(num_experts=4, experts_per_token=2, expert_size=8, normalized=True),
        },
        "64 heads a KV head": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 2},
    }
    config = replace(CONFIG, **features[family])
    spec = model_spec(config)
    params = init_params(spec, jax.random.key(3))
    # Larger than at the start of training, so that contexts matter and lengths are uneven.
    return spec, jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params)


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, (count, P)).astype(np.int32)
    lengths = rng.integers(1, P + 1, count).astype(np.int32)
    # A pad id outside the vocabulary: the padding must never reach a result.
    tokens = np.where(np.arange(P) < lengths[:, None], tokens, 9999)
    return tokens, lengths, np.arange(count, dtype=np.uint32) + 100


@functools.partial(jax.jit, static_argnames=("family", "sampling", "num_slots", "options"))
def run_jit(family, params, tokens, lengths, ids, key, sampling, num_slots, options):
    spec, _ = model(family)
    options = dict(options)
    limits = options.pop("limits_N", None)
    settings = GenerationSettings(
        sampling=sampling, num_slots=num_slots, pad_id=VOCAB - 1, **options
    )
    limits_N = None if limits is None else jnp.array(limits)
    return generate(spec, params, tokens, lengths, ids, key, settings, limits_N=limits_N)


def run(tokens, lengths, ids, *, num_slots, sampling=None, family="qwen2", **options):
    sampling = sampling or SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2, 5))
    params = model(family)[1]
    key = jax.random.fold_in(jax.random.key(7), 2)
    settings = tuple(sorted(options.items()))
    output = run_jit(family, params, tokens, lengths, ids, key, sampling, num_slots, settings)
    return jax.tree.map(np.asarray, output)


def full_logits(family, row):
    """float32 logits [T, V] of a whole row by plain causal attention."""
    padded = np.zeros(P + R, np.int32)
    padded[: len(row)] = row
    return np.asarray(full_logits_jit(family, model(family)[1], padded))[: len(row)]


@functools.partial(jax.jit, static_argnames="family")
def full_logits_jit(family, params, row):
    def attend(q, k, v, layer_cache, /, **how):
        return attention_reference(q, k, v, causal=True, **how), None

    lm = bind(model(family)[0], params)
    hidden, _ = lm(row[None], jnp.arange(len(row))[None], attend=attend)
    return lm.logits(hidden)[0]


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))


def response_of(output, i):
    return output.tokens[i][output.mask[i] == 1]


def rows_of(rows, tokens, prompts):
    return RowSizes(rows=rows, tokens=tokens, prompts=prompts)


def assert_same_tokens(left, right):
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_array_equal(left.mask, right.mask)
    np.testing.assert_array_equal(left.finished, right.finished)
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


def test_tokens_do_not_depend_on_slots_order_or_batch():
    tokens, lengths, ids = prompts(11)
    whole = run(tokens, lengths, ids, num_slots=0)
    spread = whole.mask.sum(1)
    assert spread.min() < 4 and spread.max() == R  # uneven, so that slots are really refilled
    for slots, size in ((1, (1, P, 1)), (3, (2, 2 * P + 1, 5))):
        found = run(tokens, lengths, ids, num_slots=slots, prefill=rows_of(*size))
        assert_same_tokens(found, whole)
    assert_same_tokens(run(tokens, lengths, ids, num_slots=3), whole)

    order = np.random.default_rng(1).permutation(11)
    permuted = run(tokens[order], lengths[order], ids[order], num_slots=3)
    np.testing.assert_array_equal(permuted.tokens, whole.tokens[order])

    others, other_lengths, other_ids = prompts(9, seed=9)
    mixed = run(
        np.concatenate([others, tokens[4:6]]),
        np.concatenate([other_lengths, lengths[4:6]]),
        np.concatenate([other_ids + 50, ids[4:6]]),
        num_slots=3,
    )
    np.testing.assert_array_equal(mixed.tokens[9:], whole.tokens[4:6])


def test_samples_of_one_prompt_differ_and_repeat_with_their_id():
    tokens, lengths, _ = prompts(1)
    tokens, lengths = np.repeat(tokens, 4, 0), np.repeat(lengths, 4)
    sampling = SamplingParams(max_new_tokens=R)
    output = run(tokens, lengths, np.array([0, 1, 2, 0], np.uint32), num_slots=2, sampling=sampling)
    assert len({tuple(row) for row in output.tokens}) == 3
    np.testing.assert_array_equal(output.tokens[0], output.tokens[3])


@pytest.mark.parametrize(
    ("slots", "size"),
    [
        (0, (5, P, 1)),
        pytest.param(3, (1, P, 1), marks=pytest.mark.slow),
        (9, (1, 30, 5)),
        pytest.param(7, (3, P, 2), marks=pytest.mark.slow),
    ],
)
def test_a_group_shares_its_prompt_and_nothing_else(slots, size):
    """The same tokens as with every sample's own copy, however groups meet slots and prefills."""
    tokens, lengths, _ = prompts(5)
    lengths[3] = 0  # a group of padding
    tokens, lengths = np.repeat(tokens, 4, 0), np.repeat(lengths, 4)
    ids = np.arange(20, dtype=np.uint32)
    alone = run(tokens, lengths, ids, num_slots=0)
    sizes = rows_of(*size)
    shared = run(tokens, lengths, ids, num_slots=slots, prefill=sizes, group=4)
    assert_same_tokens(shared, alone)
    assert not shared.mask[12:16].any() and shared.mask[16:, 0].all()
    # Each prompt once, in rows as they fill.
    expected, _ = packed_by_hand(lengths[::4][lengths[::4] > 0], sizes)
    assert shared.prefills == -(-len(expected) // sizes.rows)


def test_a_limit_ends_its_own_response_only():
    tokens, lengths, ids = prompts(11)
    limits = np.array([1, R, 3, R + 5, 2, 7, 4, R - 1, 1, 6, 5], np.int32)
    whole = run(tokens, lengths, ids, num_slots=3)
    cut = run(tokens, lengths, ids, num_slots=3, limits_N=tuple(limits.tolist()))
    expected = whole.mask * (np.arange(R) < limits[:, None])
    np.testing.assert_array_equal(cut.mask, expected)
    np.testing.assert_array_equal(cut.tokens, np.where(expected == 1, whole.tokens, VOCAB - 1))
    np.testing.assert_array_equal(cut.finished, whole.finished & (whole.mask.sum(1) <= limits))


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen3",
        pytest.param("mistral", marks=pytest.mark.slow),  # gpt_oss has windows too
        pytest.param("experts", marks=pytest.mark.nightly),  # so has gpt_oss
        "gpt_oss",
        pytest.param("64 heads a KV head", marks=pytest.mark.nightly),
    ],
)
def test_greedy_equals_a_naive_loop(family):
    tokens, lengths, ids = prompts(5)
    sampling = SamplingParams(max_new_tokens=R, temperature=0.0, stop_token_ids=(2,))
    output = run(tokens, lengths, ids, num_slots=2, sampling=sampling, family=family)
    for i in range(5):
        row = list(tokens[i, : lengths[i]])
        for _ in range(R):
            row.append(int(full_logits(family, np.array(row))[-1].argmax()))
            if row[-1] == 2:
                break
        np.testing.assert_array_equal(response_of(output, i), row[lengths[i] :])
        assert output.finished[i] == (row[-1] == 2)


def kept(logits, *, top_k, top_p):
    """The logits, -inf for tokens that are not in the top k or behind the mass of top p."""
    order = np.argsort(-logits)[:top_k]
    mass = np.exp(log_softmax(logits[order])).cumsum()
    order = order[: 1 + int((mass < top_p).sum())]
    return np.where(np.isin(np.arange(len(logits)), order), logits, -np.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_logprobs_equal_a_full_forward(temperature):
    tokens, lengths, ids = prompts(4)
    sampling = SamplingParams(
        max_new_tokens=R, temperature=temperature, top_k=10, top_p=0.9, stop_token_ids=(1, 2)
    )
    output = run(tokens, lengths, ids, num_slots=3, sampling=sampling)
    for i in range(4):
        response, start = response_of(output, i), lengths[i] - 1
        row = np.concatenate([tokens[i, : lengths[i]], response])
        logits = full_logits("qwen2", row)[start:-1] / (temperature or 1)
        if temperature:  # the sampler's own distribution, over the tokens that it keeps
            logits = np.stack([kept(x, top_k=10, top_p=0.9) for x in logits])
        expected = np.stack([log_softmax(x) for x in logits])[np.arange(len(response)), response]
        np.testing.assert_allclose(output.logprobs[i, : len(response)], expected, atol=1e-5)
        assert not output.logprobs[i, len(response) :].any()
        assert (output.tokens[i, len(response) :] == VOCAB - 1).all()
        assert (output.mask[i, : len(response)] == 1).all()


def test_a_stop_token_may_come_first():
    tokens, lengths, ids = prompts(7)
    every_token = SamplingParams(max_new_tokens=R, stop_token_ids=tuple(range(VOCAB)))
    output = run(tokens, lengths, ids, num_slots=2, sampling=every_token)
    np.testing.assert_array_equal(output.mask.sum(1), np.ones(7))
    assert output.mask[:, 0].all() and output.finished.all()
    assert (output.logprobs[:, 0] < 0).all()
    assert output.steps == 4  # seven tokens from two slots


def test_without_a_stop_token_every_response_has_full_length_and_is_not_finished():
    tokens, lengths, ids = prompts(5)
    for length in (1, 3):
        sampling = SamplingParams(max_new_tokens=length)
        output = run(tokens, lengths, ids, num_slots=2, sampling=sampling)
        assert output.mask.all() and not output.finished.any()
        assert output.steps == length * 3  # three rounds of two slots


def test_a_stop_at_the_last_position_is_finished():
    tokens, lengths, ids = prompts(5)
    full = run(tokens, lengths, ids, num_slots=2, sampling=SamplingParams(max_new_tokens=3))
    i = next(i for i, row in enumerate(full.tokens) if row[2] not in row[:2])
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(int(full.tokens[i, 2]),))
    output = run(tokens, lengths, ids, num_slots=2, sampling=sampling)
    assert output.finished[i] and output.mask[i].all()


def test_an_empty_queue_and_padding_rows():
    tokens, lengths, ids = prompts(11)
    nothing = run(tokens[:0], lengths[:0], ids[:0], num_slots=4)
    assert nothing.tokens.shape == (0, R) and nothing.steps == 0
    padding = run(tokens, np.zeros_like(lengths), ids, num_slots=3)
    assert not padding.mask.any() and not padding.finished.any() and padding.prefills == 0

    whole = run(tokens, lengths, ids, num_slots=3)
    gaps = np.arange(11) % 2
    output = run(tokens, np.where(gaps, lengths, 0).astype(np.int32), ids, num_slots=3)
    np.testing.assert_array_equal(output.tokens[gaps == 1], whole.tokens[gaps == 1])
    assert not output.mask[gaps == 0].any()


def test_fewer_prompts_than_slots():
    arrays = prompts(11)
    whole, few = run(*arrays, num_slots=0), run(*(x[:3] for x in arrays), num_slots=64)
    np.testing.assert_array_equal(few.tokens, whole.tokens[:3])
    np.testing.assert_array_equal(few.finished, whole.finished[:3])
    np.testing.assert_allclose(few.logprobs, whole.logprobs[:3], atol=1e-5)


def test_a_free_slot_is_refilled_at_once():
    tokens, lengths, ids = prompts(24)
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(1, 2, 5))
    sizes = rows_of(1, P, 2)
    output = run(tokens, lengths, ids, num_slots=8, sampling=sampling, prefill=sizes)
    assert output.stalled_slot_steps == 0  # no prefilled sample waits while a slot is free
    assert output.live_slot_steps == output.mask.sum()  # a step for every token
    assert output.prefills == len(packed_by_hand(lengths, sizes)[0]) < 24
    # With no slot idle while prompts were pending, only the last eight can leave slots free.
    longest = output.mask.sum(1).max()
    assert output.steps * 8 - output.live_slot_steps < 8 * longest


def test_on_a_gpu_a_single_prompt_is_decoded_among_eight_slots(monkeypatch):
    tokens, lengths, ids = prompts(1)
    alone = run(tokens, lengths, ids, num_slots=0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # The settings differ from those above, so they are traced again.
    output = run(tokens, lengths, ids, num_slots=0, attention="xla")
    assert_same_tokens(output, alone)
    assert output.slot_steps == 8 * output.steps and output.steps == alone.slot_steps
    asked = run(tokens, lengths, ids, num_slots=1, attention="xla")
    assert asked.slot_steps == asked.steps == output.steps


@pytest.mark.parametrize(
    ("slots", "tails"),
    [
        (70, ()),  # a tail that saves less than an eighth
        (200, (160, 64)),
        (257, (160, 64)),
        (512, (384, 256, 160, 64)),
        (1024, (896, 768, 640, 512, 384, 256, 160, 64)),
        (2048, (1792, 1536, 1280, 1024, 768, 512, 256, 160, 64)),
    ],
)
def test_tails_of_long_responses_are_whole_tiles_of_products(slots, tails):
    assert default_tails(slots, SHORTEST_RESPONSE) == tails
    assert default_tails(slots, SHORTEST_RESPONSE - 1) == ()


@pytest.mark.parametrize(
    ("samples", "num_slots", "without"),
    [(128, 0, True), (1024, 128, True), (1024, 127, False), (127, 1024, False)],
)
def test_options_above_the_slot_limit(samples, num_slots, without, monkeypatch):
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    assert engine.compiler_options(samples, num_slots) == {}  # not an option of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert engine.compiler_options(samples, num_slots) == (options if without else {})


def test_a_tail_gives_the_same_tokens_for_fewer_slot_steps():
    """One prompt in nine is answered at length; in between, all but those slots would be empty."""
    tokens, lengths, ids = prompts(24)
    limits = tuple(R if i % 9 == 0 else 2 + i % 3 for i in range(24))
    sampling = SamplingParams(max_new_tokens=R)
    options = {"sampling": sampling, "limits_N": limits, "num_slots": 16}
    plain = run(tokens, lengths, ids, tail_slots=(), **options)
    output = run(tokens, lengths, ids, tail_slots=(8, 3, 2), **options)
    assert_same_tokens(output, plain)
    assert output.steps == plain.steps and plain.slot_steps == plain.steps * 16
    assert output.live_slot_steps == plain.live_slot_steps == sum(limits)
    assert output.slot_steps < 0.8 * plain.slot_steps
    # Nothing to do in a tail, and a queue that never fills the slots.
    long = slice(None, None, 9)
    queue = tokens[long], lengths[long], ids[long]
    few = run(*queue, num_slots=3, tail_slots=(2, 1), sampling=sampling)
    np.testing.assert_array_equal(few.tokens, plain.tokens[long])
    np.testing.assert_allclose(few.logprobs, plain.logprobs[long], atol=1e-5)
    assert few.mask.all() and not few.finished.any()
    gaps = np.where(np.arange(24) % 8 == 0, lengths, 0).astype(np.int32)
    sparse = run(tokens, gaps, ids, tail_slots=(8, 3, 2), **options)
    np.testing.assert_array_equal(sparse.tokens[::8], plain.tokens[::8])
    assert sparse.mask.sum() == sum(limits[::8])


def test_prompts_are_prefilled_only_when_a_slot_needs_one():
    """Equal lengths free all slots at once, so each round takes one prefill of as many prompts."""
    tokens, _, ids = prompts(12)
    lengths = np.full(12, P, np.int32)
    sampling = SamplingParams(max_new_tokens=5)
    output = run(tokens, lengths, ids, num_slots=4, sampling=sampling)
    assert (output.prefills, output.steps, output.stalled_slot_steps) == (3, 15, 0)


def test_bf16_parameters_generate_with_bf16_caches():
    spec, params = model()
    tokens, lengths, ids = prompts(3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    settings = GenerationSettings(sampling=SamplingParams(max_new_tokens=4), num_slots=2)
    program = jax.make_jaxpr(
        lambda p: generate(spec, p, tokens, lengths, ids, jax.random.key(0), settings)
    )(half)
    prompt_cache, own_cache = f"[3,2,2,{cache_length(P, 8)},8]", f"[2,2,2,{cache_length(4, 8)},8]"
    for shape in (prompt_cache, own_cache):
        assert f"bf16{shape}" in str(program) and f":f32{shape}" not in str(program)


def test_a_float8_rollout_is_near_the_full_one():
    """Log-probs of the same tokens: greedy and a single token, so both read the same prompts."""
    tokens, lengths, ids = prompts(12)
    spec, params = model()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    spec = model_spec(spec.config, dtype="bfloat16")
    sampling = SamplingParams(max_new_tokens=6)

    def answer(quantization):
        settings = GenerationSettings(sampling=sampling, quantization=quantization)
        fn = partial(generate, spec, settings=settings)
        return jax.jit(fn)(half, tokens, lengths, ids, jax.random.key(0))

    full, small = answer("none"), answer("float8")
    same = np.cumprod(np.asarray(full.tokens == small.tokens), axis=1).astype(bool)
    assert same[:, 0].mean() > 0.5  # the draws are the same, the probabilities nearly
    gap = np.abs(np.asarray(full.logprobs - small.logprobs))[same]
    assert 0 < gap.mean() < 0.3 and np.isfinite(np.asarray(small.logprobs)).all()
    float8 = GenerationSettings(sampling=sampling, quantization="float8")
    caches = str(
        jax.make_jaxpr(partial(generate, spec, settings=float8))(
            half, tokens, lengths, ids, jax.random.key(0)
        )
    )
    assert f"f8_e4m3fn[12,2,{cache_length(6, 8)},8]" in caches


@pytest.mark.parametrize("cache_tokens", [0, 12, pytest.param(20, marks=pytest.mark.slow), 30])
def test_tokens_do_not_depend_on_pages(cache_tokens):
    """Pages of five tokens; room for every slot, for one response, and between."""
    tokens, lengths, ids = prompts(11)
    whole = run(tokens, lengths, ids, num_slots=0)
    paged = run(tokens, lengths, ids, num_slots=4, tokens_a_page=5, cache_tokens=cache_tokens)
    assert_same_tokens(paged, whole)
    assert (paged.stalled_slot_steps > 0) == (cache_tokens > 0)
    assert paged.live_slot_steps == whole.mask.sum()
    assert paged.slot_steps == 4 * paged.steps
