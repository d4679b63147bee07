"""Config files, overrides of every kind, and what each mistake is answered."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.config import (
    DAPO,
    DPO,
    GRPO,
    ChainSum,
    Config,
    ConfigError,
    Custom,
    ExactAnswer,
    MeshConfig,
    Products,
    RewardConfig,
    RewardModelConfig,
    SupervisedConfig,
    apply_override,
    check,
    from_json,
    load_config,
    to_json,
)
from jaxrl_llm.launch.command_line import Parser, read_config
from jaxrl_llm.launch.flags import TRAIN

CONFIG_FILE = """
from jaxrl_llm.config import *

def get_config():
    return Config(
        data=DataConfig(train_tasks=(ChainSum(),), tokenizer="char"),
        actor=ActorConfig(
            hf_config={"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
                       "intermediate_size": 128, "vocab_size": 64},
        ),
        reward=RewardConfig(functions=(Custom(path="REWARDS:exact"),)),
    )
"""
REWARDS = """
import a_module_that_does_not_exist  # a config is checked without importing the user's code


def exact(prompts, completions, *, strict=True, **kwargs):
    return [0.0]
"""


@pytest.fixture
def config_file(tmp_path) -> str:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    file = tmp_path / "tiny.py"
    file.write_text(CONFIG_FILE.replace("REWARDS", str(rewards)))
    return str(file)


def load(config_file: str, *flags: str) -> Config:
    config, _ = read_config([f"--config={config_file}", *flags], TRAIN)
    return config


# ------------------------------------------------------------------------- values that work


@pytest.mark.parametrize(
    ("flag", "key", "expected"),
    [
        ("--config.seed=7", "seed", 7),
        ("--config.actor.optimizer.learning_rate=1e-6", "actor.optimizer.learning_rate", 1e-6),
        ("--config.rollout.temperature=2", "rollout.temperature", 2.0),
        ("--config.data.shuffle=false", "data.shuffle", False),
        ("--config.actor.scan_layers=True", "actor.scan_layers", True),
        ("--config.run_dir=/data/a=b c", "run_dir", "/data/a=b c"),
        ("--config.name='quoted'", "name", "quoted"),
        ("--config.name=", "name", ""),
        ("--config.rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids", (1, 2)),
        ("--config.rollout.stop_token_ids=(1,)", "rollout.stop_token_ids", (1,)),
        ("--config.rollout.stop_token_ids=[]", "rollout.stop_token_ids", ()),
        ("--config.rollout.stop=\n", "rollout.stop", ("\n",)),
        ("--config.rollout.stop=\nQ: ", "rollout.stop", ("\nQ: ",)),
        ("--config.rollout.stop='\n\n'", "rollout.stop", ("\n\n",)),
        ("--config.rollout.stop= ['\n', b]", "rollout.stop", ("\n", "b")),
        ("--config.rollout.stop=\\nabla", "rollout.stop", ("\\nabla",)),
        ("--config.warmup=None", "warmup", None),
        ("--config.warmup.steps=5", "warmup", SupervisedConfig(steps=5)),
        (
            "--config.warmup={steps: 5, batch_size: 64}",
            "warmup",
            SupervisedConfig(steps=5, batch_size=64),
        ),
        ("--config.warmup={}", "warmup", SupervisedConfig()),
        ("--config.algorithm.clip_low=0.1", "algorithm.clip_low", 0.1),
        ("--config.algorithm=dapo", "algorithm", DAPO()),
        ("--config.algorithm={kind: grpo, clip_high: 0.3}", "algorithm", GRPO(clip_high=0.3)),
        ("--config.algorithm.kl_horizon=20000", "algorithm.kl_horizon", 20000.0),
        ("--config.algorithm.loss_scale=none", "algorithm.loss_scale", None),
        ("--config.algorithm.rollout_is_threshold=.5_2", "algorithm.rollout_is_threshold", ".5_2"),
        ("--config.algorithm.rollout_is_threshold=3", "algorithm.rollout_is_threshold", 3.0),
        ("--config.data.train_tasks=[chain_sum]", "data.train_tasks", (ChainSum(),)),
        (
            "--config.data.train_tasks=[{kind: products, first_digits: 2}]",
            "data.train_tasks",
            (Products(first_digits=2),),
        ),
        (
            "--config.data.train_tasks.0.num_terms=2",
            "data.train_tasks",
            (ChainSum(num_terms=2),),
        ),
        ("--config.validation.grader=exact_answer", "validation.grader", ExactAnswer()),
        (
            "--config.validation.grader={kind: exact_answer, extract: whole}",
            "validation.grader.extract",
            "whole",
        ),
        ("--config.reward.functions=exact_answer", "reward.functions", (ExactAnswer(),)),
        ("--config.actor.remat=none", "actor.remat", "none"),
    ],
)
def test_override(config_file, flag, key, expected):
    value = load(config_file, flag)
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


def test_value_as_the_next_word(config_file):
    assert load(config_file, "--config.seed", "3", "--config.rollout.n", "2").seed == 3
    assert TRAIN.read(["--config", "x.py"]).config == "x.py"


def test_later_overrides_win(config_file):
    assert load(config_file, "--config.seed=1", "--config.seed=2").seed == 2


def test_file_lists_need_no_quotes(config_file, tmp_path):
    names = [tmp_path / name for name in ("a b.jsonl", "c,d.jsonl", "e.jsonl")]
    for name in names:
        name.write_text("")
    flag = f"--config.data.train_files=[{names[0]}, '{names[1]}',{names[2]}]"
    assert load(config_file, flag).data.train_files == tuple(map(str, names))
    alone = load(config_file, f"--config.data.train_files={names[0]}")
    assert alone.data.train_files == (str(names[0]),)


def test_free_form_dict(config_file):
    config = load(
        config_file,
        "--config.actor.hf_config.hidden_size=192",
        "--config.actor.hf_config.rope_scaling.factor=8.0",
        "--config.actor.hf_config.architectures=[LlamaForCausalLM]",
    )
    assert config.actor.hf_config["hidden_size"] == 192
    assert config.actor.hf_config["num_attention_heads"] == 6
    assert config.actor.hf_config["rope_scaling"] == {"factor": 8.0}
    assert config.actor.hf_config["architectures"] == ["LlamaForCausalLM"]


def test_settings_of_a_users_function(config_file):
    config = load(
        config_file,
        "--config.reward.functions.0.settings.strict=false",
        "--config.reward.functions.0.settings.scale=0.5",
        "--config.reward.functions.0.settings.words=[a,'1',1]",
    )
    (function,) = config.reward.functions
    assert isinstance(function, Custom)
    assert function.settings == {"strict": False, "scale": 0.5, "words": ["a", "1", 1]}


def test_a_quoted_word_inside_a_dict(config_file):
    """Fault 16: JSON's quotes around one of a few words."""
    flag = '--config.reward.model={"remat": "full", "training": {"steps": 2}}'
    model = load(config_file, flag).reward.model
    assert model == RewardModelConfig(remat="full", training=SupervisedConfig(steps=2))


