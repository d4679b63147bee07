"""Generating ahead: which policy answers which prompts, and a resumed run has the same bits."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import TinyRun, assert_close, assert_same_bits, read_jsonl

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.checkpoint.layout import ModelPath
from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.evaluation.answering import open_model
from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.models.base import bind
from jaxrl_llm.trainer.executor import kept_sizes
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.rewarding import RewardFunctions

STEPS = 4
APART = {"placement.rollout": "1"}
SMALL = {
    "total_steps": str(STEPS),
    "warmup": "null",
    "algorithm": "reinforce_plus_plus",
    "algorithm.use_kl_in_reward": "false",
    "data.val_tasks": "[]",
    "checkpoint.best_metric": "",
    "log.tensorboard": "false",
    "actor.ppo_epochs": "1",
}
ALWAYS = {"max_staleness": "1"}
PRIORITY = {"data.priority": "failure_rate"}
FILTER = {
    "algorithm": "dapo",
    "rollout.filter_groups.enable": "true",
    "rollout.filter_groups.shortage": "fill",
    "rollout.filter_groups.max_num_gen_batches": "2",
}
PARTS = {"max_staleness": "2", "partial_rollouts": "1"}
LORA = {"algorithm": "grpo", "actor.lora.rank": "2"}
LEARNING_IN_PARTS = PARTS | PRIORITY | {"save_every": "1", "checkpoint.keep_latest": "9"}


def begin(folder: Path, **changes: Any) -> TinyRun:
    tiny = TinyRun(folder)
    overrides = SMALL | {"run_dir": str(tiny.run_dir)} | changes
    if "algorithm" in changes:  # it may lack the setting
        overrides.pop("algorithm.use_kl_in_reward")
    train(load_config(str(folder / "tiny.py"), list(overrides.items())))
    return tiny


def tokens_of(tiny: TinyRun, step: int) -> list[Any]:
    return [s["tokens"] for (at, _), s in sorted(tiny.samples("train").items()) if at == step]


@pytest.fixture(scope="module")
def resting(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run whose policy never changes."""
    folder = tmp_path_factory.mktemp("resting")
    return begin(folder, **{"actor.optimizer.learning_rate": "0"})


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return begin(tmp_path_factory.mktemp("apart"), **APART, **ALWAYS)


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run that learns, with a checkpoint of every step."""
    return begin(tmp_path_factory.mktemp("parts"), **LEARNING_IN_PARTS)


def versions_of(tiny: TinyRun) -> list[int]:
    traced = {step: s["policy_version"] for (step, _), s in tiny.samples("train").items()}
    return [traced[step] for step in range(1, STEPS + 1)]


@pytest.mark.nightly
def test_the_policy_of_a_batch_follows_from_its_step(apart, resting):
    metrics, versions = apart.metrics(), [max(0, step - 2) for step in range(1, STEPS + 1)]
    assert versions_of(apart) == versions
    for step, version in enumerate(versions, start=1):
        assert metrics[step]["rollout/staleness"] == step - 1 - version
        # The first policy answers as a policy that never learns.
        same = tokens_of(apart, step) == tokens_of(resting, step)
        assert same == (version == 0), step
        assert "rollout_corr/rollout_is_mean" in metrics[step]  # on by itself
    assert "rollout_corr/rollout_is_mean" not in resting.metrics()[1]


@pytest.mark.nightly
def test_one_group_gives_the_run_of_two_and_grades_ahead(tmp_path, apart, monkeypatch):
    """If step 1 waited for the rewards of step 2, it would not be logged before them."""
    logged, log, score = threading.Event(), RunOutput.log, RewardFunctions.score

    def logging(self: RunOutput, step: int, metrics: Any) -> None:
        log(self, step, metrics)
        if step == 1:
            logged.set()

    def scoring(self: RewardFunctions, context: Any, step: int, *arrays: Any) -> Any:
        assert step != 2 or logged.wait(120)
        return score(self, context, step, *arrays)

    monkeypatch.setattr(RunOutput, "log", logging)
    monkeypatch.setattr(RewardFunctions, "score", scoring)
    one = begin(tmp_path, **ALWAYS)
    expected = apart.samples("train")
    for key, sample in one.samples("train").items():
        for name in ("tokens", "policy_version", "score"):
            assert sample[name] == expected[key][name], key
    for step, metrics in one.metrics().items():
        assert_close(metrics, apart.metrics()[step], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------- in parts


def version_of(step: int, index: int) -> int:
    """With max_staleness=2 and parts of one token: the policy that samples token `index`."""
    return min(max(0, step - 3) + index, step - 1)


@pytest.mark.nightly
def test_each_token_has_the_log_prob_of_its_own_version(in_parts):
    samples, metrics = in_parts.samples("train"), in_parts.metrics()
    expected: dict[int, list[float]] = {step: [] for step in range(1, STEPS + 1)}
    for version in range(STEPS):
        for (step, index), found in logprobs_under(in_parts, version).items():
            sample = samples[step, index]
            versions = [version_of(step, i) for i in range(len(sample["tokens"]))]
            assert sample["policy_version"] == versions[0]
            assert sample["last_policy_version"] == versions[-1]
            own = np.array(versions) == version
            given = np.array(sample["logprobs"])
            np.testing.assert_allclose(given[own], found[own], atol=1e-4)
            if version and not own.all() and own.any():
                assert np.abs(given[~own] - found[~own]).max() > 0  # the others are of others
            expected[step] += [step - 1 - version] * int(own.sum())
    for step, behind in expected.items():
        assert metrics[step]["rollout/staleness"] == pytest.approx(np.mean(behind))
        assert metrics[step]["rollout/staleness_max"] == max(behind)
        longer = sum(len(s["tokens"]) > 1 for (at, _), s in samples.items() if at == step)
        assert metrics[step]["rollout/continued"] == (longer if step > 1 else 0) <= 32
    assert metrics[STEPS]["rollout/continued"] > 0


def logprobs_under(tiny: TinyRun, version: int) -> dict[tuple[int, int], np.ndarray]:
    """Log-probs of all responses under the weights of a checkpoint, by plain forward passes."""
    path = tiny.step_path(version)
    model = open_model(ModelPath(path=str(path), checkpoint=path))
    lm = bind(model.spec, model.params)

    def attend(q: Any, k: Any, v: Any, cache: Any, /, *, window: Any) -> Any:
        return attention_reference(q, k, v, causal=True, window=window), None

    samples = tiny.samples("train")
    rows = np.zeros((len(samples), 8), np.int32)  # 4 of the prompt, 4 of the response
    for row, sample in zip(rows, samples.values(), strict=True):
        whole = [*sample["prompt_ids"], *sample["tokens"]]
        row[: len(whole)] = whole
    hidden, _ = lm(jnp.array(rows), jnp.arange(8)[None].repeat(len(rows), 0), attend=attend)
    logprobs = np.asarray(jax.nn.log_softmax(lm.logits(hidden)))
    found = {}
    for row, (key, sample) in zip(logprobs, samples.items(), strict=True):
        first, tokens = len(sample["prompt_ids"]) - 1, sample["tokens"]
        found[key] = np.array([row[first + i, token] for i, token in enumerate(tokens)])
    return found


@pytest.mark.slow
def test_without_learning_a_response_in_parts_is_that_of_one_go(tmp_path, resting):
    parts = begin(tmp_path, **PARTS, **{"actor.optimizer.learning_rate": "0"})
    assert parts.metrics()[STEPS]["rollout/continued"] > 0
    expected = resting.samples("train")
    for key, sample in parts.samples("train").items():
        assert sample["tokens"] == expected[key]["tokens"]
        np.testing.assert_allclose(sample["logprobs"], expected[key]["logprobs"], atol=1e-5)


# ------------------------------------------------------------------------- resume


def resume_copy(folder: Path, whole: TinyRun, **changes: Any) -> TinyRun:
    """A copy of a run without its last checkpoint, resumed."""
    *_, start, last = whole.saved_steps()
    shutil.copytree(whole.run_dir, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / f"global_step_{last}")
    (folder / "run" / "config.json").unlink()  # it names the other folder's reward
    again = begin(folder, **changes)
    assert again.saved_steps()[-2:] == [start, last]
    return again


def assert_same_run(found: TinyRun, expected: TinyRun) -> None:
    assert found.metrics() == expected.metrics()
    assert found.samples("train") == expected.samples("train")
    assert_same_bits(found.weights(STEPS), expected.weights(STEPS))


@pytest.mark.nightly
def test_unfinished_responses_are_in_a_checkpoint(tmp_path, in_parts):
    assert_same_run(resume_copy(tmp_path, in_parts, **LEARNING_IN_PARTS), in_parts)


@pytest.mark.parametrize(
    "changes",
    [
        APART | ALWAYS | FILTER,
        pytest.param(LORA | PARTS, marks=pytest.mark.slow),
        pytest.param(ALWAYS | PRIORITY, marks=pytest.mark.slow),
        pytest.param(APART | PARTS | PRIORITY, marks=pytest.mark.slow),
        pytest.param(APART | ALWAYS | FILTER | PRIORITY, marks=pytest.mark.slow),
    ],
    ids=["filter", "adapters in parts", "priority", "parts", "filter and priority"],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, changes):
    whole = begin(tmp_path / "whole", **changes)
    assert versions_of(whole)[-1] > 0
    assert_same_run(resume_copy(tmp_path / "again", whole, **changes), whole)


@pytest.mark.slow
def test_kill_9_leaves_no_mark_on_unfinished_responses(tmp_path):
    flags = [f"--config.{key}={value}" for key, value in (SMALL | PARTS).items()]
    whole, killed = TinyRun(tmp_path / "whole", *flags), TinyRun(tmp_path / "killed", *flags)
    whole.finish()
    killed.pause_at(4)
    killed.kill_when(lambda: killed.paused() and killed.step_path(2).exists())
    killed.unpause()
    killed.finish()
    assert_same_run(killed, whole)


@pytest.mark.slow
def test_other_settings_generate_again_what_was_ahead(tmp_path, apart):
    again = resume_copy(tmp_path, apart, max_staleness="0")
    assert list(again.metrics()) == list(apart.metrics())
    assert tokens_of(again, 3) != tokens_of(apart, 3)
    prompts = {key: s["prompt"] for key, s in apart.samples("train").items()}
    assert {key: s["prompt"] for key, s in again.samples("train").items()} == prompts


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rollouts": "2"},
        pytest.param({"max_staleness": "1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_begin_again_after_a_resume_with_other_settings(tmp_path, in_parts, changes):
    """Nothing of the batches ahead can be used: they begin under the policy of the resume."""
    again = resume_copy(tmp_path, in_parts, **(LEARNING_IN_PARTS | changes))
    assert list(again.metrics()) == list(in_parts.metrics())
    *_, start, last = in_parts.saved_steps()
    versions = [s["policy_version"] for (at, _), s in again.samples("train").items() if at == last]
    assert versions and min(versions) == start == max(versions)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_staleness": "2"}, {"rollout.n": "4"}, {"rollout.top_k": "3"}, FILTER],
    ids=str,
)
def test_batches_of_other_settings_are_not_taken_over(tmp_path, apart, changes):
    TinyRun(tmp_path)
    _, state = manager.restore(apart.step_path(STEPS), {})
    flags = SMALL | APART | ALWAYS | changes
    if "algorithm" in changes:
        flags.pop("algorithm.use_kl_in_reward")
    config = load_config(str(tmp_path / "tiny.py"), list(flags.items()))
    assert kept_sizes(state, config) == ([] if changes else [(STEPS + 1, 1)])
    del state["ahead"]["settings"]["routing_replay"]  # a version without the key
    off = replace(config, rollout=replace(config.rollout, routing_replay=False))
    assert bool(kept_sizes(state, off)) == (not changes)


EXPERTS = {
    "actor.hf_config.model_type": "qwen3_moe",
    "actor.hf_config.head_dim": "8",
    "actor.hf_config.num_experts": "5",
    "actor.hf_config.num_experts_per_tok": "2",
    "actor.hf_config.moe_intermediate_size": "16",
}
FILTERS = {"rollout.top_k": "4", "rollout.top_p": "0.9"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes", [pytest.param(EXPERTS, marks=pytest.mark.slow), FILTERS], ids=["experts", "filters"]
)
def test_what_the_rollout_chose_is_replayed_for_responses_in_parts(tmp_path, changes):
    """A policy that never changes has the same experts and kept tokens, so the ratio is 1."""
    tiny = begin(tmp_path, **changes, **PARTS, **{"actor.optimizer.learning_rate": "0"})
    metrics = tiny.metrics()
    assert any(
        row["rollout/continued"] > 0 for row in metrics.values() if "rollout/continued" in row
    )
    for step in range(1, STEPS + 1):
        assert metrics[step]["token_mult_prob_error"] < 1 + 1e-5


@pytest.mark.nightly
def test_what_is_generated_at_a_checkpoint_counts_for_the_next_step(in_parts):
    rows = read_jsonl(in_parts.run_dir / "metrics.jsonl")
    _, _, *later = rows  # of step 0, and of the first, before which no policy goes on
    assert later and all(row["timing_s/gen"] > 0 for row in later)


@pytest.mark.nightly
def test_a_run_that_ends_generates_nothing_at_its_save_and_goes_on_to_more_steps(
    tmp_path, in_parts
):
    """Older policies are gone after the save. So what they answered is there, and no more."""
    short = begin(tmp_path, **(LEARNING_IN_PARTS | {"total_steps": "2"}))
    _, state = manager.restore(short.step_path(2), {})
    newest = [batch["rounds"][0]["policy_version"] for batch in state["ahead"]["batches"]]
    assert newest == [0, 1] and [batch["begun"] for batch in state["ahead"]["batches"]] == [0, 1]
    longer = begin(tmp_path, **LEARNING_IN_PARTS)
    assert longer.samples("train") == in_parts.samples("train")
    assert_same_bits(longer.weights(STEPS), in_parts.weights(STEPS))


@pytest.mark.nightly
def test_a_batch_that_fails_ahead_does_not_take_the_steps_before_it(tmp_path, monkeypatch):
    score = RewardFunctions.score

    def scoring(self: RewardFunctions, context: Any, step: int, *arrays: Any) -> Any:
        if step == 2:
            raise ValueError("no reward for step 2")
        return score(self, context, step, *arrays)

    monkeypatch.setattr(RewardFunctions, "score", scoring)
    changes = APART | ALWAYS | FILTER
    whole = begin(tmp_path, total_steps="1", **changes)
    assert list(whole.metrics()) == [0, 1] and whole.step_path(1).exists()
    with pytest.raises(ValueError, match="no reward for step 2"):
        begin(tmp_path, total_steps="2", **changes)


# ------------------------------------------------------------------------- algorithms, refusals

OWN = """
from jaxrl_llm.algorithms.aggregation import aggregation
from jaxrl_llm.algorithms.algorithm import Algorithm

