"""Prompts drawn by priority: the probabilities, who comes first and last, and an exact resume."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from documented_metrics import documented
from tiny_iteration import even_tokens, tiny_config
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.config import (
    Config,
    ConfigError,
    Custom,
    FailureRate,
    FilterGroupsConfig,
    RewardConfig,
    RewardModelConfig,
    load_config,
)
from jaxrl_llm.data.loader import PromptLoader
from jaxrl_llm.data.priority import (
    PriorityLoader,
    failure_rate,
    learnability,
    spread,
    weight_function,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.types import Prompt

MODULE = "jaxrl_llm.data.priority"
SAMPLES = 4


def prompts(count: int, offset: int = 0) -> list[Prompt]:
    return [Prompt(token_ids=(i + offset, 7), text=str(i), row=i) for i in range(count)]


def loader(count: int, weigh=failure_rate, **options) -> PriorityLoader:
    settings = {"batch_size": 1, "seed": 0, "uniform": 0.0, **options}
    return PriorityLoader(prompts(count), weigh, **settings)


def scores_of(rows: list[int], means: np.ndarray) -> np.ndarray:
    """SAMPLES scores a row, two of them a little over and two a little under its mean."""
    return (means[rows][:, None] + 0.01 * np.array([1, 1, -1, -1])).reshape(-1).astype(np.float32)


def take(priority: PriorityLoader, steps: range, means: np.ndarray) -> list[list[int]]:
    """Rows of a batch a step, each of them answered as well as before."""
    drawn = []
    for step in steps:
        drawn.append([prompt.row for prompt in priority.draw(step)])
        priority.update(step, scores_of(drawn[-1], means))
    return drawn


# ------------------------------------------------------------------------- weights


def test_weights_by_hand():
    mean = np.array([0.0, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(failure_rate(mean), [1, 0.75, 0.5, 0])
    np.testing.assert_allclose(learnability(mean), [0, 0.1875, 0.25, 0])
    # Wrong is -1 and right 3; a penalty below wrong and a bonus above right change nothing more.
    mean = np.array([-1.0, 0.0, 1.0, 3.0, -2.0, 4.0])
    np.testing.assert_allclose(failure_rate(mean, low=-1, high=3), [1, 0.75, 0.5, 0, 1, 0])
    np.testing.assert_allclose(learnability(mean, low=-1, high=3)[:4], [0, 0.1875, 0.25, 0])
    np.testing.assert_allclose(spread(np.array([0.0, 0.5, 2.0])), [0, 0.25, 4])


def test_the_memory_by_hand():
    known = {}

    def note(mean, std, visits, since):
        known.update(mean=mean, std=std, visits=visits, since=since)
        return mean

    priority = loader(3, note, batch_size=2)
    first = [prompt.row for prompt in priority.draw(1)]
    priority.update(1, np.array([0, 1, 1, 1, 0.25, 0.25, 0.25, 0.25], np.float32))
    second = [prompt.row for prompt in priority.draw(4)]
    priority.update(4, np.array([0, 0, 0, 1, 1, 1, 0, 0], np.float32))
    (last,) = {0, 1, 2} - set(first)
    # Of the two that were visited the likelier one, or the other, was drawn with the new one.
    assert second[0] == last and second[1] in first
    other = sum(first) - second[1]
    metrics = priority.metrics(6)
    by_row = {name: values.tolist() for name, values in known.items()}
    before = {first[0]: (0.75, 0.5), first[1]: (0.25, 0.0)}
    np.testing.assert_allclose(by_row["mean"][other], before[other][0])
    np.testing.assert_allclose(by_row["std"][other], before[other][1])
    np.testing.assert_allclose([by_row["mean"][last], by_row["std"][last]], [0.25, 0.5])
    np.testing.assert_allclose(
        [by_row["mean"][second[1]], by_row["std"][second[1]]], [0.5, np.sqrt(1 / 3)]
    )
    assert [by_row["visits"][row] for row in (last, second[1], other)] == [1, 2, 1]
    assert [by_row["since"][row] for row in (last, second[1], other)] == [3, 3, 6]
    mean = np.array(by_row["mean"])
    assert metrics == {
        "data/unvisited": 0.0,
        "data/effective_prompts": pytest.approx(mean.sum() ** 2 / (mean**2).sum()),
        "data/known_score": pytest.approx(mean.mean()),
        "data/longest_wait": 5.0,
    }


# ------------------------------------------------------------------------- draws


def test_single_draws_have_the_wanted_probabilities():
    means = np.array([0.0, 0.2, 0.5, 0.9, 1.0])
    priority = loader(5, uniform=0.2)
    take(priority, range(1, 6), means)
    draws = 4000
    rows = sum(take(priority, range(6, 6 + draws), means), [])
    weights = 1 - means
    expected = 0.2 / 5 + 0.8 * weights / weights.sum()
    found = np.bincount(rows, minlength=5) / draws
    assert expected[4] == pytest.approx(0.04)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / draws))
    assert abs(found - 0.2).max() > 0.1, "uniform draws would pass as well"


def test_batches_are_successive_draws_without_replacement():
    means = np.array([0.1, 0.4, 0.7, 0.9])
    priority = loader(4, batch_size=2)
    take(priority, range(1, 3), means)
    draws = 4000
    drawn = take(priority, range(3, 3 + draws), means)
    q = (1 - means) / (1 - means).sum()
    for pair in itertools.permutations(range(4), 2):
        expected = q[pair[0]] * q[pair[1]] / (1 - q[pair[0]])
        found = sum(tuple(rows) == pair for rows in drawn) / draws
        assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / draws), pair


def test_unvisited_prompts_come_first():
    means = np.linspace(0, 1, 10)
    priority = loader(10, batch_size=4)
    drawn = take(priority, range(1, 4), means)
    assert sorted(sum(drawn, [])[:10]) == list(range(10))
    assert len(set(drawn[2])) == 4
    assert priority.metrics(3)["data/unvisited"] == 0.0 and priority.epoch == 1
    other_seed = take(loader(10, batch_size=4, seed=1), range(1, 4), means)
    again = take(loader(10, batch_size=4), range(1, 4), means)
    assert drawn == again != other_seed


def test_no_prompt_starves_and_without_the_floor_one_does():
    means = np.full(20, 0.5)
    means[3] = 1.0
    steps = 600
    for uniform in (0.0, 0.3):
        priority = loader(20, batch_size=4, uniform=uniform)
        take(priority, range(1, 6), means)
        drawn = take(priority, range(6, 6 + steps), means)
        found = sum(3 in rows for rows in drawn) / steps
        least = 1 - (1 - uniform / 20) ** 4
        assert found >= least - 3 * np.sqrt(least / steps)
        assert (found > 0) == (uniform > 0)


def test_prompts_without_weight_fill_a_batch_that_nobody_else_can():
    means = np.ones(6)
    means[2] = 0.5
    priority = loader(6, batch_size=3)
    take(priority, range(1, 3), means)
    drawn = take(priority, range(3, 203), means)
    assert all(rows[0] == 2 and len(set(rows)) == 3 for rows in drawn)
    assert (
        np.bincount(sum((rows[1:] for rows in drawn), []), minlength=6)[[0, 1, 3, 4, 5]].min() > 50
    )
    means[2] = 1.0  # and weights that are all 0 are equal
    take(priority, range(203, 205), means)
    assert priority.metrics(204)["data/effective_prompts"] == pytest.approx(6)


def test_the_rounds_of_a_step_hold_no_prompt_twice_while_there_are_others():
    means = np.array([0.0, 0.0, 0.9, 0.9, 0.9, 0.9, 0.9])
    priority = loader(7, batch_size=2)
    take(priority, range(1, 5), means)
    for step in range(5, 25):
        rounds = []
        for _ in range(4):
            rounds.append([prompt.row for prompt in priority.draw(step)])
            priority.update(step, scores_of(rounds[-1], means))
        assert sorted(sum(rounds, [])[:7]) == list(range(7))


# ------------------------------------------------------------------------- resume


@pytest.mark.parametrize("stop", [0, 1, 3, 8])
def test_a_fresh_loader_continues_with_the_same_bits(stop):
    means = np.random.default_rng(0).random(11)
    settings = {"batch_size": 3, "seed": 5, "uniform": 0.1}
    whole = PriorityLoader(prompts(11), learnability, **settings)
    expected = take(whole, range(1, 13), means)
    first = PriorityLoader(prompts(11), learnability, **settings)
    take(first, range(1, stop + 1), means)
    state = json.loads(json.dumps(first.get_state()))
    second = PriorityLoader(prompts(11), learnability, **settings)
    second.set_state(state)
    assert second.get_state() == first.get_state()
    assert second.epoch == first.epoch
    assert take(second, range(stop + 1, 13), means) == expected[stop:]
    assert second.get_state() == whole.get_state()
    assert second.metrics(12) == whole.metrics(12)


def test_a_state_of_something_else_is_refused():
    state = loader(10, batch_size=4).get_state()
    for other, message in (
        ({"seed": 6}, "its seed is 0, here it is 6"),
        ({"batch_size": 5}, "its batch_size is 4, here it is 5"),
        ({"prompts": prompts(9)}, "its num_items is 10, here it is 9"),
        ({"prompts": prompts(10, offset=1)}, "its items_digest is"),
    ):
        options = {"prompts": prompts(10), "batch_size": 4, "seed": 0, "uniform": 0.0, **other}
        with pytest.raises(ValueError, match=message):
            PriorityLoader(weigh=failure_rate, **options).set_state(state)
    epochs = PromptLoader(prompts(10), batch_size=4, seed=0)
    with pytest.raises(ValueError, match="lacks 'shuffle'.*config.data.priority of the checkpoint"):
        epochs.set_state(state)
    with pytest.raises(ValueError, match="lacks 'mean'.*config.data.priority of the checkpoint"):
        loader(10, batch_size=4).set_state(epochs.get_state())


# ------------------------------------------------------------------------- refusals


def test_weights_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=r"shape \(\) for 2 prompts.*shape \(2,\)"):
        loader(3, lambda mean: mean.sum())
    with pytest.raises(ValueError, match="train_batch_size=3 takes all of the 3 training prompts"):
        loader(3, batch_size=3)
    for weigh, shown in ((lambda mean: -mean, "-0.5"), (lambda mean: mean / 0 * 0, "nan")):
        with np.errstate(all="ignore"), pytest.raises(ValueError, match="1 of 1.*not finite") as at:
            take(loader(3, weigh), range(1, 3), np.full(3, 0.5))
        assert f"{shown} to row" in str(at.value)


WEIGHTS = '''
def rested(mean, since, *, tilt: float = 1.0):
    """A weight that reads the steps that have gone by."""
    return (1.0 - mean) * since**tilt


def misspelt(means):
    return means


class Weights:
    pass
'''


class Prioritised:
    """A run of four steps, of one layer, that draws by a function in a file of the user's."""

    def __init__(self, folder: Path):
        self.run = TinyRun(folder)
        self.file = folder / "weights.py"
        self.file.write_text(WEIGHTS)
        self.flags = {
            "total_steps": "4",
            "save_every": "2",
            "warmup.steps": "1",
            "actor.hf_config.num_hidden_layers": "1",
            "actor.ppo_epochs": "1",
            "algorithm": "{kind: grpo, use_kl_loss: false}",
            "validation.every": "0",
            "log.tensorboard": "false",
            "data.train_tasks.0.size": "24",
            "data.train_batch_size": "8",
            "actor.ppo_mini_batch_size": "8",
            "data.priority": f"{self.file}:rested",
            "data.priority.settings.tilt": "0.5",
        }

    def config(self, **more: str) -> Config:
        changes = self.flags | {"run_dir": str(self.run.run_dir)} | more
        return load_config(str(self.run.folder / "tiny.py"), list(changes.items()))