def test_another_kind_begins_with_its_own_defaults(config_file):
    """Fault 16: nothing of the algorithm before is kept."""
    config = load(config_file, "--config.algorithm.lam=0.5", "--config.algorithm=dpo")
    assert config.algorithm == DPO()
    path = config.reward.functions[0].path
    flags = ("--config.reward.functions.0.settings.strict=false",)
    config = load(config_file, *flags, f"--config.reward.functions=[{path}]")
    assert config.reward.functions == (Custom(path=path),)


def test_a_users_algorithm_by_its_path(config_file, tmp_path):
    (tmp_path / "mine.py").write_text("import a_module_that_does_not_exist")
    path = f"{tmp_path}/mine.py:make"
    flag = "--config.algorithm.settings.beta=2"
    config = load(config_file, f"--config.algorithm={path}", flag)
    assert config.algorithm == Custom(path=path, settings={"beta": 2})


def test_globs_and_splits_of_a_folder_are_files(config_file, tmp_path):
    """Fault 15: what docs/data.md shows and data/sources.py reads."""
    (tmp_path / "set").mkdir()
    for name in ("a-0.jsonl", "a-1.jsonl", "train.jsonl"):
        (tmp_path / "set" / name).write_text("")
    for file in (f"{tmp_path}/set/a-*.jsonl", f"{tmp_path}/set#train", f"{tmp_path}/**/a-0.jsonl"):
        assert load(config_file, f"--config.data.train_files=[{file}]").data.train_files == (file,)
    with pytest.raises(ConfigError, match=r"no file or folder .*b-\*\.jsonl"):
        load(config_file, f"--config.data.train_files=[{tmp_path}/set/b-*.jsonl]")
    with pytest.raises(ConfigError, match="did you mean '.*set'"):
        load(config_file, f"--config.data.train_files=[{tmp_path}/sett#train]")


