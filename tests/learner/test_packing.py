"""Packed rows against the samples themselves, and passes over them against padded ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from further import further

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.kernels import head_chunks
from jaxrl_llm.kernels.linear_logprob import linear_logprob
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    response_logprobs,
    response_scores,
    response_values,
    row_logprobs,
)
from jaxrl_llm.learner.losses import PolicyLoss, ValueLoss, with_counts
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import ROWS, SAMPLE_ROWS, packed_rows, plan_packing, rows_of
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import ModelConfig

P, R, GROUP, GROUPS = 5, 7, 4, 6
B = GROUP * GROUPS
VOCAB = 24


def batch(seed=0):
    """Groups of uneven prompts and responses; some responses, and one whole group, are empty.

    Two responses hold tokens that the policy did not sample: their mask has a hole.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, VOCAB, (GROUPS, P)).repeat(GROUP, axis=0)
    prompt_lengths = rng.integers(1, P + 1, GROUPS).repeat(GROUP)
    lengths = rng.integers(0, R + 1, B)
    lengths[[0, 9, B - 1]] = 0  # first, in the middle, last
    lengths[3 * GROUP : 4 * GROUP] = 0
    lengths[10] = R
    written = np.arange(R) < lengths[:, None]
    mask = written.copy()
    mask[10, 2:5] = mask[11, 0] = False  # tokens that the policy observed
    numbers = rng.normal(size=(4, B, R)) * mask
    return {
        # Padding that must reach nothing: no embedding has these ids.
        "prompts": np.where(np.arange(P) < prompt_lengths[:, None], prompts, 10**6).astype("i4"),
        "prompt_lengths": prompt_lengths.astype(np.int32),
        "responses": np.where(written, rng.integers(2, VOCAB, (B, R)), 10**6).astype(np.int32),
        "response_lengths": lengths.astype(np.int32),
        "mask": mask.astype(np.float32),
        "old_logprobs": (0.3 * numbers[0] - 3 * mask).astype(np.float32),
        "advantages": numbers[1].astype(np.float32),
        "values": numbers[2].astype(np.float32),
        "returns": numbers[3].astype(np.float32),
    }


def pack(fields, row_tokens, group, num_replicas):
    plan = PLAN(
        jnp.asarray(fields["prompt_lengths"]),
        jnp.asarray(fields["response_lengths"]),
        row_tokens=row_tokens,
        group=group,
        num_replicas=num_replicas,
    )
    samples = tuple(jnp.asarray(fields[name]) for name in SAMPLE_ROWS)
    return [ROW(plan, jnp.int32(i), *samples) for i in range(plan.num_rows)]


PLAN = jax.jit(plan_packing, static_argnames=("row_tokens", "group", "num_replicas"))
ROW = jax.jit(packed_rows)
SEEN = jax.jit(lambda rows, window: rows.visibility(window).dense(), static_argnums=1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("row_tokens", "group"), further([(12, 1), (17, 4), (40, 4), (12, 4), (200, 4)], first=3)
)
def test_every_response_token_sees_its_own_sequence(row_tokens, group, replicas, window):
    """From the rows alone: each response token once, and before it just its own prompt and past."""
    fields = batch()
    found = np.zeros((B, R), int)
    per_replica = B // replicas
    for rows in pack(fields, row_tokens, group, replicas):
        rows = jax.tree.map(np.asarray, rows)
        seen = np.asarray(SEEN(rows, window))
        included = set()
        for d, t in np.ndindex(rows.tokens.shape):
            if rows.sample[d, t] >= per_replica:
                continue
            i, j = d * per_replica + rows.sample[d, t], rows.column[d, t]
            found[i, j] += 1
            included.add(i)
            prompt = fields["prompts"][i, : fields["prompt_lengths"][i]]
            sequence = np.concatenate([prompt, fields["responses"][i, : j + 1]])
            expected = sequence if window is None else sequence[-window:]
            assert t < rows.num_targets[d]
            token = rows.target_tokens[d, t]
            np.testing.assert_array_equal(rows.tokens[d, seen[d, token]], expected)
            positions = np.arange(len(sequence))[-len(expected) :]
            np.testing.assert_array_equal(rows.positions[d, seen[d, token]], positions)
            assert rows.targets[d, t] == rows.tokens[d, token] == sequence[-1]
            before = rows.predictors[d, t]
            expected = sequence[:-1] if window is None else sequence[:-1][-window:]
            np.testing.assert_array_equal(rows.tokens[d, seen[d, before]], expected)
        assert included == set(np.flatnonzero(rows.included))
        assert (rows.num_targets == (rows.sample < per_replica).sum(axis=1)).all()
        assert rows.tokens.max() < VOCAB
    np.testing.assert_array_equal(found, np.arange(R) < fields["response_lengths"][:, None])


