"""`jaxrl convert-config`: the file that it writes is the config, and its account is complete."""

import subprocess
import sys
from functools import partial

import pytest
from example_commands import TRL, VERL, words_of
from in_process import run_here

from jaxrl_llm import config as c
from jaxrl_llm.convert.account import lines
from jaxrl_llm.convert.command_words import command_words
from jaxrl_llm.convert.trl_command import convert_trl
from jaxrl_llm.convert.values import value_of
from jaxrl_llm.convert.verl_command import convert_verl
from jaxrl_llm.convert.writing import WIDTH, file_of, python_file
from jaxrl_llm.launch.convert_config import convert_config
from jaxrl_llm.launch.main import run

DPO = "trl dpo --model_name_or_path a/b --dataset_name c/d"


@pytest.mark.parametrize("library", ["verl", "trl"])
def test_each_file_makes_the_config_and_each_key_is_accounted_for(library, tmp_path):
    examples = VERL if library == "verl" else TRL
    convert = convert_verl if library == "verl" else convert_trl
    for i, example in enumerate(examples):
        found = convert(words_of(example), rows=7473, devices=8)
        text = file_of(found, library)
        assert max(map(len, text.splitlines())) <= WIDTH + 60  # a long path has a line of its own
        file = tmp_path / f"config_{i}.py"
        file.write_text(text)
        assert c.open_config(str(file)) == found.config
        shown = "\n".join(lines(found))
        assert all(each.key in shown for each in found.keys)


def test_texts_with_quotes_and_lines_survive(tmp_path):
    odd = 'a "quoted"\nline\\ \'x\' """'
    config = c.Config(name=odd, data=c.DataConfig(columns={odd: "y"}, system_prompt=odd))
    file = tmp_path / "odd.py"
    file.write_text(python_file(config, "Odd."))
    assert c.open_config(str(file)) == config


def test_the_command_writes_a_new_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    output = tmp_path / "mine.py"
    assert convert_config(["--from=trl", DPO + " --beta 0.3", f"--output={output}"]) == 0
    shown = capsys.readouterr().out
    assert "\n  beta=0.3 -> algorithm.beta=0.3\n" in shown
    assert "3 keys: 3 translated, 0 not needed, 0 without counterpart" in shown
    assert f"wrote {output}; get what is not on this machine, then try it: jaxrl train" in shown
    assert isinstance(c.open_config(str(output)).algorithm, c.DPO)
    with pytest.raises(c.ConfigError, match=r"mine.py exists; give a new file"):
        convert_config(["--from=trl", DPO, f"--output={output}"])


RL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
RL += "data.train_batch_size=256 actor_rollout_ref.model.path=a/b "
AGENT = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        (f"--from=verl|{RL}{AGENT}.enable=True {AGENT}.tool_config_path=t.yaml", 1),
        (f"--from=verl|{RL}{AGENT}.enable=False {AGENT}.max_user_turns=3", 0),
        ("--from=verl|" + RL + "trainer.logger=['console','swanlab']", 0),
        ("--from=trl|trl grpo --model_name_or_path a/b --dataset_name c/d --tools t.py", 1),
    ],
)
def test_a_run_that_would_learn_something_else_ends_with_another_code(
    line, lost, tmp_path, monkeypatch, capsys
):
    """An agent run became one of single answers, with code 0."""
    monkeypatch.chdir(tmp_path)
    words = [*line.split("|"), "--rows=99", "--output=one.py"]
    assert convert_config(words) == (4 if lost else 0)
    assert (tmp_path / "one.py").exists()
    error = capsys.readouterr().err
    if lost:
        allow = error.rpartition("--allow=")[2].strip()
        assert len(allow.split(",")) == lost
        assert convert_config([*words[:-1], "--output=two.py", f"--allow={allow}"]) == 0


def test_turns_and_tools_have_our_limits():
    line = f"{RL}{AGENT}.enable=True {AGENT}.max_assistant_turns=5 {AGENT}.format=hermes "
    line += f"{AGENT}.function_tool_path=t.py {AGENT}.max_tool_response_length=256 "
    line += "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    found = convert_verl(command_words(line, {}), rows=99, devices=8)
    assert found.config.rollout.max_turns == 5
    lost = [f"{AGENT}.{name}" for name in ("function_tool_path", "max_tool_response_length")]
    assert sorted(found.not_learned([])) == lost
    line = "trl grpo --model_name_or_path a/b --dataset_name c/d --max_tool_calling_iterations 3"
    found = convert_trl(command_words(line, {}), rows=99, devices=1)
    assert found.config.rollout.max_turns == 4


def test_arguments_of_a_reward_function_are_its_settings(tmp_path):
    """They were dropped."""
    file = tmp_path / "mine.py"
    file.write_text("def score(completions, *, scale, mode='a'): ...")
    folder = "custom_reward_function"
    line = f"{RL}{folder}.path={file} {folder}.name=score "
    line += f"{folder}.reward_kwargs.scale=2.5 {folder}.reward_kwargs.mode=b"
    found = convert_verl(command_words(line, {}), rows=99, devices=8)
    (function,) = found.config.reward.functions
    assert function == c.Custom(path=f"{file}:score", settings={"scale": 2.5, "mode": "b"})
    assert not found.not_learned([])


def test_a_file_holds_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BETA_OF_TEST", "0.4")
    line = "NAME=my_run " + DPO + " --beta $BETA_OF_TEST --run_name ${NAME} \\\n  --seed 3\n"
    (tmp_path / "run.sh").write_text("#!/bin/bash\n# a comment\n" + line)
    assert convert_config(["--from=trl", "--file=run.sh"]) == 0
    config = c.open_config("my_run.py")
    assert isinstance(config.algorithm, c.DPO)
    assert (config.algorithm.beta, config.name, config.seed) == (0.4, "my_run", 3)


