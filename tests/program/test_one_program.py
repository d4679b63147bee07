"""A run under a reward model compiles its iteration once, and nothing after the first step."""

import json
from pathlib import Path

import pytest
from documented_metrics import documented
from tiny_run import TinyRun

from jaxrl_llm.config import load_config
from jaxrl_llm.program.counting import CompileCounter, count_compilations
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.output import RunOutput

CONFIG = Path(__file__).parents[2] / "configs" / "ppo_reward_model.py"
SMALL = {
    "total_steps": "4",
    "save_every": "2",
    "data.train_batch_size": "8",
    "data.train_tasks.0.size": "32",
    "data.val_tasks.0.size": "8",
    "actor.hf_config.hidden_size": "32",
    "actor.hf_config.intermediate_size": "64",
    "actor.hf_config.num_hidden_layers": "1",
    "actor.ppo_mini_batch_size": "4",
    "rollout.n": "2",
    "warmup.steps": "2",
    "warmup.batch_size": "16",
    "reward.model.training.steps": "2",
    "reward.model.training.batch_size": "16",
    "validation.every": "2",
    "log.tensorboard": "false",
}


@pytest.mark.nightly  # plain: two processes compile what one compiles
def test_one_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[int, int] = {}  # step -> compilations so far
    log = RunOutput.log

    def count_and_log(self: RunOutput, step: int, metrics: dict[str, float]) -> None:
        programs[step] = counter.count
        log(self, step, metrics)

    monkeypatch.setattr(RunOutput, "log", count_and_log)
    config = load_config(str(CONFIG), [*SMALL.items(), ("run_dir", str(tmp_path / "run"))])
    counter: CompileCounter
    with count_compilations() as counter:
        train(config)
    assert counter.programs("iteration") == 1  # program.py calls a segment so
    assert sorted(programs) == [0, 1, 2, 3, 4]
    # Step 2 validates and saves as steps 0 and 4 do: nothing of that is compiled again either.
    assert programs[1] == programs[2] == programs[3] == programs[4]
    assert_documented(tmp_path / "run")


def assert_documented(run_dir: Path) -> None:
    for file in run_dir.rglob("metrics.jsonl"):
        names = {name for row in file.read_text().splitlines() for name in json.loads(row)}
        missing = [name for name in names if not documented().fullmatch(name)]
        assert not missing, "these are not in docs/metrics.md"


def test_every_metric_of_a_run_is_documented(ppo_run: TinyRun) -> None:
    assert_documented(ppo_run.run_dir)


def test_documented_names_are_told_from_others() -> None:
    for name in ("critic/score/max", "rewards/exact_answer/std", "val-core/a_1x1/acc/mean@4"):
        assert documented().fullmatch(name)
    for name in ("critic/score/median", "actor/pg_los", "val-core/a/b/acc/mean@4"):
        assert not documented().fullmatch(name)
