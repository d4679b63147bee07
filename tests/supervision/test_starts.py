"""The record of starts: what each start ran, how it ended, and the alarms that a resume undoes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_alarmed_runs import config_of

from jaxrl_llm.config import apply_override
from jaxrl_llm.supervision.starts import NO_END, STARTS, Starts, read_starts
from jaxrl_llm.trainer.loop import train


def begun(folder: Path, **changes: Any) -> Starts:
    starts = Starts(folder=folder)
    line = {"step": 0, "config_text": "{}", "changed": {}, "devices": "1 x cpu", "undone": []}
    starts.begin(**line | changes)
    return starts


def test_the_next_start_says_how_the_last_one_ended(tmp_path: Path) -> None:
    begun(tmp_path).end("interrupted", 3)
    begun(tmp_path, step=3)  # killed
    begun(tmp_path, step=3, changed={"mesh.fsdp": [1, 2]}).end("finished", 9)
    first, second, third = read_starts(tmp_path)
    assert [each["start"] for each in (first, second, third)] == [1, 2, 3]
    assert [each["last_end"] for each in (first, second, third)] == ["", "interrupted", NO_END]
    assert first["end_step"] == 3 and "end" not in second and third["end"] == "finished"
    assert third["changed"] == {"mesh.fsdp": [1, 2]} and second["config"] == third["config"]


def test_a_torn_line_is_the_end_of_nothing(tmp_path: Path) -> None:
    begun(tmp_path)
    with open(tmp_path / STARTS, "a") as file:
        file.write('{"start": 1, "end": "fin')
    begun(tmp_path)
    assert [each.get("last_end") for each in read_starts(tmp_path)] == ["", NO_END]


@pytest.mark.nightly
def test_a_run_that_is_repeated_in_part_keeps_its_alarms(tmp_path: Path, capsys: Any) -> None:
    run, config = config_of(
        tmp_path, alarms__zero_variance="stop", alarms__cut_share__threshold="1", save_every="8"
    )
    assert train(config).alarmed  # at step 10
    (alarm,) = run.events()
    shutil.rmtree(run.step_path(10))
    train(apply_override(config, "alarms.zero_variance", "warn"))
    first, second = read_starts(run.run_dir)
    assert (first["step"], first["end"], first["end_step"]) == (0, "stopped by an alarm", 10)
    assert (second["step"], second["end"], second["end_step"]) == (8, "finished", 12)
    assert second["undone_alarms"] == [alarm]
    assert second["changed"] == {"alarms.zero_variance.action": ["stop", "warn"]}
    assert second["config"] != first["config"] and first["devices"] == "1 x cpu"
    assert "start 2 of this run; the last one ended: stopped by an alarm" in capsys.readouterr().out


def test_an_error_is_the_end_of_a_start(tmp_path: Path) -> None:
    run, config = config_of(tmp_path)

    def fails(report: Any) -> None:
        raise RuntimeError("a callback of the user")

    with pytest.raises(RuntimeError):
        train(config, callbacks=[fails])
    (line, end) = [json.loads(x) for x in (run.run_dir / STARTS).read_text().splitlines()]
    assert line["last_end"] == "" and end["end"] == "RuntimeError: a callback of the user"
