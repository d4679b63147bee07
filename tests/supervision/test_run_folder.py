"""One process and one config a run folder: what goes on, what is refused, what is left alone."""

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import launch_here

from jaxrl_llm.config import (
    Config,
    ConfigError,
    Custom,
    LogConfig,
    MeshConfig,
    RewardConfig,
    SupervisedConfig,
    to_json,
)
from jaxrl_llm.supervision import run_folder, run_lock
from jaxrl_llm.supervision.run_folder import differing_keys, open_run_folder
from jaxrl_llm.supervision.run_lock import LOCK


def config_in(folder: Path, **changes) -> Config:
    return replace(Config(run_dir=str(folder)), **changes)


def a_run(folder: Path, step: int = 5, **changes) -> Path:
    """What a run leaves behind that was stopped after `step` steps."""
    with open_run_folder(config_in(folder, **changes)) as opened:
        opened.write_config()
    checkpoint = folder / "checkpoints" / f"global_step_{step}"
    (checkpoint / "loop").mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").touch()
    return folder


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught, open_run_folder(config):
        pass
    return str(caught.value)


# ------------------------------------------------------------------------- config


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', '{"model_type": "llama",}'])
def test_the_folder_of_a_model_is_refused_and_keeps_its_config(tmp_path, text):
    """Also one whose config.json was edited by hand and cannot be read."""
    file = tmp_path / "model" / "config.json"
    file.parent.mkdir()
    file.write_text(text)
    message = refusal(config_in(file.parent))
    assert "is no folder of a run" in message and "--config.run_dir=" in message
    assert "model-2" in message
    assert file.read_text() == text


def test_another_config_is_refused_and_nothing_is_changed(tmp_path):
    """A sweep in a shell loop: the second run must not report the first one's numbers."""
    folder = a_run(tmp_path / "run")
    stored = (folder / "config.json").read_bytes()
    changed = config_in(folder, seed=3, total_steps=50)
    actor = replace(changed.actor, ppo_epochs=7)
    message = refusal(replace(changed, actor=actor))
    assert "run at step 5 with another config" in message
    assert "  seed: 0 there, 3 now\n" in message
    assert "  actor.ppo_epochs: 1 there, 7 now\n" in message
    assert "total_steps" not in message
    assert f"--config.run_dir={folder}-2\n" in message
    assert (folder / "config.json").read_bytes() == stored
    assert not (folder / LOCK).exists()
    (tmp_path / "run-2").mkdir()
    assert f"--config.run_dir={folder}-3" in refusal(changed)


@pytest.mark.parametrize("key", ["seed", "data"])
def test_what_a_message_offers_is_taken(tmp_path, key):
    """A checkpoint's place in its data is of no use with other data or another order of them."""
    folder = a_run(tmp_path / "run")
    checkpoint = f"{folder}/checkpoints/global_step_5"
    config = config_in(folder, actor=replace(Config().actor, ppo_epochs=7))
    message = refusal(config)
    assert f"--config.run_dir={folder}-2 --config.resume={checkpoint}" in message
    assert "actor.path=" not in message
    other = {"seed": 3, "data": replace(config.data, train_files=("other.jsonl",))}
    config = replace(config, **{key: other[key]})
    message = refusal(config)
    assert message.endswith(f"--config.run_dir={folder}-2 --config.actor.path={checkpoint}")
    assert "resume=" not in message
    message = refusal(replace(config, warmup=SupervisedConfig()))
    assert message.endswith(f"--config.actor.path={checkpoint} --config.warmup=null")


def test_messages_name_the_folder_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = a_run(Path("runs", "mine"))
    message = refusal(config_in(folder, seed=1))
    assert message.startswith("runs/mine holds ") and "--config.run_dir=runs/mine-2\n" in message
    with open_run_folder(config_in(folder)) as opened:
        assert opened.path == tmp_path / "runs" / "mine"
        assert opened.nothing_to_do(5).startswith("runs/mine is already at step 5 of 5;")


def test_length_logging_and_devices_may_change(tmp_path):
    folder = a_run(tmp_path / "run")
    config = config_in(
        folder,
        total_steps=1000,
        save_every=1,
        name="other",
        log=LogConfig(console_every=9),
        mesh=MeshConfig(fsdp=8),
    )
    config = replace(config, validation=replace(config.validation, every=3))
    config = replace(config, actor=replace(config.actor, micro_batch_size=2, remat="full"))
    with open_run_folder(config) as opened:
        assert opened.latest_step == 5
        opened.write_config()
    assert json.loads((folder / "config.json").read_text())["total_steps"] == 1000


def test_a_folder_without_a_checkpoint_holds_no_run(tmp_path):
    folder = tmp_path / "run"
    with open_run_folder(config_in(folder)) as opened:
        opened.write_config()
        assert opened.latest_step is None
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)  # cut off while it was written
    with open_run_folder(config_in(folder, seed=3)) as opened:
        opened.write_config()
    assert json.loads((folder / "config.json").read_text())["seed"] == 3


def test_a_run_of_a_version_without_a_key_goes_on(tmp_path):
    folder = a_run(tmp_path / "run")
    stored = json.loads((folder / "config.json").read_text())
    del stored["validation"]["graders"], stored["data"]["system_prompt"], stored["data"]["columns"]
    (folder / "config.json").write_text(json.dumps(stored))
    with open_run_folder(config_in(folder)) as opened:
        assert opened.latest_step == 5
    config = config_in(folder)
    changed = replace(config, data=replace(config.data, system_prompt="be brief"))
    assert '  data.system_prompt: "" there, "be brief" now' in refusal(changed)