def test_files_replace_the_tasks_of_a_config(tmp_path, caplog):
    """Own data and the sums of a packaged config together are what nobody asks for."""
    file = tmp_path / "mine.jsonl"
    file.write_text("")
    mine, held_out = f"--config.data.train_files={file}", f"--config.data.val_files={file}"

    def tasks(*flags):
        caplog.clear()
        data = load("grpo", *flags, "--config.warmup=null").data
        return len(data.train_tasks), len(data.val_tasks)

    assert tasks() == (1, 1) and not caplog.messages
    assert tasks(mine) == (0, 0)
    (said,) = caplog.messages
    assert "replaces the tasks of the config, config.data.train_tasks and config.data.va" in said
    assert "--config.data.train_tasks=[chain_sum]" in said
    assert tasks(held_out) == (1, 0)
    assert "config, config.data.val_tasks;" in caplog.text
    assert tasks(mine, held_out) == (0, 0) and len(caplog.messages) == 1
    sums = "--config.data.train_tasks=[chain_sum]", "--config.data.val_tasks.0.size=8"
    assert tasks(mine, sums[0]) == (1, 1) and not caplog.messages
    assert tasks(mine, sums[1]) == (0, 1) and len(caplog.messages) == 1
    assert tasks(*sums, mine, held_out) == (1, 1) and not caplog.messages
    (tmp_path / "my_rows.py").write_text("")
    assert tasks(f"--config.data.dataset_class={tmp_path}/my_rows.py:Rows") == (0, 0)
    assert tasks("--config.data.train_files=[]") == (1, 1) and not caplog.messages
    with pytest.raises(ConfigError, match=r"--config\.warmup=null without a warm-up"):
        load("grpo", mine)


def test_a_warmup_of_no_steps_is_none(tmp_path):
    """It needs no answers to learn from, and nothing that measures where it should stop."""
    file = tmp_path / "mine.jsonl"
    file.write_text("")
    mine = f"--config.data.train_files={file}"
    assert load("grpo").warmup.steps > 0 and load("grpo").warmup.stop_at > 0
    assert load("grpo", mine, "--config.warmup.steps=0").warmup is None
    assert load("grpo", mine, "--config.warmup.steps=0").data.train_files == (str(file),)


def test_validation_data_are_not_needed(config_file):
    """Fault 17: but an accuracy to stop at needs them."""
    config = load(config_file, "--config.warmup.steps=5")
    assert not config.data.val_files and not config.data.val_tasks
    with pytest.raises(ConfigError, match=r"nothing measures.*--config\.data\.val_files"):
        load(config_file, "--config.warmup.stop_at=0.5")
    load(config_file, "--config.warmup.stop_at=0.5", "--config.data.val_tasks=[chain_sum]")
    both = ["--config.data.val_tasks=[chain_sum]", "--config.validation.generate=true"]
    offline = ["--config.algorithm=sft", "--config.warmup.stop_at=0.5"]
    load(config_file, *offline, *both)
    with pytest.raises(ConfigError, match=r"val_files=\[FILE\] and .*generate=true, or "):
        load(config_file, *offline)


def test_flags_of_a_command():
    parser = Parser("Measure: jaxrl measure")
    parser.flag("--devices=N", "devices to split")
    parser.flag("--top_p=0.5", "share of tokens")
    parser.flag("--output=FILE", "file to write")
    parser.flag("--quiet", "print nothing")
    flags = parser.read(["--devices=4", "--quiet"])
    assert vars(flags) == {"devices": 4, "top_p": 0.5, "output": None, "quiet": True}
    for words, message in (
        (["--devices=four"], "--devices: four: must be 1 or more"),
        (["--top_p=high"], "--top_p: invalid float value: 'high'"),
        (["--device=4"], "unknown flag --device; did you mean '--devices'"),
        (["--config=x.py"], "unknown flag --config"),
    ):
        with pytest.raises(ConfigError, match=message):
            parser.read(words)


def test_types_of_the_file_are_checked_and_completed(config_file):
    file = Path(config_file)
    file.write_text(file.read_text().replace("return Config(", "return Config(seed='1',"))
    with pytest.raises(ConfigError, match="Config.seed='1': expected an integer"):
        load(config_file)
    file.write_text(file.read_text().replace("seed='1'", "save_every=1.0"))
    with pytest.raises(ConfigError, match="Config.save_every=1.0: expected an integer"):
        load(config_file)


