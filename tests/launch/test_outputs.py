"""A command replaces what it wrote before, and no other file."""

import json

import pytest

import jaxrl_llm as rl
from jaxrl_llm.checkpoint import layout
from jaxrl_llm.config import ConfigError, load_config, to_json
from jaxrl_llm.launch import commands, outputs
from jaxrl_llm.launch.outputs import check_other_files
from jaxrl_llm.whole_files import write_whole

# The first lines of what the commands write.
WRITTEN = {
    outputs.PAGE: "<!doctype html>\n<html>",
    outputs.EVALUATION: json.dumps({"model": "runs/ppo", "config": "ppo", "metrics": {}}, indent=2),
    outputs.ANSWERS: '{"index":0,"data_source":"sums","row":0}\n',
    outputs.PLAN: json.dumps({"name": "ppo", "devices": 8, "placement": {}}, indent=2),
    outputs.DOCTOR: json.dumps({"versions": {"jax": "0.11"}, "devices": []}, indent=2),
}
OTHERS = {
    "config.json": to_json(load_config("ppo")),
    "metrics.jsonl": '{"training/global_step":0,"critic/score/mean":0.5}\n',
    "train.jsonl": '{"prompt": "1+1=", "ground_truth": "2"}\n',
    "model.safetensors": "\x80\x00",
}


@pytest.mark.parametrize("begins", WRITTEN)
def test_a_command_replaces_its_own_file_alone(tmp_path, begins):
    file = tmp_path / "file"
    for text in ("", WRITTEN[begins]):
        file.write_text(text)
        check_other_files("--output", file, begins)
    theirs = [text for other, text in WRITTEN.items() if other != begins]
    for text in [*OTHERS.values(), *theirs]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"--output=.*file exists, .*give a new file"):
            check_other_files("--output", file, begins)


@pytest.fixture
def run(tmp_path):
    """A folder that looks like a run's, and what each of its files holds."""
    for name, text in OTHERS.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    assert all((tmp_path / name).read_text() == text for name, text in OTHERS.items())


@pytest.mark.parametrize(
    "words",
    [
        ["report", "{run}", "--output={run}/config.json"],
        ["report", "{run}", "--output={run}/metrics.jsonl"],
        ["plan", "--config=ppo", "--quick", "--json={run}/config.json"],
        ["doctor", "--folder={run}", "--json={run}/config.json"],
    ],
)
def test_files_of_a_run_are_never_replaced(run, words):
    name, *flags = [word.format(run=run) for word in words]
    with pytest.raises(ConfigError, match="this command did not write it"):
        commands.COMMANDS[name](flags)


def test_an_evaluation_keeps_its_data_and_both_of_its_files(run):
    data = str(run / "train.jsonl")
    given = {"model": "owner/name", "config": "ppo", "overrides": {"data.val_files": [data]}}
    with pytest.raises(ConfigError, match=r"--answers=.*train\.jsonl exists"):
        rl.evaluate(**given, answers=data)
    with pytest.raises(ConfigError, match=r"--output=.*config\.json exists"):
        rl.evaluate(**given, output=run / "config.json")
    new = run / "new.json"
    with pytest.raises(ConfigError, match=r"--answers=.*is the file of the flag --output"):
        rl.evaluate(**given, output=new, answers=new)
    # Answers are data of another evaluation.
    earlier = run / "answers.jsonl"
    earlier.write_text(WRITTEN[outputs.ANSWERS])
    given["overrides"] = {"data.val_files": [str(earlier)]}
    with pytest.raises(ConfigError, match=r"--answers=.*is the file of the data"):
        rl.evaluate(**given, answers=earlier)


def test_a_full_disk_leaves_what_a_file_held(tmp_path, monkeypatch):
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    file.write_text("earlier")
    link.symlink_to(file)

    def full(path, text, **_):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(outputs.Path, "write_text", full)
        write_whole(link, "later")
    assert file.read_text() == "earlier" and sorted(tmp_path.iterdir()) == [link, file]
    write_whole(link, "later")
    assert file.read_text() == "later" and link.is_symlink()


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: path != tmp_path)  # of root, too
    with pytest.raises(ConfigError, match="--json=.*plan.json cannot be written"):
        outputs.check_parent("--json", tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="--output=.*/a/model cannot be written"):
        outputs.check_new_folder("--output", tmp_path / "a" / "model")


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "data", "gsm8k", "--output={0}/new"],
        ["prepare", "upcycle", "--model={1}", "--experts=2", "--output={0}/new"],
        ["plan", "--config=ppo", "--quick", "--json={0}/plan.json"],
        ["report", "{1}", "--output={0}/page.html"],
    ],
)
def test_a_folder_that_takes_no_files_is_refused_before_the_work(run, words):
    """Root may write in /proc by its permissions, and every file of it fails."""
    name, *flags = [word.format("/proc", run) for word in words]
    with pytest.raises(ConfigError, match="--(output|json)=/proc/.* cannot be written; give anoth"):
        commands.COMMANDS[name](flags)


def test_a_folder_under_a_name_that_none_can_have(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for folder in (tmp_path / "link", tmp_path / ("x" * 300), tmp_path / "link" / "new"):
        with pytest.raises(ConfigError, match="--output=.* cannot be written; give another dir"):
            commands.COMMANDS["prepare"](["data", "gsm8k", f"--output={folder}"])
    outputs.check_new_folder("--output", tmp_path / "new" / "inner")
    (tmp_path / "old").mkdir()
    outputs.check_new_folder("--output", tmp_path / "old")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    outputs.check_new_folder("--output", tmp_path / "link")


@pytest.mark.parametrize("output", ["/proc/new", "/dev/null/new", "{file}/new"])
def test_an_export_where_no_folder_can_be_made(tmp_path, output):
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_1"
    (checkpoint / layout.LOOP).mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").touch()
    (tmp_path / "file").touch()
    output = output.format(file=tmp_path / "file")
    with pytest.raises(ConfigError, match=f"--output={output} cannot be written; give another"):
        rl.export(tmp_path / "run", output)