def test_rows_are_as_full_as_whole_samples_allow():
    """A row ends only where the next sample does not fit; a shared prompt is in it once."""
    fields = batch()
    lengths = fields["response_lengths"]
    for group in (1, GROUP):
        used, rows, last = 0, [], None
        for i in np.flatnonzero(lengths):
            again = last is None or group == 1 or last // GROUP != i // GROUP
            need = lengths[i] + again * fields["prompt_lengths"][i]
            if used + need > 30:
                rows.append(used)
                used, need = 0, lengths[i] + fields["prompt_lengths"][i]
            used, last = used + need, i
        rows.append(used)
        packed = pack(fields, 30, group, 1)
        assert [int(x.visibility(None).real().sum()) for x in packed] == rows


def test_no_response_at_all_gives_rows_without_tokens():
    fields = batch()
    fields["response_lengths"] = np.zeros_like(fields["response_lengths"])
    (rows,) = pack(fields, 12, GROUP, 2)
    assert not rows.visibility(None).real().any() and not rows.included.any()


MODELS = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": (4, 4)},
}


def spec_of(name, kind):
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        **MODELS[name],
    )
    return model_spec(config, kind)


def random_params(spec):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape) + (x.ndim == 1), x.dtype), spec.params
    )


def clean(fields):
    """With valid ids as padding, which padded rows need: theirs is embedded."""
    ids = {k: jnp.where(fields[k] < VOCAB, fields[k], 0) for k in ("prompts", "responses")}
    return fields | ids


LAYOUTS = {
    "packed": Packed(row_tokens=16),
    "shared": Packed(row_tokens=33, group=GROUP),
    "one row": Packed(row_tokens=400, group=GROUP),
    "two replicas": Packed(row_tokens=20, group=GROUP, num_replicas=2),
}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Packed(row_tokens=12, group=2), 18 / 24),  # 3 + 5 + 2 | 3 + 4 + 1
        (Packed(row_tokens=12), 24 / 36),  # 3 + 5 | 3 + 2, 3 + 4 | 3 + 1
        (Packed(row_tokens=9, group=2), 21 / 27),  # 3 + 5 | 3 + 2 | 3 + 4 + 1
        (Packed(row_tokens=12, group=2, num_replicas=2), 18 / 24),
        # Without the last token of each response: 2 + 5 + 2 | 2 + 4 + 1.
        (Packed(row_tokens=12, group=2, align=1), 16 / 24),
        (Padded(), 24 / 32),
        (Padded(num=2), 24 / 32),
        # Rows of 4 tokens for 2 of the prompt, and of 8 for the response without its last one.
        (Padded(num=2, align=4), 20 / 48),
    ],
)
def test_row_use_by_hand(layout, expected):
    assert compiled(layout.row_use, row_use_fields(5, 2, 4, 1)) == pytest.approx(expected)


def test_row_use_of_pairs():
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), row_use_fields(5, 2, 4, 1))
    assert compiled(Padded(num=2).row_use, pairs) == pytest.approx(24 / 32)


def test_a_sample_without_a_response_fills_nothing():
    layout = Packed(row_tokens=12, group=2)
    assert compiled(layout.row_use, row_use_fields(5, 2, 0, 0)) == pytest.approx(10 / 12)


def test_rows_are_no_longer_than_all_samples():
    """Four samples of at most 8 tokens never fill a row of 8,192: the row has 128."""
    use = compiled(Packed(row_tokens=8192).row_use, row_use_fields(5, 2, 4, 1))
    assert use == pytest.approx(24 / 128)