# ------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.sed=1", ["config.sed", "did you mean 'config.seed'", "total_steps"]),
        ("--config.learning_rate=1", ["'config.actor.optimizer.learning_rate'"]),
        ("--config.actor.optimizer.lerning_rate=1", ["'config.actor.optimizer.learning_rate'"]),
        ("--config.optimizer.b1=0", ["config.optimizer; did you mean 'config.actor.optimizer'"]),
        ("--config.num_terms=4", ["did you mean 'config.data.train_tasks.0.num_terms'"]),
        ("--config.algorithm.clip_lo=1", ["did you mean 'config.algorithm.clip_low'", "gamma"]),
        ("--config.algorithm.clip_low=x", ["clip_low=x", "expected a number"]),
        ("--config.reward.functions=[own.py]", ["there is no own.py: write own.py:NAME for a"]),
        ("--config.algorithm=pop", ["there is no pop; did you mean 'ppo'", "there are: ppo, grpo"]),
        ("--config.algorithm=ppo.py:make", ["config.algorithm.path=ppo.py:make: there is no file"]),
        ("--config.algorithm=no_such.module:make", ["there is no module 'no_such'"]),
        ("--config.stages=[no.py:make]", ["config.stages.0.path=no.py:make: there is no file"]),
        ("--config.node_groups.a.count=0", ["config.node_groups.a.count=0: must be 1 or more"]),
        ("--config.node_groups.a={cont: 1}", ["did you mean 'config.node_groups.a.count'"]),
        ("--config.algorithm=dro", ["config.algorithm.beta is missing"]),
        (
            "--config.algorithm.gamma=1.5",
            ["algorithm.gamma=1.5: must be at most 1; 1 works"],
        ),
        ("--config.algorithm.clip_c=1", ["config.algorithm.clip_c=1: must be above 1; 3 works"]),
        ("--config.algorithm={clip_low: 1}", ["write {kind: NAME, …}"]),
        ("--config.algorithm.kind=grpo", ["write --config.algorithm=grpo"]),
        (
            "--config.reward.functions.0.strict=1",
            ["a setting of your function is config.reward.functions.0.settings.strict"],
        ),
        (
            "--config.validation.grader={kind: exact_answer, extract: all}",
            ["one of whole, last_number"],
        ),
        ("--config.validation.grader.extract=all", ["name its kind first"]),
        ("--config.data.priority.low=0", ["config.data.priority=NAME"]),
        ("--config.reward.functions.1.strict=1", ["valid indices: 0 to 0"]),
        (
            "--config.reward.functions=[{kind: code, total_s: 30}]",
            ["functions.0.total_s=30", "--config.reward.timeout_s=35 works"],
        ),
        (
            "--config.validation.graders=[{source: a, grader: {kind: code, total_s: 31}}]",
            ["validation.graders.0.grader.total_s=31", "--config.reward.timeout_s=36 works"],
        ),
        (
            "--config.validation.graders=[{source: a, grader: gsm8k}, {source: a, grader: gsm8k}]",
            ["config.validation.graders", "the source 'a' has two graders; give it one"],
        ),
        ("--config.reward.weights=[1,2]", ["2 weights for 1 functions"]),
        ("--config.reward.functions=[]", ["neither functions nor a model"]),
        ("--config.reward.model.dtype=bfloat16", ["reward.model: it has no path and no training"]),
        ("--config.seed=1.5", ["config.seed=1.5", "expected an integer"]),
        ("--config.actor.scan_layers=maybe", ["expected true or false"]),
        ("--config.rollout.stop_token_ids=[1,x]", ["stop_token_ids.1=x", "expected an integer"]),
        ("--config.rollout.stop_token_ids=[1", ["not closed"]),
        ("--config.rollout.stop=\\n", ["rollout.stop.0=\\n: it has a backslash", "bash", "$'\\n'"]),
        ('--config.rollout.stop=["\\nQ:"]', ["it has a backslash and a letter, not a new line"]),
        ("--config.data.columns={prompt: a, prompt: b}", ["columns.prompt stands twice"]),
        ("--config.seed.x=1", ["config.seed is a single value and has no keys below it"]),
        ("--config.warmup.step=1", ["'config.warmup.steps'"]),
        ("--config.actor.optimizer=3", ["{key: value"]),
        ("--config.data.train_tasks=[chain_sm]", ["did you mean 'chain_sum'", "spell_backward"]),
        ("--config.data.train_tasks.0.terms=2", ["num_terms"]),
        ("--config.data.train_files=[/nowhere/x.jsonl]", ["no file or folder '/nowhere/x.jsonl'"]),
        ("--config.data.train_tasks=[]", ["no training data"]),
        ("--config.data.tokenizer=", ["--config.data.tokenizer=char works"]),
        ("--config.data.truncation=lft", ["did you mean 'left'", "middle"]),
        ("--config.actor.dtype=float23", ["did you mean 'float32'"]),
        ("--config.critic.optimizer.learning_rate=-1", ["must be 0 or more"]),
        ("--config.actor.optimizer.b1=1", ["must be below 1; 0.9 works"]),
        (
            "--config.actor.param_dtype=bfloat16",
            ["learn are float32", "actor.optimizer.moment_dtype"],
        ),
        (
            "--config.actor.path=/nowhere",
            ["path=/nowhere: expected the folder of a model", "smollm2 --output=/nowhere writes"],
        ),
        ("--config.resume=/nowhere", ["expected auto, never, or the folder"]),
        ("--config.rollout.top_p=0", ["must be above 0; 1 works"]),
        ("--config.mesh.data=3", ["train_batch_size=128", "multiples of 3 work"]),
        (
            "--config.data.train_batch_size=96",
            ["batch_size=128: must divide config.data.train_batch_size=96"],
        ),
        ("--config.actor.ppo_mini_batch_size=60", ["must divide config.data.train_batch_size=128"]),
        ("--config.actor.micro_batch_size=30", ["128 samples"]),
        (
            "--config.warmup={batch_size: 100, micro_batch_size: 40}",
            ["must divide the 100 samples"],
        ),
        ("--seed=1", ["unknown flag --seed", "did you mean --config.seed"]),
        ("--confg.seed=1", ["unknown flag --confg.seed"]),
        ("--config.seed", ["--config.seed has no value"]),
        ("seed=1", ["'seed=1' is no flag"]),
    ],
)
def test_mistake(config_file, flag, words):
    with pytest.raises(ConfigError) as caught:
        load(config_file, flag)
    for word in words:
        assert word in str(caught.value)


