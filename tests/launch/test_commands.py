"""The console command, and that each model flag means the same thing."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import run_here

import jaxrl_llm as rl
from jaxrl_llm import config as c
from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.config import Config, ConfigError, load_config
from jaxrl_llm.launch.commands import COMMANDS, versions
from jaxrl_llm.launch.dry_run import dry_run
from jaxrl_llm.launch.flags import PARSERS
from jaxrl_llm.launch.main import main
from jaxrl_llm.trainer.output import RunTotals, Summary, summary_lines

ROOT = Path(__file__).parents[2]


def jaxrl(*words: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxrl", *words])
        return run_here(main, words)


def jaxrl_process(*words: str) -> subprocess.CompletedProcess[str]:
    """With the one device that a CPU is for a user."""
    command = [sys.executable, "-m", "jaxrl_llm", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_wheel_has_the_command():
    """Fault 19."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxrl": "jaxrl_llm.launch.main:main"}


def test_help_lists_the_commands_and_their_flags():
    result = jaxrl()
    assert result.returncode == 0
    assert all(f"jaxrl {name} " in result.stdout for name in COMMANDS)
    assert {name.split()[0] for name in PARSERS} == set(COMMANDS)
    shown = jaxrl("train", "--help").stdout
    assert "--devices=N" in shown and "--dry_run" in shown
    assert re.search(r"\n  rollout\.n  integer ≥ 1; default 1; samples per prompt\n", shown)
    assert "\nalgorithm = grpo: " in shown
    assert "config keys" not in jaxrl("verify", "--help").stdout.lower()
    assert "--experts=N" in jaxrl("prepare", "upcycle", "--help").stdout


def test_version_is_quick_and_asks_no_device():
    code = "import sys; from jaxrl_llm.launch.commands import versions; print(versions());"
    code += "assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"jaxrl_llm {rl.__version__}" in done.stdout
    assert "x cpu" in versions(devices=True)[-1]
    assert jaxrl("--version").stdout.splitlines()[0] == f"jaxrl_llm {rl.__version__}"


