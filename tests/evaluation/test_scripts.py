"""The scripts for a trained model: generate, evaluate, export; from a checkpoint and from a folder.

The model is a tiny one, and comes out of a real run of one step with every role there is.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_tokenizer import write_chat_tokenizer
from in_process import run_here
from safetensors.numpy import load_file
from tiny_models import tiny_config, write_directory

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.checkpoint.huggingface import import_params, load_model_config
from jaxrl_llm.checkpoint.layout import find_checkpoint, find_model_path
from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.evaluation.answering import open_model, read_prompt
from jaxrl_llm.evaluation.trained_model import evaluate, export_checkpoint, run_facts
from jaxrl_llm.launch.flags import PARSERS
from jaxrl_llm.launch.main import run
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.trainer.loop import train

CONFIG = """
from jaxrl_llm.config import *

TASK = ChainSum(num_terms=2, size=16)
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def get_config() -> Config:
    return Config(
        name="tiny",
        total_steps=1,
        data=DataConfig(
            tokenizer="char",
            train_tasks=(TASK,),
            val_tasks=(TASK,),
            train_batch_size=8,
            max_prompt_length=4,
            max_response_length=4,
            truncation="right",
        ),
        actor=ActorConfig(hf_config=MODEL, ppo_mini_batch_size=8),
        critic=CriticConfig(hf_config=MODEL | {"hidden_size": 24, "vocab_size": 96}),
        rollout=RolloutConfig(n=2),
        algorithm=PPO(use_kl_in_reward=True),
        reward=RewardConfig(
            model=RewardModelConfig(training=SupervisedConfig(steps=2, batch_size=16))
        ),
        log=LogConfig(tensorboard=False, samples_every=0),
    )
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("config") / "tiny.py"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def checkpoint(config_file, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    return train(load_config(str(config_file), (("run_dir", str(run_dir)),))).checkpoint


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    return export_checkpoint(checkpoint, tmp_path_factory.mktemp("export") / "out")


@pytest.fixture(scope="module")
def poison(tmp_path_factory) -> Path:
    """A folder that makes `import jax` an error that a test can see."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "jax.py").write_text("raise SystemExit('jax was imported')")
    return folder


def jaxrl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ------------------------------------------------------------------------- generate


def test_a_checkpoint_its_run_and_its_export_answer_alike(checkpoint, exported):
    texts = set()
    assert find_model_path(str(checkpoint.parent.parent)) == find_model_path(str(checkpoint))
    for path in (checkpoint, exported):
        model = open_model(find_model_path(str(path)))
        (answer,) = model.generate("1+2=", max_new_tokens=6, temperature=0.0)
        (completion,) = answer.completions
        texts.add(completion.tokens)
        assert 1 <= len(completion.tokens) <= 6
    assert len(texts) == 1


def test_samples_depend_on_the_seed_and_not_on_their_number(exported):
    model = open_model(find_model_path(str(exported)))

    def tokens(n: int, seed: int = 0) -> list[tuple[int, ...]]:
        (answer,) = model.generate("1+2=", max_new_tokens=8, n=n, seed=seed)
        return [completion.tokens for completion in answer.completions]

    many = tokens(4)
    assert tokens(2) == many[:2]
    assert len(set(many)) > 1
    assert tokens(4, seed=1) != many


def test_an_answer_stays_within_the_models_positions(exported):
    model = open_model(find_model_path(str(exported)))
    with pytest.raises(ValueError, match="16 tokens and the model 16 positions"):
        model.generate(["1", "1" * 16], max_new_tokens=1)
    long, short = model.generate(["1" * 14, "1"], max_new_tokens=100, temperature=0.0)
    assert len(long.completions[0].tokens) <= 2
    (alone,) = model.generate("1", max_new_tokens=100, temperature=0.0)
    assert alone.completions[0].tokens == short.completions[0].tokens


def test_a_streamed_answer_is_the_answer(exported):
    model = open_model(find_model_path(str(exported)))
    for seed in range(3):
        (answer,) = model.generate("1+2=", max_new_tokens=11, seed=seed)
        pieces = list(model.stream("1+2=", max_new_tokens=11, seed=seed))
        assert "".join(pieces) == answer.text
        assert len(pieces) > 1 or len(answer.completions[0].tokens) <= 5  # the end has no text
        stop = answer.text[2:4]  # in the middle of a piece
        (cut,) = model.generate("1+2=", max_new_tokens=11, seed=seed, stop=stop)
        assert "".join(model.stream("1+2=", max_new_tokens=11, seed=seed, stop=stop)) == cut.text
        assert stop in cut.text and len(cut.text) <= 4


def test_batches_do_not_change_the_answers(exported):
    """A last batch that is not full, and rows of other lengths."""
    model = open_model(find_model_path(str(exported)))
    prompts = ["1+2=", "1+1=", "10+20=", "3", "4+4="]
    found = model.generate(prompts, max_new_tokens=5, batch_size=2)
    whole = model.generate(prompts, max_new_tokens=5)
    assert [answer.prompt.text for answer in found] == prompts
    for one, other in zip(found, whole, strict=True):
        assert one.completions[0].tokens == other.completions[0].tokens
        logprobs = (one.completions[0].logprobs, other.completions[0].logprobs)
        np.testing.assert_allclose(*logprobs, rtol=1e-5)


def test_the_chat_template_is_used_where_there_is_one(tmp_path):
    directory = write_directory(tmp_path / "chat", tiny_config(vocab_size=104))
    write_chat_tokenizer(directory)
    tokenizer = open_model(find_model_path(str(directory))).tokenizer
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert read_prompt("hi", tokenizer).text == chat
    assert read_prompt("hi", tokenizer, chat=True).text == chat
    assert read_prompt("hi", tokenizer, chat=False).text == "hi"
    char = open_model(find_model_path(str(write_directory(tmp_path / "c", tiny_config()))))
    with pytest.raises(ValueError, match="has no chat template"):
        read_prompt("hi", char.tokenizer, chat=True)


@pytest.mark.nightly
def test_generate_prints_the_answers_alone(checkpoint):
    flags = (f"--model={checkpoint}", "--prompt=1+2=", "--n=2", "--seed=3", "--max_new_tokens=3")
    result = jaxrl("generate", *flags)
    assert result.returncode == 0, result.stderr
    model = open_model(find_model_path(str(checkpoint)))
    (expected,) = model.generate("1+2=", max_new_tokens=3, n=2, seed=3)
    assert result.stdout == "".join(found.text + "\n" for found in expected.completions)


# ------------------------------------------------------------------------- evaluate


def test_evaluation_repeats_the_runs_validation(checkpoint, config_file, tmp_path):
    rows = (checkpoint.parent.parent / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    output = tmp_path / "new" / "eval.json"
    flags = (f"--model={checkpoint}", f"--config={config_file}", f"--output={output}")
    result = run_here(partial(run, "evaluate", flags), flags)
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    assert report["metrics"] == {name: x for name, x in last.items() if name.startswith("val-")}
    assert report["num_samples"] == {"chain_sum_2x1": 16}
    accuracy, ends = "chain_sum_2x1/acc/mean@1", ("low", "high")
    low, high = (last[f"val-aux/{accuracy}/{end}"] for end in ends)
    shown = f"{last[f'val-core/{accuracy}']:.3f}"
    assert result.stdout.splitlines()[1].split() == (
        f"chain_sum_2x1 16 {shown} ({low:.3f} to {high:.3f}) {shown}".split()
    )


def test_evaluation_on_a_file_writes_every_answer(checkpoint, config_file, tmp_path):
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2), "data_source": "mine"} for a in (1, 2, 3)]
    (tmp_path / "mine, too.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = (f"--model={checkpoint}", f"--config={config_file}", "--config.validation.n=4")
    flags += (f"--data={tmp_path / 'mine, too.jsonl'}", f"--answers={tmp_path / 'answers.jsonl'}")
    flags += ("--config.validation.temperature=1",)
    result = run_here(partial(run, "evaluate", flags), flags)
    assert result.returncode == 0, result.stderr
    heads, values = (line.split("  ") for line in result.stdout.splitlines())
    found = [word.strip() for word in heads if word.strip()]
    assert found[:5] == ["source", "prompts", "mean@4", "pass@2", "best@4"] and values[0] == "mine"
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["row"] for row in answers] == [0] * 4 + [1] * 4 + [2] * 4
    assert {row["ground_truth"] for row in answers} == {"3", "4", "5"}
    assert all(row["grade"] == (row["pred"] == row["ground_truth"]) for row in answers)


def test_evaluation_takes_the_configs_settings(exported, config_file):
    changes = (("actor.path", str(exported)), ("data.tokenizer", ""), ("validation.n", "3"))
    # A critic of its own, whose vocabulary is the tokenizer's, is not needed.
    critic = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
    critic |= {"intermediate_size": 32, "num_hidden_layers": 1}
    changes += (("critic.hf_config", json.dumps(critic)),)
    found = evaluate(load_config(str(config_file), (*changes, ("validation.temperature", "1.0"))))
    assert len(found.completions) == 3 * 16
    assert "val-core/chain_sum_2x1/acc/best@3/mean" in found.metrics


# ------------------------------------------------------------------------- export


@pytest.mark.parametrize("role", ["actor", "critic", "reward", "reference"])
def test_every_role_comes_back_bit_for_bit(checkpoint, tmp_path, role):
    out = export_checkpoint(checkpoint, tmp_path / role, role=role)
    abstract = manager.stored_roles(checkpoint)[role]
    expected = manager.restore_role(checkpoint, role, abstract)
    kind = "scalar" if role in ("critic", "reward") else "causal_lm"
    params = import_params(out, model_spec(load_model_config(out), kind))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert (load_model_config(out).hidden_size == 24) == (role == "critic")


def test_a_trained_role_differs_from_its_frozen_copy(checkpoint):
    """Otherwise the test above could not tell them apart."""
    roles = manager.stored_roles(checkpoint)
    actor, reference = (
        jax.tree.leaves(manager.restore_role(checkpoint, name, roles[name]))
        for name in ("actor", "reference")
    )
    assert any((a != b).any() for a, b in zip(actor, reference, strict=True))


def test_transformers_opens_an_export(exported, checkpoint, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(exported)
    assert config.architectures == ["LlamaForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer.encode("1+2=3")) == "1+2=3"
    assert tokenizer.eos_token_id == config.eos_token_id[0] == 1
    reward = export_checkpoint(checkpoint, tmp_path / "reward", role="reward")
    assert AutoConfig.from_pretrained(reward).num_labels == 1


def test_the_model_card_says_where_it_comes_from(exported, checkpoint):
    card = (exported / "README.md").read_text()
    rows = (checkpoint.parent.parent / "metrics.jsonl").read_text().splitlines()
    accuracy = json.loads(rows[-1])["val-core/chain_sum_2x1/acc/mean@1"]
    for fact in (
        "| run | tiny |",
        "| algorithm | ppo |",
        "| step | 1 |",
        f"| `val-core/chain_sum_2x1/acc/mean@1` | {accuracy:.4g} |",
        "| trained from | random weights |",
        "| data | chain_sum |",
        "| rewards | a reward model |",
        "AutoModelForCausalLM.from_pretrained",
        "@software{jaxrl_llm",
    ):
        assert fact in card, fact
    # The curve: a row a step that has all columns.
    reward = json.loads(rows[-1])["critic/score/mean"]
    assert f"| 1 | {reward:.4g} | {accuracy:.4g} |" in card
    (config,) = re.findall(r"```json\n(.*?)```", card, re.DOTALL)
    settings = json.loads(config)
    assert settings["total_steps"] == 1 and settings["algorithm.use_kl_in_reward"] is True
    assert not any(key.startswith(("run_dir", "log")) for key in settings)
    assert str(checkpoint.parent.parent) not in card


def test_a_run_that_writes_its_metrics_can_be_exported(checkpoint, tmp_path):
    """Its last line may be half written."""
    run = shutil.copytree(checkpoint.parent.parent, tmp_path / "run")
    whole = run_facts(run / "checkpoints" / checkpoint.name)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 2, "critic/sc')
    assert run_facts(run / "checkpoints" / checkpoint.name) == whole


def test_an_export_overwrites_exports_only(checkpoint, exported, tmp_path):
    run, model = checkpoint.parent.parent, tmp_path / "model"
    write_directory(model, tiny_config())
    for place in (run, checkpoint.parent, checkpoint, checkpoint / "export", model):
        before = {file: file.stat().st_mtime_ns for file in place.rglob("*")}
        with pytest.raises(ConfigError, match="would overwrite; give another directory"):
            export_checkpoint(checkpoint, place)
        assert {file: file.stat().st_mtime_ns for file in place.rglob("*")} == before
    for name in ("README.md", "tokenizer.json", "model-00001-of-00002.safetensors"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"holds {name}, which jaxrl_llm did.*overwrite"):
            export_checkpoint(checkpoint, folder)
        assert [file.name for file in folder.iterdir()] == [name]
    base = shutil.copytree(exported, tmp_path / "base")
    assert export_checkpoint(checkpoint, base) == base
    copy = shutil.copytree(run, tmp_path / "copy")
    stored = json.loads((copy / "config.json").read_text())
    stored["actor"]["path"] = str(base)
    (copy / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="the model that the run began with"):
        export_checkpoint(copy / "checkpoints" / checkpoint.name, base)


def test_an_export_casts_and_splits(checkpoint, tmp_path):
    out = tmp_path / "out"
    flags = (f"--output={out}", "--dtype=bfloat16", "--max_shard_bytes=20000")
    # It exports from one device, whatever the machine offers.
    result = jaxrl(
        "export",
        f"--model={checkpoint}",
        *flags,
        XLA_FLAGS="",
        JAX_NUM_CPU_DEVICES="4",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {out}\n"
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 and (out / "model.safetensors.index.json").is_file()
    assert {str(x.dtype) for file in files for x in load_file(file).values()} == {"bfloat16"}


# ------------------------------------------------------------------------- mistakes


def test_where_a_checkpoint_is_found(tmp_path):
    for step in (2, 10, 9):
        folder = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        (folder / "loop").mkdir(parents=True)
        if step != 10:  # a save that was cut off
            (folder / "_CHECKPOINT_METADATA").touch()
    newest = tmp_path / "run" / "checkpoints" / "global_step_9"
    for path in (newest, newest.parent, tmp_path / "run"):
        assert find_checkpoint(str(path)) == newest
    assert find_model_path(str(tmp_path / "run")).checkpoint == newest
    with pytest.raises(ConfigError, match="not written to its end"):
        find_checkpoint(str(newest.parent / "global_step_10"))
    with pytest.raises(ConfigError, match="did you mean .*global_step_9"):
        find_checkpoint(str(newest.parent / "global_step_99"))
    assert find_model_path("Owner/Model-1.5B").path == "Owner/Model-1.5B"


MISTAKES = [
    ("generate", ["--prompt=a"], "required: --model"),
    ("generate", ["--model={run}"], "one of the arguments --prompt --prompts is required"),
    ("generate", ["--model={run}x", "--prompt=a"], "there is no model"),
    ("generate", ["--model={empty}", "--prompt=a"], "holds neither config.json"),
    ("generate", ["--modle={run}"], "unknown flag --modle; did you mean '--model'?"),
    ("generate", ["--config=a.py"], "unknown flag --config"),
    ("generate", ["--temperature=hot"], "--temperature: invalid float value"),
    ("generate", ["--chat=maybe"], "--chat: invalid choice: 'maybe'"),
    ("generate", ["--model={run}", "--prompt=a", "--n=0"], "0: must be 1 or more"),
    ("evaluate", ["--model={run}"], "--config=FILE is missing"),
    ("evaluate", ["--config={config}"], "required: --model"),
    ("evaluate", ["--model={run}", "--config={config}x"], "did you mean"),
    ("evaluate", ["--model={run}", "--config={config}", "--output={run}"], "is a folder"),
    (
        "evaluate",
        ["--model={run}", "--config={config}", "--config.validation.tempreture=1"],
        "did you mean 'config.validation.temperature'?",
    ),
    (
        "evaluate",
        ["--model={run}", "--config={config}", "--config.data.val_tasks=[]"],
        "no validation data",
    ),
    ("export", ["--model={run}"], "required: --output"),
    ("export", ["--model={run}x", "--output=o"], "there is no checkpoint"),
    ("export", ["--model={empty}", "--output=o"], "holds no checkpoint"),
    ("export", ["--model={run}", "--output={config}"], "files cannot be made in"),
]

HELP = ("generate", "evaluate", "export")

# Runs all commands and prints [exit code, stdout, stderr, seconds] of each as JSON.
# The first has the start of the process in its time.
IN_ONE_PROCESS = """
import contextlib, io, json, os, sys, time
from jaxrl_llm.launch.main import main

os._exit = sys.exit  # a mistake ends the process at once
start, ends = float(sys.argv[1]), []
for words in json.loads(sys.argv[2]):
    sys.argv = ["jaxrl", *words]
    output, errors, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    ends.append([code, output.getvalue(), errors.getvalue(), time.time() - start])
    start = time.time()
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def without_jax(checkpoint, config_file, poison, tmp_path_factory) -> list[list]:
    """What each of MISTAKES, then --help of each command ended with, where jax is not imported."""
    empty = tmp_path_factory.mktemp("empty")
    names = {"run": checkpoint.parent.parent, "config": config_file, "empty": empty}
    commands = [[name, *(f.format(**names) for f in flags)] for name, flags, _ in MISTAKES]
    commands += [[name, "--help"] for name in HELP]
    result = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(time.time()), json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(poison)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_end_fast_without_jax_or_traceback(number, without_jax):
    code, output, errors, seconds = without_jax[number]
    assert seconds < 2
    assert code == 2
    assert MISTAKES[number][2] in errors
    assert "Traceback" not in errors and "jax was imported" not in errors
    assert output == ""


@pytest.mark.parametrize("name", HELP)
def test_help_has_the_flags_and_the_keys_of_a_config(name, without_jax):
    code, output, _, _ = without_jax[len(MISTAKES) + HELP.index(name)]
    assert code == 0
    parser = PARSERS[name]
    flags, keys, _ = output.partition("\n\nConfig keys, as ")
    assert flags.startswith(f"{parser.description}\n") and f"jaxrl {name} --model=PATH" in flags
    assert all(f"\n  {flag}" in flags for flag in ("--model=PATH  ", "-h, --help  "))
    assert bool(keys) == parser.takes_config


def test_a_role_that_is_not_there_is_named(checkpoint, tmp_path):
    copy = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, copy)  # without the frozen roles next to it
    with pytest.raises(
        ValueError, match="no role 'reference'; it has actor, critic, so --role=actor"
    ):
        export_checkpoint(copy, tmp_path / "out", role="reference")
