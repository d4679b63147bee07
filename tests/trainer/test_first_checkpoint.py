"""Which runs write a checkpoint before their first step, and what a run without it does again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import SUMS as ROWS
from tiny_program import EXACT, program_config

import jaxrl_llm as rl
from jaxrl_llm.checkpoint.soundness import UselessWeights
from jaxrl_llm.trainer.run import saves_first

pytestmark = pytest.mark.nightly


def config(folder: Path) -> rl.Config:
    cache = str(folder.parent / "compiled")
    return program_config(folder, save_every=0, compile_cache=cache, reward=EXACT)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))


def measured(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step that no clock decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("timing", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


def test_a_run_that_saves_only_at_its_end_begins_again_with_the_same_bits(tmp_path, capsys):
    """Until then another run does not overwrite what is there."""

    def fail(report):
        if report.step:
            raise KeyboardInterrupt  # as a kill: nothing is saved

    one, two = tmp_path / "one", tmp_path / "two"
    killed = config(one)
    with pytest.raises(KeyboardInterrupt):
        rl.train(killed, train_data=ROWS, callbacks=[fail])
    assert saved(one) == []
    before = (one / "metrics.jsonl").read_bytes()
    for other in (replace(killed, seed=1), replace(killed, resume="never")):
        with pytest.raises(rl.ConfigError, match="holds a run without a checkpoint"):
            rl.train(other, train_data=ROWS)
    assert (one / "metrics.jsonl").read_bytes() == before and b'"critic/score' in before
    for folder in (one, two):
        capsys.readouterr()
        rl.train(config(folder), train_data=ROWS)
        assert ("so the run begins again" in capsys.readouterr().out) == (folder == one)
        assert saved(folder) == ["global_step_2"]
    assert measured(one) == measured(two) and len(measured(one)) >= 2


def test_weights_that_grow_are_not_saved_without_a_first_checkpoint_either(tmp_path):
    once = config(tmp_path)
    optimizer = replace(once.actor.optimizer, learning_rate=1.0)
    once = replace(
        once,
        actor=replace(once.actor, optimizer=optimizer),
        checkpoint=rl.CheckpointConfig(max_growth=1.5),
    )
    with pytest.raises(UselessWeights, match="max_growth=1.5"):
        rl.train(once, train_data=ROWS)
    assert saved(tmp_path) == []


def test_which_runs_save_before_their_first_step(tmp_path):
    once = config(tmp_path)
    assert not saves_first(once)
    assert saves_first(replace(once, save_every=5)) and saves_first(replace(once, total_steps=0))
    # The end of a job leaves room for a save, whose time a run must know.
    assert saves_first(replace(once, checkpoint=rl.CheckpointConfig(save_by="+1h")))
    assert saves_first(replace(once, warmup=rl.SupervisedConfig(steps=1)))