def test_batches_on_several_replicas(config_file):
    flags = ["--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.rollout.n=2"]
    load(config_file, *flags, "--config.actor.micro_batch_size=16")
    with pytest.raises(ConfigError, match="must divide the 32 samples .* 8 replicas"):
        load(config_file, *flags, "--config.actor.micro_batch_size=64")
    with pytest.raises(
        ConfigError, match="mini_batch_size=2: .* 4 samples, .* multiples of 4 work"
    ):
        load(config_file, *flags, "--config.actor.ppo_mini_batch_size=2")
    with pytest.raises(ConfigError, match="warmup.batch_size=100: .* multiples of 8 work"):
        load(config_file, *flags, "--config.warmup.batch_size=100")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_cudnn_takes_no_packed_rows(config_file, role):
    flags = ["--config.exact=off", f"--config.{role}.attention=cudnn"]
    load(config_file, *flags)
    with pytest.raises(ConfigError, match="takes a sample a row, and this packs several"):
        load(config_file, *flags, f"--config.{role}.micro_batch_tokens=4096")
    with pytest.raises(ConfigError, match="takes whole rows, and this splits them"):
        load(config_file, *flags, "--config.mesh.sequence=2")


@pytest.mark.parametrize(
    ("key", "size", "words"),
    [
        ("mesh.generation.tensor", 3, "8 devices; 0 takes config.mesh.tensor=2"),
        ("mesh.passes.tensor", 16, "8 devices"),
        ("critic.tensor", 5, "critic.tensor=5: so many neighbouring devices"),
    ],
)
def test_groups_of_devices_that_no_phase_can_have(config_file, key, size, words):
    load(config_file, "--config.mesh.fsdp=4", "--config.mesh.tensor=2", f"--config.{key}=2")
    with pytest.raises(ConfigError, match=words):
        load(
            config_file, "--config.mesh.fsdp=4", "--config.mesh.tensor=2", f"--config.{key}={size}"
        )


def test_replicas_of_generation_that_samples_cannot_share(config_file):
    few = ["--config.data.train_batch_size=1", "--config.actor.ppo_mini_batch_size=1"]
    alone = [*few, "--config.mesh.sequence=4", "--config.rollout.n=1"]
    with pytest.raises(ConfigError, match="4 replicas .* the 1 samples .*; multiples of 4 work"):
        load(config_file, *alone)
    load(config_file, *alone, "--config.mesh.generation.tensor=4", "--config.actor.hf_config={}",
         "--config.actor.path=org/model")  # fmt: skip


