"""Our Hopper kernels of attention under Pallas's interpreter, and the ranges they take."""

import dataclasses
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled, on_device
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.flash_attention import (
    Visibility,
    attention,
    attention_reference,
    packed_visibility,
    token_order,
)
from jaxrl_llm.kernels.flash_attention.common import Tuning, default_tuning, strict_tuning
from jaxrl_llm.kernels.flash_attention.kernel import hopper_attention
from jaxrl_llm.kernels.flash_attention.visibility import key_schedule, query_schedule, ranges_of
from jaxrl_llm.models import decoder

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="the interpreter of jax 0.10 multiplies neither registers nor transposed blocks",
)


@pytest.fixture(autouse=True)
def little_time_in_the_compiler():
    """Interpreted kernels are large programs that run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Prompt 1 with responses 2, 3 and 4, an unrelated sequence 5, padding; and a row of one sequence.
SEGMENTS = np.array(
    [np.repeat([1, 2, 3, 4, 5, 0], [70, 30, 90, 20, 26, 20]), np.repeat([9, 0], [255, 1])]
)
PREFIXES = np.where((SEGMENTS > 1) & (SEGMENTS < 5), 1, 0)


def random_qkv(heads, *, length, head_dim=64, rows=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(rows, length, n, head_dim) for n in (*heads, heads[1], heads[0])]
    return [on_device(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def with_gradients(function, q, k, v, dout):
    """Output and the gradients by q, k and v."""
    out, pull = jax.vjp(function, q, k, v)
    return out, *pull(dout.astype(out.dtype))


def in_float32(arrays):
    return [np.asarray(x, np.float32) for x in arrays]


@pytest.fixture(autouse=True)
def a_card_of_two_sms(monkeypatch):
    """Each program is interpreted, those without a step too."""
    monkeypatch.setattr(flash_attention.backward, "SMS", 2)


def interpret():
    return plgpu.InterpretGPUParams(detect_races=True)


def check(qkvd, *, tuning=None, real=None, by_runs=False, **masks):
    """Kernels against the float32 reference: 1 % of the norm of each result, padding exactly 0.

    With `real` (bool [B, T]) the kernels get NaN wherever a token is not real, in the cotangent
    too.
    """
    float32, given = in_float32(qkvd), qkvd
    if real is not None:
        seen = np.asarray(real)[:, :, None, None]
        given = [on_device(np.where(seen, x, np.nan), jnp.bfloat16) for x in float32]
        float32 = [np.where(seen, x, np.float32(0)) for x in float32]
    settings = {"tuning": tuning, "by_runs": by_runs, "interpret": interpret()}
    # Not one program: the interpreter's callbacks wait for threads that the rest may hold.
    ours = in_float32(with_gradients(partial(hopper_attention, **settings, **masks), *given))
    reference = partial(with_gradients, partial(attention_reference, **masks))
    expected = in_float32(compiled(reference, *float32))
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= 1e-2, f"{name}: relative error {error}"  # NaN fails too
        if real is not None:
            assert (a[~np.asarray(real)] == 0).all(), name


def packed(rows=slice(None), **options):
    segments, prefixes = jnp.asarray(SEGMENTS[rows]), jnp.asarray(PREFIXES[rows])
    return packed_visibility(segments, prefixes, **options), segments > 0


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_dim", "length"),
    [
        pytest.param((3, 1), 64, 256, marks=pytest.mark.slow),
        pytest.param((2, 2), 96, 128, marks=pytest.mark.slow),
        ((2, 1), 128, 128),
        pytest.param((1, 1), 256, 128, marks=pytest.mark.slow),
    ],
)
def test_causal(heads, head_dim, length, monkeypatch):
    if length > 128:  # jobs for more than half of a card of two SMs: one head after the other
        monkeypatch.setattr(flash_attention.common, "SMS", 2)
    check(random_qkv(heads, length=length, head_dim=head_dim))


@interpreted
def test_a_row_shorter_than_a_block():
    check(random_qkv((1, 1), length=5, rows=2))


@pytest.mark.slow
@interpreted
def test_overlapping_ranges_anywhere_in_a_row():
    # Every token real (a range may hold no padding), so prefixes may lie around and past it.
    visibility = random_ranges(1, padding=0.0)
    tuning = Tuning(block_k=64, dq_stages=2, dkv_stages=2)
    check(random_qkv((2, 1), length=256), visibility=visibility, tuning=tuning)


@interpreted
@pytest.mark.parametrize(("sms", "heads"), [(0, (2, 1)), (2, (2, 2))])  # keys whole, and in parts
def test_a_prompt_shared_by_three_responses_and_poisoned_padding(sms, heads, monkeypatch):
    monkeypatch.setattr(flash_attention.backward, "SMS", sms)
    if not sms:  # more jobs than the grid's slow axis takes
        monkeypatch.setattr(flash_attention.common, "MAX_SLOW_AXIS", 0)
    visibility, real = packed(slice(0, 1))
    check(random_qkv(heads, length=256), visibility=visibility, real=real)


@interpreted
def test_a_run_and_its_prompt_apart():
    """As strict runs compute it: the joined result and its gradient equal both together."""
    visibility, real = packed(slice(0, 1))
    tuning = strict_tuning(64, block=128)
    check(
        random_qkv((2, 1), length=256),
        visibility=visibility,
        real=real,
        tuning=tuning,
        by_runs=True,
    )


@pytest.mark.slow
@interpreted
def test_packed_rows_with_seven_heads_a_kv_head_and_blocks_of_64():
    segments = jnp.asarray(SEGMENTS[:1, 60:188])
    visibility = packed_visibility(segments)
    tuning = Tuning(block_k=64, stages=3, dq_stages=1, dkv_stages=1, ping_pong=False)
    qkvd = random_qkv((7, 1), length=128)
    check(qkvd, visibility=visibility, real=segments > 0, tuning=tuning)


def of_part(visibility, part=0, parts=2):
    """The ranges of the queries of one part of the row, and where in the row they are."""
    tokens = token_order(256, parts).reshape(parts, -1)[part]
    ranges = jax.tree.map(lambda x: jnp.asarray(x)[:, tokens], visibility)
    last = jnp.broadcast_to(tokens, ranges.start_BT.shape)
    return dataclasses.replace(ranges, last_BT=last), tokens


@interpreted
@pytest.mark.parametrize(
    "prefixes", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "apart"]
)
def test_queries_of_a_part_of_the_row(prefixes):
    """Against all queries of the row, of which the others have no cotangent."""
    segments = jnp.asarray(SEGMENTS[:1])
    whole = packed_visibility(segments, jnp.asarray(PREFIXES[:1]) if prefixes else None)
    part, tokens = of_part(whole, part=int(prefixes))
    q, k, v, dout = random_qkv((2, 1), length=256)
    k, v = (jnp.where(segments[..., None, None] > 0, x, 0) for x in (k, v))
    q, dout = q[:, tokens], dout[:, tokens]
    kernels = partial(hopper_attention, visibility=part, interpret=interpret())
    ours = in_float32(with_gradients(kernels, q, k, v, dout))

    def reference(q, k, v):
        rows = jnp.zeros((1, 256, 2, 64)).at[:, tokens].set(q)
        return attention_reference(rows, k, v, visibility=whole)[:, tokens]

    float32 = in_float32((q, k, v, dout))
    expected = in_float32(compiled(partial(with_gradients, reference), *float32))
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b), name


@interpreted
def test_windows():
    visibility, real = packed(slice(0, 1), window=40)
    qkvd = random_qkv((1, 1), length=256)
    check(qkvd, visibility=visibility, real=real)
    short = [x[:, :128] for x in qkvd]
    check(short, window=40, tuning=dataclasses.replace(default_tuning(64), block_k=64))


@interpreted
def test_sinks():
    """One far above all scores, one far below: the softmax of whole rows, and no gradient there."""
    segments = jnp.asarray(SEGMENTS[:1, 128:])
    real = (segments > 0)[..., None, None]
    visibility = packed_visibility(segments, window=40)
    sinks = jnp.array([0.7, 12.0, -40.0])
    *qkv, dout = random_qkv((3, 1), length=128)

    def results(function, real, garbage, dtype):
        function = partial(function, visibility=visibility)
        *given, dout_given = (jnp.where(real, x, garbage).astype(dtype) for x in (*qkv, dout))
        out, pull = jax.vjp(lambda q, k, v, s: function(q, k, v, sinks=s), *given, sinks)
        return out, *pull(dout_given.astype(out.dtype))

    kernels = partial(hopper_attention, interpret=interpret())
    ours = in_float32(results(kernels, real, jnp.nan, jnp.bfloat16))
    settings = {"garbage": 0.0, "dtype": jnp.float32}
    expected = in_float32(compiled(partial(results, attention_reference, **settings), real))
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), ours, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b), name
    assert abs(ours[4][2]) < 1e-6 < abs(ours[4][0])


@interpreted
@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_soft_cap(split):
    """Far below most scores; unseen keys and tokens that see nothing stay without effect."""
    segments = jnp.asarray(SEGMENTS[:1, 128:])
    visibility = packed_visibility(segments, window=40)
    tuning = dataclasses.replace(default_tuning(64), dkv_split=split)
    qkvd = random_qkv((3, 1), length=128)
    check(qkvd, visibility=visibility, real=segments > 0, softcap=0.8, tuning=tuning)


@pytest.mark.slow
@interpreted
def test_lengths_without_causality_and_split_gradients():
    lengths = jnp.array([70, 0], jnp.int32)
    real = jnp.arange(100) < lengths[:, None]
    tuning = Tuning(stages=1, dkv_split=True, dkv_block_q=128, dq_block_k=128)
    qkvd = random_qkv((1, 1), length=100, rows=2)
    check(qkvd, causal=False, lengths=lengths, real=real, tuning=tuning)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_kernels_lower_for_a_gpu(head_dim):
    def loss(q, k, v, dout):
        visibility, _ = packed()
        out = attention(q, k, v, visibility=visibility, implementation="pallas")
        return jnp.sum(out.astype(jnp.float32) * dout)

    operands = random_qkv((4, 2), length=256, head_dim=head_dim, rows=2)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Forward, dq, dk with dv, these two apart where registers are short; the sums of their parts.
    assert text.count("custom_call @mosaic_gpu") == (6 if head_dim == 256 else 5)


@pytest.mark.parametrize("function", [attention, attention_reference])
def test_other_implementations_take_visibility(function):
    visibility, real = packed()
    q, k, v, dout = random_qkv((4, 2), length=256, head_dim=8, rows=2)
    seen = np.asarray(real)[:, :, None, None]
    qkvd = [np.where(seen, x, np.float32(np.nan)) for x in in_float32((q, k, v, dout))]
    run = partial(with_gradients, partial(function, visibility=visibility))
    out, *gradients = in_float32(compiled(run, *qkvd))
    q, k, v, _ = qkvd
    for x in (out, *gradients):
        assert np.isfinite(x).all() and (x[~np.asarray(real)] == 0).all()
    for b, t, n in itertools.product(range(2), (0, 69, 70, 99, 100, 189, 209, 210, 235), (0, 3)):
        if not real[b, t]:
            continue
        seen = np.flatnonzero(
            (np.arange(256) <= t)
            & ((SEGMENTS[b] == SEGMENTS[b, t]) | (SEGMENTS[b] == (PREFIXES[b, t] or -1)))
        )
        scores = np.asarray(k, np.float64)[b, seen, n // 2] @ np.asarray(q, np.float64)[b, t, n]
        weights = np.exp(scores / np.sqrt(8) - (scores / np.sqrt(8)).max())
        expected = weights @ np.asarray(v, np.float64)[b, seen, n // 2] / weights.sum()
        np.testing.assert_allclose(out[b, t, n], expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 7, 300])
def test_packed_visibility_token_by_token(window):
    visible = np.asarray(packed(window=window)[0].dense())
    for b, t in itertools.product(range(2), range(0, 256, 3)):
        mine = SEGMENTS[b, t]
        sequence = [s for s in range(256) if mine and SEGMENTS[b, s] == (PREFIXES[b, t] or -1)]
        sequence += [s for s in range(t + 1) if mine and SEGMENTS[b, s] == mine]
        seen = sequence if window is None else sequence[-window:]
        assert np.flatnonzero(visible[b, t]).tolist() == seen


def random_ranges(seed, padding=0.1):
    """Ranges of any kind: before, around and past the token, empty ones among them."""
    random = np.random.default_rng(seed)
    t = np.arange(256)
    start, first, second = random.integers(0, 256, (3, 1, 8)).repeat(32, axis=2)
    start = np.where(random.random((1, 256)) < padding, 256, np.minimum(start, t))
    return Visibility(
        start_BT=jnp.asarray(start), prefix_start_BT=jnp.asarray(first), prefix_end_BT=second
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_schedules_visit_every_visible_block_once(seed, parts):
    visibility = random_ranges(seed) if seed else packed(window=50)[0]
    if parts > 1:
        visibility, _ = of_part(visibility, part=seed % 2)
    dense = np.asarray(visibility.dense(256))
    T = 256 // parts
    rows, num_blocks = len(dense), 8 // parts
    blocks = dense.reshape(rows, num_blocks, 32, 16, 16)

    def schedules(visibility):
        options = dict(causal=True, window=None, lengths=None, num_keys=256)
        ranges = ranges_of(T, T, visibility=visibility, **options)
        return (
            query_schedule(ranges, rows, block_q=32, block_k=16, tile_q=64),
            key_schedule(ranges, rows, block_q=32, block_k=16, tile_k=32),
        )

    schedule, of_keys = compiled(schedules, visibility)
    np.testing.assert_array_equal(np.asarray(schedule.full_RQK), blocks.all((2, 4)))
    jobs = np.asarray(schedule.jobs)
    assert sorted(map(tuple, jobs[:, :2])) == list(
        itertools.product(range(rows), range(num_blocks // 2))
    )
    assert (np.diff(jobs[:, 5]) <= 0).all()  # the longest first
    for row, tile, first, num_first, second, num, *_ in jobs.tolist():
        visited = [*range(first, first + num_first), *range(second, second + num - num_first)]
        assert len(set(visited)) == num
        assert set(visited) <= set(range(16))
        needed = np.flatnonzero(blocks[row, 2 * tile : 2 * tile + 2].any((0, 1, 3)))
        assert set(needed) <= set(visited)

    for row, tile, first, begin, end, num, *_ in np.asarray(of_keys.jobs).tolist():
        needed = np.flatnonzero(blocks[row, :, :, 2 * tile : 2 * tile + 2].any((1, 2, 3)))
        assert set(needed) <= set(range(first, first + num)) <= set(range(num_blocks))
        assert (begin, end) == (0, num)


@pytest.mark.parametrize("extra_jobs", [1, 5, 40, 1000])
@pytest.mark.parametrize("rows_of", ["causal", "packed", "short", "random"])
def test_divided_schedules_take_every_step_once(rows_of, extra_jobs):
    short = np.where(np.arange(256) < 100, SEGMENTS, 0)  # tiles that nothing sees
    visibility = {
        "causal": None,
        "packed": packed()[0],
        "short": packed_visibility(jnp.asarray(short), jnp.asarray(PREFIXES)),
        "random": random_ranges(1),
    }[rows_of]
    rows = 1 if rows_of == "random" else 2
    sizes = dict(block_q=16, block_k=16, tile_k=32, num_groups=3)

    def schedules(visibility):
        ranges = ranges_of(256, 256, causal=True, window=None, lengths=None, visibility=visibility)
        whole = key_schedule(ranges, rows, **sizes)
        return whole, key_schedule(ranges, rows, **sizes, extra_jobs=extra_jobs)

    # Without arrays, in numpy.
    made = schedules(None) if visibility is None else compiled(schedules, visibility)
    whole, schedule = np.asarray(made[0].jobs), made[1]
    assert isinstance(schedule.jobs, np.ndarray) == (rows_of == "causal")
    jobs, parts = np.asarray(schedule.jobs), np.asarray(schedule.jobs_of_tile)

    lengths = jobs[:, 4] - jobs[:, 3]
    assert len(jobs) == rows * 8 + extra_jobs
    assert lengths.max() <= -(-whole[:, 4].sum() // extra_jobs)
    # The longest first, but for the rest that a tile's last part may be.
    firsts = parts[parts[:, 1] > 0, 0]
    assert (np.diff(lengths[np.sort(firsts)]) <= 0).all()
    for row, tile, first, _, steps, num, *_ in whole.tolist():
        begin, count = parts[row * 8 + tile]
        mine = jobs[begin : begin + count]
        assert (mine[:, [0, 1, 2, 5]] == [row, tile, first, num]).all()
        taken = [step for part in mine.tolist() for step in range(part[3], part[4])]
        assert taken == list(range(steps))
    assert lengths.sum() == whole[:, 4].sum()  # jobs beyond those have no step
    assert (parts[:, 1] == 0).any() == (rows_of == "short")


@pytest.mark.parametrize("remat", ["projections", "attention", "full"])
def test_schedules_are_not_made_again_in_the_backward_pass(remat):
    visibility, _ = packed()
    q, k, v, _ = random_qkv((4, 2), length=256, rows=2)

    def layer(q):
        return attention(q, k, v, visibility=visibility, implementation="pallas")

    def sorts(kept):
        again = jax.checkpoint(layer, policy=kept)
        traced = jax.make_jaxpr(jax.grad(lambda q: again(q).astype(jnp.float32).sum()))(q)
        (backward,) = (
            e for e in traced.eqns if "jaxpr" in e.params and "remat" in str(e.primitive)
        )
        return len(re.findall(r"\bsort\[", str(backward.params["jaxpr"])))

    assert sorts(decoder._POLICIES[remat]) == 0
    assert sorts(None) > 0


def test_causal_schedules_are_constants_and_skip_what_lies_ahead():
    ranges = ranges_of(512, 512, causal=True, window=None, lengths=None, visibility=None)
    schedule = query_schedule(ranges, 2, block_q=64, block_k=128, tile_q=128)
    assert isinstance(schedule.jobs, np.ndarray)
    assert schedule.jobs[:, 5].tolist() == [4, 4, 3, 3, 2, 2, 1, 1]
    assert schedule.full_RQK.sum() == 2 * (0 + 1 + 2 + 3)


def test_what_does_not_fit_is_refused_with_a_remedy():
    q, k, v, _ = random_qkv((4, 2), length=256, rows=2)
    visibility, _ = packed()
    with pytest.raises(ValueError, match="use pallas, xla or auto"):
        attention(q, k, v, visibility=visibility, implementation="cudnn")
    with pytest.raises(ValueError, match="implementation='xla'"):
        attention(q[..., :8], k[..., :8], v[..., :8], implementation="pallas")