def test_a_damaged_config_is_not_guessed(tmp_path):
    folder = a_run(tmp_path / "run")
    (folder / "config.json").write_text('{"seed": ')
    assert "config.json is damaged" in refusal(config_in(folder))


@pytest.mark.parametrize(
    ("stored", "new", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", 1, 2)]),
        ({"a": None}, {"a": {"b": 2}}, [("a", None, {"b": 2})]),
        ({"a": [1, 2]}, {"a": [1, 3]}, [("a.1", 2, 3)]),
        ({"a": [1]}, {"a": [1, 2]}, [("a", [1], [1, 2])]),
        ({"a": 1}, {"b": 1}, [("b", "(not set)", 1), ("a", 1, "(not set)")]),
        ({"critic": {"remat": "none"}}, {"critic": {"remat": "full"}}, []),
        ({"log": {"x": {"y": 1}}}, {"log": {}}, []),
    ],
)
def test_differing_keys(stored, new, expected):
    assert differing_keys(stored, new) == expected


def test_a_run_with_all_steps_done_says_so(tmp_path):
    folder = a_run(tmp_path / "run", step=5)
    with open_run_folder(config_in(folder)) as opened:
        assert opened.nothing_to_do(6) == ""
        for total in (5, 4):
            message = opened.nothing_to_do(total)
            assert f"already at step 5 of {total}; nothing to do" in message
            assert "--config.total_steps" in message and f"run_dir={folder}-2" in message


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        message = refusal(config_in(path))
        assert str(path) in message and "--config.run_dir" in message and "\n" not in message
    message = refusal(config_in(tmp_path / "[1e-6]" / "run"))
    assert "has one of * ? [ in its path" in message and not (tmp_path / "[1e-6]").exists()


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    """As it is for a user who is not root."""

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(run_lock, "_acquire", denied)
    message = refusal(config_in(tmp_path / "run"))
    assert "Permission denied" in message and "--config.run_dir" in message


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with open_run_folder(config_in(Path("~/run"))) as opened:
        assert opened.path == tmp_path / "run"
    assert not (tmp_path / "~").exists()


# Before the second try, another process takes the folder.
TWO = """
import subprocess, sys
from pathlib import Path
import jax
from jaxrl_llm.config import Config
from jaxrl_llm.distributed import multihost
from jaxrl_llm.launch import runtime
from jaxrl_llm.launch.main import run
from jaxrl_llm.supervision.run_folder import open_run_folder

def main(argv):
    runtime.prepare()
    runtime.join_processes()
    config = Config(run_dir=argv[0])
    with open_run_folder(config) as folder:
        lock = folder.path / "run.lock"
        Path(f"{argv[0]}.{jax.process_index()}").write_text(str(lock.exists()))
        multihost.barrier("looked")
    if multihost.is_main():
        hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2)"
        hold += "; print('held', flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        other = subprocess.Popen([sys.executable, "-c", hold, str(lock)], **pipes)
        other.stdout.readline()
    multihost.barrier("locked")
    try:
        with open_run_folder(config):
            return 0
    finally:
        if multihost.is_main():
            other.kill()

run(main)
"""


def test_several_processes_share_a_folder_and_are_refused_together(tmp_path):
    folder, script = tmp_path / "run", tmp_path / "program.py"
    script.write_text(TWO)
    ended = launch_here("--processes=2", "--", str(script), str(folder))
    assert [(tmp_path / f"run.{i}").read_text() for i in (0, 1)] == ["True", "True"], ended.stderr
    assert ended.returncode == 2
    for rank in (0, 1):
        assert f"[{rank}] error: another process uses the run folder {folder}" in ended.stderr


def test_a_key_that_an_older_version_lacks_may_be_null():
    assert differing_keys({"data": {}}, {"data": {"train_rows": None}}) == []
    assert differing_keys({"data": {}}, {"data": {"train_rows": {"num_rows": 1}}}) != []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, "config.seed: 0 in process 0, 7 in process 1"),
        ({"run_dir": "other"}, 'config.run_dir: .* in process 0, "other" in process 1'),
        ({"compile_cache": "own_disk"}, ""),
    ],
)
def test_all_processes_have_one_config(tmp_path, monkeypatch, changes, words):
    """With another learning rate in one process its replica of the weights would drift away."""
    config = config_in(tmp_path / "run")

    def gathered(value, name="gather"):
        other = run_folder._what_runs(config, to_json(replace(config, **changes)))
        others = {"what runs": [other], "a digest of what runs": [run_folder._digest(other)]}
        return [value, *others.get(name, [])]

    monkeypatch.setattr(run_folder, "gather_objects", gathered)
    refused = pytest.raises(ConfigError, match=words) if words else nullcontext()
    with refused, open_run_folder(config):
        assert not words
    assert (tmp_path / "run").exists() == (not words)  # nothing is made before


def test_all_processes_have_one_reward_file_and_one_jax(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def one(completions):\n    return [1.0 for _ in completions]\n")
    functions = (Custom(path=f"{reward}:one"),)
    config = config_in(tmp_path / "run", reward=RewardConfig(functions=functions))
    here = run_folder._what_runs(config, to_json(config))
    reward.write_text(reward.read_text().replace("1.0", "9.0"))
    there = run_folder._what_runs(config, to_json(config))
    with pytest.raises(ConfigError, match=r"file.config.reward.functions.0=.*reward.py:one: \"\w"):
        run_folder._check_same_run([here, here, there])
    with pytest.raises(ConfigError, match="jax.jax_enable_x64: false in process 0, true in"):
        run_folder._check_same_run([here, here | {"jax": here["jax"] | {"jax_enable_x64": True}}])
    run_folder._check_same_run([here, here])