FILTERED = {
    "rollout.filter_groups.enable": "true",
    "rollout.filter_groups.max_num_gen_batches": "2",
    "rollout.filter_groups.shortage": "fill",
}


def memory(run: TinyRun, step: int) -> PriorityLoader:
    """The loader of a run's checkpoint; of its prompts only the number matters."""
    state = manager.restore(run.step_path(step), {})[1]["data"]
    found = loader(state["num_items"], batch_size=state["batch_size"])
    own = found.get_state()
    found.set_state(state | {name: own[name] for name in ("items_digest", "answers_digest")})
    return found


@pytest.mark.slow
def test_a_run_remembers_every_group_and_resumes_exactly(tmp_path):
    """With dynamic sampling: groups that it does not keep are remembered, too."""
    whole, again = Prioritised(tmp_path / "whole"), Prioritised(tmp_path / "again")
    train(whole.config(**FILTERED))
    metrics, samples = whole.run.metrics(), whole.run.samples("train")
    assert any(metrics[step]["rollout/groups_varied"] < 8 for step in (1, 2, 3, 4))
    assert metrics[1]["data/unvisited"] > metrics[2]["data/unvisited"] == 0
    assert 8 < metrics[4]["data/effective_prompts"] <= 24
    scores: dict[str, list[tuple[int, float]]] = {}
    for (step, _), sample in samples.items():
        scores.setdefault(sample["prompt"], []).append((step, sample["score"]))
    assert len(scores) == 24
    found = memory(whole.run, 4)
    last = [[x for at, x in prompt if at == prompt[-1][0]][-2:] for prompt in scores.values()]
    known = metrics[4]["data/known_score"]
    np.testing.assert_allclose(np.mean(last), known, rtol=1e-6)
    assert found.metrics(4)["data/known_score"] == known
    longest = 4 - min(prompt[-1][0] for prompt in scores.values())
    assert metrics[4]["data/longest_wait"] == longest
    assert all(documented().fullmatch(name) for name in metrics[4] if name.startswith("data/"))

    shutil.copytree(whole.run.run_dir, again.run.run_dir)
    shutil.rmtree(again.run.step_path(4))
    (again.run.run_dir / "config.json").unlink()  # it names the other folder's reward
    train(again.config(**FILTERED))
    assert again.run.metrics() == metrics
    assert again.run.samples("train") == samples
    assert_same_bits(again.run.weights(4), whole.run.weights(4))
    assert memory(again.run, 4).get_state() == found.get_state()


