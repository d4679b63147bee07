"""The config of a run by its folder, which may have been moved or copied."""

import pytest

from jaxrl_llm.config import load_config, run_folder, to_json


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that began in ./runs/mine, by its default folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(load_config("grpo", {"name": "mine"})))
    return folder


def test_a_run_that_stays_has_its_own_config(run, caplog):
    for path in ("runs/mine", run, run / "config.json"):
        assert load_config(path) == load_config("grpo", {"name": "mine"})
    assert not caplog.records


def test_a_moved_run_goes_on_where_it_is(run, caplog):
    """Before, it began again from step 0 in its old folder."""
    moved = run.rename(run.with_name("moved"))
    for path in (moved, moved / "config.json"):
        assert run_folder(load_config(path)) == moved
    assert "it goes on in" in caplog.text and "runs/mine" in caplog.text


def test_a_run_seen_from_another_working_folder(run, monkeypatch):
    elsewhere = run.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run_folder(load_config("../runs/mine")).resolve() == run


def test_another_folder_is_an_override(run):
    moved = run.rename(run.with_name("moved"))
    assert load_config(moved, {"run_dir": "new"}).run_dir == "new"


def test_a_copied_config_alone_is_no_run(run, tmp_path):
    """It is a template, as a Python file is."""
    template = tmp_path / "templates"
    template.mkdir()
    (run / "config.json").rename(template / "config.json")
    assert load_config(template) == load_config("grpo", {"name": "mine"})