def test_replicas_of_a_model_with_a_tensor_size_of_its_own():
    mesh = MeshConfig(data=2, pipeline=2, fsdp=4, sequence=2, tensor=2)
    assert mesh.num_replicas == 16
    sizes = {0: 16, 1: 32, 2: 16, 4: 16, 8: 8, 16: 4, 32: 2}
    assert {size: mesh.replicas_with(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("pipeline_micro_batches=3", "the 64 samples of a device and pass"),
        ("pipeline=1", "pipeline=1: one stage is no pipeline"),
    ],
)
def test_sizes_of_a_pipeline(config_file, sizes, words):
    model = "--config.actor.hf_config.num_hidden_layers=12"
    flags = ["--config.mesh.pipeline=2", "--config.mesh.pipeline_micro_batches=2", model]
    load(config_file, *flags)
    if sizes == "pipeline=1":
        flags += ["--config.mesh.pipeline_rounds=5"]
    with pytest.raises(ConfigError, match=words):
        load(config_file, *flags, f"--config.mesh.{sizes}")


def test_missing_files_name_what_there_is(config_file, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean '.*tiny\.py'"):
        load_config(str(tmp_path / "tiney.py"))
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean '.*train\.jsonl'"):
        load(config_file, f"--config.data.train_files=[{tmp_path}/trian.jsonl]")
    with pytest.raises(ConfigError, match=r"did you mean '.*rewards\.py'"):
        load(config_file, f"--config.reward.functions=[{tmp_path}/reward.py:exact]")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(:", "line 1: "),
        ("x = 1", "has no get_config"),
        # A script that ends the process would end the run with its code, and without a word.
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
        ("def get_config():\n    raise SystemExit(0)", "line 2: SystemExit: 0"),
        ("def get_config():\n    return 3", "returned int, not a Config"),
        ("from jaxrl_llm.config import *\ndef get_config():\n    return Config(sed=1)", "line 3: "),
        ("import no_such_module", "line 1: .*no_such_module"),
    ],
)
def test_broken_config_files(tmp_path, source, message):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_config(str(file))


def test_config_is_required():
    with pytest.raises(ConfigError, match="--config=FILE is missing.* ppo"):
        read_config(["--config.seed=1"], TRAIN)


# ------------------------------------------------------------------------- where a config is found


def test_a_packaged_config_by_its_name():
    assert load_config("grpo").name == "grpo"
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        load_config("grppo")


def test_a_run_by_its_folder_and_by_its_config(config_file, tmp_path):
    config = load(config_file, "--config.seed=5")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(to_json(config))
    for path in (tmp_path / "run", tmp_path / "run" / "config.json"):
        assert load_config(str(path)) == config
        assert load_config(str(path), [("seed", "6")]).seed == 6


# ------------------------------------------------------------------------- JSON


def test_a_folder_without_a_config_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} has no config.json, .*a run, a"):
        load_config(tmp_path)


def test_json_round_trip(config_file):
    config = load(config_file, "--config.warmup.steps=3", "--config.algorithm.gamma=0.9")
    text = to_json(config)
    algorithm = json.loads(text)["algorithm"]
    assert (algorithm["kind"], algorithm["gamma"], algorithm["clip_low"]) == ("ppo", 0.9, 0.2)
    assert from_json(text) == config
    assert to_json(from_json(text)) == text
    check(from_json(text))


def test_every_field_is_reachable(config_file):
    """Each default, written as text, reads back as itself: no annotation is left out."""
    training = RewardModelConfig(training=SupervisedConfig())
    config = Config(warmup=SupervisedConfig(), reward=RewardConfig(model=training))
    for key, value in leaves(config):
        assert apply_override(config, key, str(value)) == config, key


def leaves(node, prefix=""):
    for entry in dataclasses.fields(node):
        value = getattr(node, entry.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value


# ------------------------------------------------------------------------- the script


def test_a_mistake_ends_fast_and_without_jax(config_file, tmp_path):
    """One message, exit code 2, no traceback, below a second of CPU time, jax never imported."""
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "jax.py").write_text("raise SystemExit('jax was imported')")
    script = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
    before = os.times()
    result = subprocess.run(
        [sys.executable, str(script), f"--config={config_file}", "--config.sed=1"],
        env={**os.environ, "PYTHONPATH": f"{poison}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = os.times()
    used = after.children_user - before.children_user
    assert used + after.children_system - before.children_system < 1
    assert result.returncode == 2
    assert "did you mean 'config.seed'" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