def test_a_part_that_filters_leaves_the_whole_score_to_the_priority():
    """The part of the functions is enough for the filter; the model's comes in for the draws."""
    base = tiny_config(model_reward=False)
    reward = RewardConfig(functions=base.reward.functions, model=RewardModelConfig())
    groups = FilterGroupsConfig(enable=True, metric="even")
    functions = ArrayReward(even_tokens, names=("even",))
    for priority in (None, FailureRate()):
        config = replace(
            base,
            reward=reward,
            data=replace(base.data, priority=priority),
            rollout=replace(base.rollout, filter_groups=groups),
        )
        mesh = make_mesh(devices=jax.devices()[:1])
        (phase,) = plan_online(config, load_tokenizer("char"), mesh, functions).phases
        written = {
            n for segment in phase.collecting for stage in segment.stages for n in stage.writes
        }
        assert ("scores" in written) == (priority is not None)
        assert "reward_parts" in written


def test_configs_that_cannot_work_are_refused(tmp_path):
    prioritised = Prioritised(tmp_path)

    def path(name: str) -> dict[str, str]:
        return {"data.priority": name}

    prioritised.flags.pop("data.priority.settings.tilt")
    for more, message in (
        (path("failure_rat"), "did you mean 'failure_rate'"),
        ({"data.priority.tilt": "1.0"}, "is config.data.priority.settings.tilt"),
        (
            {"data.shuffle": "false"},
            "does not work with config.data.shuffle=false: prompts are drawn",
        ),
        ({"data.priority_uniform": "1.5"}, "config.data.priority_uniform=1.5: must be at most 1"),
        (path("spread") | {"rollout.n": "1"}, "config.rollout.n=1"),
        (
            {"algorithm": "sft"},
            "does not work",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prioritised.config(**more)


def test_a_users_weight_function_is_checked_when_it_is_loaded(tmp_path):
    file = Prioritised(tmp_path).file
    for name, settings, message in (
        ("misspelt", {}, "'means' is nothing that is known.*did you mean 'mean'"),
        ("rested", {"tilted": 1.0}, "no setting 'tilted'; did you mean 'tilt'"),
        ("restd", {}, "did you mean 'rested'"),
    ):
        with pytest.raises(ValueError, match=message):
            weight_function(Custom(path=f"{file}:{name}", settings=settings))


def test_batches_that_wait_for_their_scores_come_again_and_share_no_prompt():
    """As in generating ahead: batches 4 and 5 are drawn before the scores of batch 4."""
    settings = {"batch_size": 3, "seed": 5, "uniform": 0.1}
    first = PriorityLoader(prompts(11), learnability, **settings)
    means = np.random.default_rng(0).random(11)
    take(first, range(1, 4), means)
    waiting = [[prompt.row for prompt in first.draw(step)] for step in (4, 5)]
    assert not set(waiting[0]) & set(waiting[1])
    second = PriorityLoader(prompts(11), learnability, **settings)
    second.set_state(json.loads(json.dumps(first.get_state(pending=2))))
    assert [[prompt.row for prompt in second.draw(step)] for step in (4, 5)] == waiting
    for loader in (first, second):
        for step, rows in zip((4, 5), waiting, strict=True):
            loader.update(step, means[rows])
    assert take(first, range(6, 9), means) == take(second, range(6, 9), means)
    assert first.get_state() == second.get_state()


def test_a_sample_without_a_score_moves_no_priority():
    loader = PriorityLoader(prompts(4), learnability, batch_size=2, seed=5, uniform=0.1)
    first, second = (prompt.row for prompt in loader.draw(1))
    loader.update(1, np.array([1.0, np.nan, np.nan, np.nan], np.float32))
    memory = loader._memory
    assert memory["mean"][first] == 1.0 and memory["visits"][first] == 1
    assert memory["visits"][second] == 0


def test_a_state_keeps_the_batches_that_were_not_drawn_again_yet():
    """As in a run that goes on with a smaller max_staleness, and is killed again."""
    settings = {"batch_size": 3, "seed": 5, "uniform": 0.1}
    means = np.random.default_rng(0).random(11)
    first, second, third = (PriorityLoader(prompts(11), learnability, **settings) for _ in "123")
    waiting = [[prompt.row for prompt in first.draw(step)] for step in (1, 2)]
    second.set_state(first.get_state(pending=2))
    assert take(second, range(1, 2), means) == waiting[:1]
    third.set_state(json.loads(json.dumps(second.get_state())))
    assert take(third, range(2, 3), means) == waiting[1:]
    assert take(second, range(2, 5), means)[1:] == take(third, range(3, 5), means)
