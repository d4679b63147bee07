"""Whole runs that are made to go wrong: the right alarm fires, with the right action."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import Config, apply_override, as_dict, load_config
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients
from jaxrl_llm.supervision.run_folder import differing_keys
from jaxrl_llm.trainer.loop import train

SMALL = {
    "total_steps": "12",
    "save_every": "0",
    "algorithm": "grpo",
    "data.val_tasks": "[]",
    "warmup.steps": "1",
    "actor.ppo_epochs": "1",
    "checkpoint.best_metric": "",
    "checkpoint.asynchronous": "false",
    "checkpoint.keep_latest": "2",
    "log.tensorboard": "false",
    "alarms": "off",
}
REWARDS = """
def constant(completions):
    return [0.5] * len(completions)


def length(completions):
    return [len(text) / 4 for text in completions]
"""


def config_of(folder: Path, reward: str = "constant", **changes: str) -> tuple[TinyRun, Config]:
    run = TinyRun(folder)
    (folder / "rewards.py").write_text(REWARDS)
    flags = SMALL | {"run_dir": str(run.run_dir)}
    flags |= {"reward.functions": f"[{folder}/rewards.py:{reward}]"}
    flags |= {name.replace("__", "."): value for name, value in changes.items()}
    return run, load_config(str(folder / "tiny.py"), list(flags.items()))


def test_a_constant_reward_stops_a_run_which_then_goes_on(tmp_path: Path, capsys: Any) -> None:
    run, config = config_of(
        tmp_path, alarms__zero_variance="stop", alarms__cut_share__threshold="1", save_every="8"
    )
    summary = train(config)
    assert summary.alarmed and not summary.interrupted and summary.step == 10
    (event,) = run.events()
    assert event["look_at"] and event == {
        "step": 10,
        "name": "zero_variance",
        "metric": "frac_reward_zero_std",
        "value": 1.0,
        "threshold": 0.95,
        "action": "stop",
        "look_at": event["look_at"],
    }
    shown = capsys.readouterr().out
    assert "alarm zero_variance (stop) at step 10: frac_reward_zero_std 1" in shown
    assert run.saved_steps() == [8, 10]
    # Killed during that save: the steps after 8 are done again, with the same event.
    before = (run.run_dir / "events.jsonl").read_bytes()
    shutil.rmtree(run.step_path(10))
    assert train(config).alarmed
    assert (run.run_dir / "events.jsonl").read_bytes() == before
    # The same command goes on: the condition still holds, and did not begin again.
    summary = train(config)
    assert not summary.alarmed and summary.step == 12
    assert (run.run_dir / "events.jsonl").read_bytes() == before
    assert list(run.metrics()) == list(range(13))


@pytest.mark.nightly
def test_a_reward_for_length_cuts_responses_and_saves(tmp_path: Path) -> None:
    run, config = config_of(tmp_path, "length", alarms__cut_share="save")
    summary = train(config)
    assert summary.step == 12 and not summary.alarmed
    (event,) = run.events()
    clipped = [run.metrics()[step]["response_length/clip_ratio"] for step in range(1, 11)]
    assert (event["name"], event["step"], event["action"]) == ("cut_share", 10, "save")
    assert event["value"] == pytest.approx(sum(clipped) / 10)
    assert run.saved_steps() == [10, 12]


@pytest.mark.parametrize(
    ("weight_decay", "what", "message"),
    [
        pytest.param("0.01", "gradient", "gradient of the actor", marks=pytest.mark.slow),
        ("1e6", "value", "parameters are not finite, the first is actor.decoder"),
    ],
)
def test_a_huge_learning_rate_names_the_parameters(
    tmp_path: Path, weight_decay: str, what: str, message: str
) -> None:
    run, config = config_of(
        tmp_path,
        "length",
        actor__optimizer__learning_rate="1e38",
        actor__optimizer__weight_decay=weight_decay,
        actor__optimizer__warmup_steps="0",
        log__tensorboard="true",
    )
    with pytest.raises(NonFiniteGradients, match=message):
        train(config)
    *_, last = run.events()
    assert (last["name"], last["action"]) == ("nonfinite", "stop") and last["value"] > 5
    assert last["metric"].startswith(f"{what} of actor.decoder.embed.table, ")
    (board,) = (run.run_dir / "tensorboard").glob("events.*")
    assert b"alarms/nonfinite" in board.read_bytes()


def test_the_shared_run_says_only_that_its_responses_are_cut(ppo_run: TinyRun) -> None:
    """It does not learn to end an answer in its 12 steps; nothing else is wrong with it."""
    found = [event["name"] for event in ppo_run.events()]
    assert found == ["cut_share"]
    assert ppo_run.metrics()[12]["response_length/clip_ratio"] > 0.9


def test_the_settings_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    """Somebody raises a threshold after a stop."""
    _, config = config_of(tmp_path)
    changed = apply_override(config, "alarms.kl.threshold", "2")
    assert differing_keys(as_dict(config), as_dict(changed)) == []