def row_use_fields(*lengths):
    """Prompts of 3 tokens, and responses of these lengths in 5."""
    return {
        "prompts": jnp.ones((4, 3), jnp.int32),
        "prompt_lengths": jnp.full(4, 3),
        "responses": jnp.ones((4, 5), jnp.int32),
        "response_lengths": jnp.array(lengths),
    }


@pytest.fixture
def small_chunks(monkeypatch):
    """A head that takes two tokens at a time, so that some chunks have no response."""
    monkeypatch.setattr(head_chunks, "DEFAULT_CHUNK_LOGITS", 2 * VOCAB)


def test_the_head_leaves_out_what_is_no_response(monkeypatch):
    fields = batch()
    spec = spec_of("llama", "causal_lm")
    params, seen = random_params(spec), 0

    def counting(hidden, weight, targets, *, lengths, **settings):
        nonlocal seen
        seen += int(lengths.sum())
        return linear_logprob(hidden, weight, targets, lengths=lengths, **settings)

    monkeypatch.setattr(forward, "linear_logprob", counting)
    for rows in pack(fields, 40, GROUP, 2):
        response_logprobs(params, rows, spec=spec, settings=ForwardSettings())
    assert seen == fields["response_lengths"].sum()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("name", "layout"),
    further([("llama", "two replicas"), ("llama", "packed"), ("mistral", "shared")]),
)
def test_passes_equal_the_padded_ones(name, layout):
    fields = {k: jnp.asarray(x) for k, x in batch().items()}
    settings = ForwardSettings()
    lm, scalar = spec_of(name, "causal_lm"), spec_of(name, "scalar")
    lm_params, scalar_params = random_params(lm), random_params(scalar)

    def passes(part):
        rows = rows_of(part)
        logprobs, entropy = response_logprobs(
            lm_params, rows, spec=lm, settings=settings, temperature=0.8, with_entropy=True
        )
        common = {"spec": scalar, "settings": settings}
        return {
            "logprobs": logprobs,
            "entropy": entropy,
            "values": response_values(scalar_params, rows, **common),
            "scores": response_scores(scalar_params, rows, part["response_lengths"], **common),
        }

    expected = jax.jit(partial(Padded().join, passes))(clean(fields))
    found = jax.jit(partial(LAYOUTS[layout].join, passes))(fields)
    for key, value in expected.items():
        lengths = fields["response_lengths"]
        real = jnp.arange(R) < lengths[:, None] if value.ndim == 2 else lengths
        np.testing.assert_allclose(found[key], jnp.where(real > 0, value, 0), atol=1e-5)
        assert jnp.abs(found[key]).max() > 0.1