def test_hydras_overrides_are_a_command_line(tmp_path, monkeypatch):
    """Hydra writes them for each run, after the shell has worked out its script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hydra.yaml").write_text("hydra:\n  job:\n    name: main_ppo\n")
    (tmp_path / "overrides.yaml").write_text(
        "- data.train_files=['a.parquet', 'b.parquet']\n- actor_rollout_ref.model.path=a/b\n"
        "- algorithm.adv_estimator=grpo\n- trainer.experiment_name=mine\n"
    )
    assert convert_config(["--from=verl", "--file=overrides.yaml", "--rows=99"]) == 0
    config = c.open_config("mine.py")
    assert isinstance(config.algorithm, c.GRPO)
    assert config.data.train_files == ("a.parquet", "b.parquet")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a='x y' \"b\" \\\n  c", ["run", "a=x y", "b", "c"]),
        ("X=1 Y=$X/2 run $Y ${X}z Y=3", ["run", "1/2", "1z", "Y=3"]),
        ("run hf://a#train", ["run", "hf://a#train"]),
    ],
)
def test_words_of_a_command_line(text, words):
    assert command_words(text, {}) == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run 'a", "cannot be read: No closing quotation"),
        ("run a=$NODES", r"\$NODES is not set; write NODES=VALUE before the command"),
        ("run $(date)", "only a shell can work it out"),
        ("run ${X:-8}", "only a shell can work it out"),
        ('run "$@"', "only a shell can work it out"),
    ],
)
def test_what_a_shell_would_work_out_is_refused(text, message):
    with pytest.raises(c.ConfigError, match=message):
        command_words(text, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("007", 7),
        ("1.", 1.0),
        ("True", True),
        ("null", None),
        ("1_000x", "1_000x"),
        ("'a b'", "a b"),
        ("['a', b,1]", ["a", "b", 1]),
        ("{a: 1, 'b': [x, true]}", {"a": 1, "b": ["x", True]}),
        ("[[1,2],{c: d}]", [[1, 2], {"c": "d"}]),
        ("", ""),
    ],
)
def test_values(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from=trl"], "the command line is missing"),
        ([DPO], "the following arguments are required: --from"),
        (["--from=nemo", DPO], "invalid choice: 'nemo'"),
        (["--from=trl", "--rows=0", DPO], "0: must be 1 or more"),
        (["--from=trl", "--outptu=a.py", DPO], "did you mean '--output'"),
        (["--from=verl", DPO], "it has no trainer of verl"),
    ],
)
def test_bad_flags_name_the_remedy(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(c.ConfigError) as error:
        convert_config(argv)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_it_needs_no_jax_and_ends_with_2(tmp_path):
    code = (
        "import sys; from jaxrl_llm.launch.main import main\n"
        "try: main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert-config", "--from=trl", "trl gkd"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: TRL's gkd has no counterpart")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("data.prompt_key=question", "is --config.data.columns.prompt=question here"),
        ("trainer.project_name=x", "is not needed here: WANDB_PROJECT"),
        ("trainer.total_epochs=2", "convert-config --from=verl"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "is --config.algorithm.use_kl_loss=True here"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "convert-config --from=verl"),
        ("trainer.save_freq=x", "convert-config --from=verl"),
        ("critic.optim.lr=abc", "convert-config --from=verl"),
        ("data.prompt_key=a b", "is '--config.data.columns.prompt=a b' here"),
        ("foo.bar=1", None),
    ],
)
def test_a_key_of_verl_on_our_command_line_is_explained(flag, said):
    error = refused(["--config=grpo", f"--config.{flag}"])
    assert f"unknown key config.{flag.split('.')[0]}" in error
    assert said in error if said else "verl" not in error


def refused(words: list[str]) -> str:
    result = run_here(partial(run, "train", words), words)
    assert result.returncode == 2
    return result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator is a key of verl"),
        (["trainer.total_epochs=3"], "trainer.total_epochs is a key of verl"),
        (["+actor_rollout_ref.model.path=x"], "is --config.actor.path=x here"),
        (["--actor_rollout_ref.model.path=x"], "is --config.actor.path=x here"),
        (["data.seed=1", "trainer.nnodes=2"], "verl's data.seed=1 is --config.seed=1 here"),
        (["data.train_batch_size=8", "trainer.total_epochs=3"], "trainer.total_epochs is a key of"),
    ],
)
@pytest.mark.parametrize("config", [["--config=grpo"], []])
def test_the_words_of_a_command_of_verl_point_to_the_converter(words, said, config):
    """They have no --config. in front."""
    error = refused([*words, *config])
    assert said in error and '`jaxrl convert-config --from=verl "COMMAND"`' in error


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.train_batch_size=8", "did you mean --config.data.train_batch_size=8?"),
        ("rollout.n=x y", "did you mean '--config.rollout.n=x y'?"),
        ("config.total_steps=3", "did you mean --config.total_steps=3?"),
        ("-config.total_steps=3", "did you mean --config.total_steps=3?"),
        ("foo.bar=1", "write --config.key=value"),
        ("foo", "write --config.key=value"),
        ("a b=1", "write --config.key=value"),
    ],
)
def test_a_word_that_is_no_flag(word, said):
    error = refused(["--config=grpo", word])
    assert said in error and "verl" not in error