def advantage(scores, mask):
    return scores[:, None] * mask, scores[:, None] * mask

def loss(logprobs, advantages):
    return -logprobs * advantages, {}

def make():
    return Algorithm(
        advantage=advantage, policy_loss=loss, aggregate=aggregation("token-mean", scale=None)
    )
"""


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_weighted(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    changes = ALWAYS | {"algorithm": f"{tmp_path}/own.py:make", "total_steps": "3"}
    own = begin(tmp_path, **changes)
    rows = own.metrics()
    assert rows[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    assert rows[3]["rollout_corr/rollout_is_std"] > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (FILTER | ALWAYS, "nothing would overlap.*--config.placement.rollout=4-7"),
        ({"partial_rollouts": "2"}, "does not work with config.max_staleness=0"),
        (ALWAYS | {"partial_rollouts": "4"}, "max_response_length=4, so none would be cut"),
        (
            APART | ALWAYS | FILTER | {"partial_rollouts": "2"},
            "does not work with config.rollout.filter_groups.enable=true",
        ),
        (ALWAYS | {"algorithm": "sft"}, "offline training generates nothing ahead"),
    ],
)
def test_what_cannot_be_generated_ahead_is_refused(tmp_path, changes, message):
    TinyRun(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "tiny.py"), list(changes.items()))


@pytest.mark.nightly
def test_devices_that_generate_ahead_do_nothing_else(tmp_path):
    shared = ALWAYS | {"placement.rollout": "1-2", "placement.reference": "rollout"}
    with pytest.raises(ConfigError, match="the same ones; .*--config.placement.reference=actor"):
        begin(tmp_path, **shared)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "remax"}, "whole greedy answer.*--config.partial_rollouts=0"),
        ({"mesh.tensor": "2"}, "config.mesh.generation.tensor: responses in parts"),
    ],
)
def test_what_is_not_generated_in_parts_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path, **PARTS, **changes)