@pytest.mark.parametrize("layout", further([LAYOUTS["shared"], Padded()]))
def test_tokens_between_sampled_ones_are_context(layout):
    """Each response is scored as the row of its tokens, and learns from the sampled ones alone."""
    fields = clean({k: jnp.asarray(x) for k, x in batch().items()})
    spec, settings = spec_of("llama", "causal_lm"), ForwardSettings()
    params = random_params(spec)
    algorithm = build_online(c.PPO())
    loss = PolicyLoss(algorithm=algorithm, spec=spec, settings=settings, temperature=1.0)

    @jax.jit
    def run(params):
        found = layout.join(
            lambda part: response_logprobs(params, rows_of(part), spec=spec, settings=settings)[0],
            fields,
        )
        counted = with_counts(fields | {"old_logprobs": found}, jnp.bool_(False))
        return found, layout.sum(lambda part: loss(params, part)[0], counted)

    logprobs, value = run(params)
    for i in (10, 11):
        prompt, length = int(fields["prompt_lengths"][i]), int(fields["response_lengths"][i])
        row = jnp.concatenate([fields["prompts"][i, :prompt], fields["responses"][i, :length]])
        expected = row_logprobs(params, row[None], spec=spec, settings=settings)[0, prompt:]
        np.testing.assert_allclose(logprobs[i, :length], expected, atol=1e-5)
        assert fields["mask"][i].sum() < length
    # All ratios are 1, so the loss is the mean advantage of the sampled tokens.
    mask = fields["mask"]
    np.testing.assert_allclose(value, -(fields["advantages"] * mask).sum() / mask.sum(), atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("loss_aggregation", "layout"),
    [
        pytest.param("token-mean", "one row", marks=pytest.mark.slow),
        ("seq-mean-token-mean", "two replicas"),
        pytest.param("prompt-mean", "two replicas", marks=pytest.mark.nightly),
    ],
)
def test_an_update_equals_the_padded_one(loss_aggregation, layout):
    fields = {k: jnp.asarray(x) for k, x in batch().items()}
    fields["reference_logprobs"] = fields["old_logprobs"] * 0.9
    fields["group_ids"] = jnp.arange(fields["mask"].shape[0]) % 3
    fields = clean(fields)
    algorithm = build_online(
        c.PPO(
            loss_aggregation=loss_aggregation, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01
        )
    )
    kinds = ("causal_lm", "scalar") if layout == "two replicas" else ("causal_lm",)
    for kind in kinds:
        spec = spec_of("llama", kind)
        params = random_params(spec)
        common = {"spec": spec, "settings": ForwardSettings()}
        loss = (
            PolicyLoss(algorithm=algorithm, temperature=0.9, **common)
            if kind == "causal_lm"
            else ValueLoss(algorithm=algorithm, **common)
        )

        def gradients(micro_batches, loss=loss, params=params):
            counted = loss.inputs(fields, jnp.bool_(False))
            cast_ahead = ForwardSettings().cast_ahead
            run = partial(accumulate, loss, cast_ahead=cast_ahead, micro_batches=micro_batches)
            return jax.jit(run)(params, counted)

        expected, metrics = gradients(Padded())
        found, found_metrics = gradients(LAYOUTS[layout])
        norm = np.sqrt(sum(np.square(x).sum() for x in map(np.asarray, jax.tree.leaves(expected))))
        assert norm > 1e-3
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6 * float(norm))
        parts, expected_parts = found_metrics.pop("micro_batches"), metrics.pop("micro_batches")
        assert expected_parts == 1 and (parts > 1) == (layout != "one row")
        for key in metrics.keys() - {"row_use"}:
            np.testing.assert_allclose(found_metrics[key], metrics[key], rtol=2e-5, atol=1e-6)


def test_strict_rows_hold_every_target_of_the_longest_samples():
    """Runs begin at multiples of 64, so a sample may need more than its own tokens."""
    P, R = 130, 100
    fields = {
        "prompts": jnp.ones((2, P), jnp.int32),
        "prompt_lengths": jnp.full(2, P, jnp.int32),
        "responses": jnp.ones((2, R), jnp.int32),
        "response_lengths": jnp.full(2, R, jnp.int32),
    }

    @jax.jit
    def targets(fields, i):
        parts = Packed(row_tokens=P + R, align=64).split(fields)
        return parts.num, parts.at(i)[ROWS].num_targets.sum()

    num, _ = targets(fields, 0)
    assert sum(int(targets(fields, i)[1]) for i in range(int(num))) == 2 * R


def test_strict_rows_of_whole_blocks_hold_no_padding():
    """The last token of a response predicts nothing: 64 tokens take one block, not two."""
    lengths = jnp.full(4, 64, jnp.int32)
    settings = {"row_tokens": 64 * 5, "group": 4, "num_replicas": 1, "align": 64}
    plan = compiled(plan_packing, lengths, lengths, **settings)
    assert int(plan.num_rows) == 1
    tokens = jnp.arange(1, 1 + 4 * 64, dtype=jnp.int32).reshape(4, 64)
    rows = ROW(plan, jnp.int32(0), tokens - 1000, lengths, tokens, lengths)
    predicted = rows.targets[0, : int(rows.num_targets[0])]
    np.testing.assert_array_equal(np.sort(predicted), tokens.reshape(-1))
    np.testing.assert_array_equal(rows.to_samples(rows.targets), tokens)
    assert not np.isin(rows.tokens[0], tokens[:, -1]).any()