COMPLETE = """
source <(cat "$1"); shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }
_jaxrl; printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_flags_configs_and_keys(tmp_path):
    script = tmp_path / "jaxrl.bash"
    script.write_text(jaxrl("completion", "bash").stdout)

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(script), "jaxrl", *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    assert completed("tr") == ["train"]
    assert completed("export", "--r") == ["--role="]
    # bash splits words at "=".
    configs = [
        "grpo",
        "grpo_gsm8k",
        "grpo_lora",
        "grpo_moe",
        "grpo_pretrained",
        "grpo_smollm2",
        "grpo_smollm2_moe",
        "grpo_smollm2_trl",
        "grpo_vision",
    ]
    assert completed("train", "--config", "=", "grpo") == configs
    assert completed("train", "--config", "=", "grpo", "--config.roll") == [
        word for word in completed("train", "--config.rollout") if word.endswith("=")
    ]
    assert "--config.rollout.n=" in completed("train", "--config.rollout.")
    assert completed("generate", "--config") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell, tmp_path):
    script = jaxrl("completion", shell).stdout
    assert "--config.rollout.n=" in script and "train" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


@pytest.mark.parametrize("name", ["ppo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_dry_run_plans_and_trains_nothing(name, tmp_path):
    flags = [f"--config={name}", f"--config.run_dir={tmp_path}", "--config.total_steps=7"]
    done = jaxrl_process("train", *flags, "--dry_run")
    assert done.returncode == 0, done.stderr
    reference = "reference: 865,408 parameters, 4 layers of 128, frozen"
    for words in ("a new run, 7 steps in all", "update_actor", reference, "peak: ", "1 x cpu"):
        assert words in done.stdout
    assert re.search(r"\nsettings: learning rate 0\.000\d linear after \d0 steps; ", done.stdout)
    assert "\nreward: exact_answer(extract=whole)\n" in done.stdout or name != "ppo"
    resolved = load_config(str(tmp_path / "resolved_config.json"))
    assert resolved == load_config(name, {"run_dir": str(tmp_path), "total_steps": 7})
    made = {path.name for path in tmp_path.iterdir()} - {"compile_cache"}
    assert made == {"resolved_config.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.chat_template_kwargs": {"enable_thinking": False}}, "no chat template"),
        ({"resume": "never"}, "holds a run at step 2, which would be overwritten"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(changes, message, tmp_path):
    if "resume" in changes:
        checkpoint = tmp_path / "checkpoints" / "global_step_2"
        (checkpoint / "loop").mkdir(parents=True)
        (checkpoint / "_CHECKPOINT_METADATA").touch()
    config = load_config("ppo", {"run_dir": str(tmp_path)} | changes)
    with pytest.raises(ValueError, match=message):
        dry_run(config)
    assert not (tmp_path / "resolved_config.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command trian; did you mean 'train'"),
        (["train", "--config=grpo", "--config.sed=1"], "did you mean 'config.seed'"),
        (["train", "--config=grppo"], "did you mean 'grpo'"),
        (["export", "--checkpoint=run", "--output=o"], "unknown flag --checkpoint"),
        (["generate", "--model=nowhere", "--prompt=a"], "there is no model nowhere"),
        (["train", "--config=grpo", "--devices=-1"], "argument --devices: -1: must be 1 or more"),
    ],
)
def test_a_mistake_is_one_message(words, message):
    result = jaxrl(*words)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr


def summary_in(run_dir: Path, **changes) -> Summary:
    checkpoint = run_dir / "checkpoints" / "global_step_3"
    plain = {"step": 3, "totals": RunTotals(), "seconds": 1.0, "interrupted": False}
    return Summary(run_dir=run_dir, checkpoint=checkpoint, **plain | changes)


def test_the_summary_names_files_as_the_folder_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = summary_in(tmp_path / "runs" / "mine")
    config = Config(run_dir="runs/mine")
    assert "  metrics         runs/mine/metrics.jsonl" in summary_lines(summary, config)
    monkeypatch.chdir("/")  # as a callback may
    found = f"  metrics         {summary.run_dir}/metrics.jsonl"
    assert found in summary_lines(summary, config)


def test_the_command_that_a_run_ends_with_is_one(tmp_path):
    summary = summary_in(tmp_path)
    trace = tmp_path / "trace"
    trace.mkdir()
    assert not any("trace" in line for line in summary_lines(summary, Config()))  # none answered
    (trace / "train.jsonl").touch()
    assert f"  trace           {trace}" in summary_lines(summary, Config())
    lines = [line for line in summary_lines(summary, Config()) if " jaxrl " in line]
    (words,) = (line.split(" jaxrl ")[1].split() for line in lines)
    assert words[0] == "export"
    spaced = replace(summary, run_dir=tmp_path / "a b", checkpoint=tmp_path / "a b/c")
    (line,) = (line for line in summary_lines(spaced, Config()) if " jaxrl " in line)
    a_b = tmp_path / "a b"
    assert shlex.split(line)[-2:] == [f"--model={a_b}/c", f"--output={a_b}/export"]
    # Its flags are known: what is missing here is the checkpoint.
    assert f"there is no checkpoint {summary.checkpoint}" in jaxrl(*words).stderr
    scalar = Config(algorithm=c.PairwiseRewardModel()), Config(algorithm=c.RewardRegression())
    for config in scalar:
        assert summary_lines(summary, config)[-1] == f"{lines[0]} --role=reward"


@pytest.mark.parametrize(("sign", "best"), [("", (4, 0.75)), ("-", (6, 0.25))])
def test_the_summary_names_the_best_step(tmp_path, sign, best):
    totals = RunTotals(last={"timing_s/testing": 1.5, "held_out": 0.25})
    for step, value in [(2, 0.5), (4, 0.75), (6, 0.25), (8, 0.75), (10, 0.25)]:
        totals.add_compared(step, f"{sign}held_out", value)
    summary = summary_in(tmp_path, totals=totals)
    line = f"  best step       {best[0]}: held_out {best[1]:.3f}"
    lines = summary_lines(summary, Config())
    assert line in lines and "  held_out  0.250" in lines and "testing" not in str(lines)
    kept = tmp_path / "checkpoints" / f"global_step_{best[0]}"
    kept.mkdir(parents=True)
    assert f"{line}, in {kept}" in summary_lines(summary, Config())


def test_the_module_of_the_command_is_the_command():
    """For a machine on which `jaxrl` is not on the path."""
    command = [sys.executable, "-m", "jaxrl_llm", "trian"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "did you mean 'train'" in result.stderr


def test_times_that_overlap_are_explained(tmp_path):
    totals = RunTotals()
    totals.seconds, totals.stage_seconds = 10.0, {"gen": 1.0, "ref": 4.0, "update_actor": 5.0}
    summary = summary_in(tmp_path, totals=totals)
    header = f"  time a stage    of 10.0 s in steps 1 to {summary.step}"  # of every start
    assert header in summary_lines(summary, Config())
    totals.stage_seconds["reward"] = 4.0
    (line,) = [line for line in summary_lines(summary, Config()) if "time a stage" in line]
    assert line.endswith(" (one that runs while the host grades counts until both are done)")


def test_a_runs_folder_is_a_model(tmp_path):
    """Fault 18: config.actor.path takes what --model takes."""
    for step in (2, 10):
        folder = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        (folder / "loop").mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").touch()
    (tmp_path / "run" / "config.json").write_text("{}")  # the run's own, of no model
    assert find_model_path(str(tmp_path / "run")).checkpoint == folder
    assert find_model_path(str(folder)).checkpoint == folder
    assert find_model_path("owner/name").checkpoint is None
    load_config("sft", [("actor.path", str(tmp_path / "run")), ("mesh.tensor", "2")])
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find_model_path(str(tmp_path / "empty"))
