"""Records of models: what two of them must share, and that files on disk give the same ones."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from chat_tokenizer import TEMPLATE, write_chat_tokenizer
from tiny_models import CONFIGS, tiny_config

from jaxrl_llm.checkpoint import identity
from jaxrl_llm.checkpoint.identity import (
    CODE,
    IDENTITY,
    check_model,
    check_resume,
    code_record,
    config_record,
)
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.config import ConfigError, apply_overrides, load_config
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf, to_hf_config
from jaxrl_llm.models.rope import LinearRope
from jaxrl_llm.references import file_of
from jaxrl_llm.tokenizer import CharTokenizer, load_tokenizer

CONFIG = tiny_config()


def record(config=CONFIG, dtype="float32", tokenizer="a", **setting) -> dict:
    model = identity.model_record(model_spec(config), dtype)
    return {
        identity.MODELS: {"actor": model},
        identity.TOKENIZER: tokenizer,
        identity.LEARNER: "actor",
        identity.SETTING: {"jax": "0.10.2"} | setting,
        identity.CODE: {},
        identity.ROWS: {},
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the record of CONFIG."""
    return saved(tmp_path_factory.mktemp("run"), record())


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (replace(CONFIG, rope_theta=500.0), "actor.rope_theta 10000.0 there, 500.0 now"),
        (replace(CONFIG, rms_norm_eps=1e-5), "actor.rms_norm_eps 1e-06 there, 1e-05 now"),
        (replace(CONFIG, family="mistral"), "actor.family llama there, mistral now"),
        (replace(CONFIG, rope_scaling=LinearRope(factor=2.0)), "rope_scaling null there"),
        (replace(CONFIG, vocab_size=100), "actor.vocab_size"),
    ],
)
def test_another_model_is_refused_with_both_values(checkpoint, config, line):
    with pytest.raises(ConfigError) as refused:
        check_resume(checkpoint, record(config))
    assert line in str(refused.value) and str(checkpoint) in str(refused.value)
    with pytest.raises(ConfigError, match="Put the right values"):
        check_model(checkpoint, config, Path("config.json"))


def test_another_dtype_or_tokenizer_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"actor.dtype float32 there, bfloat16 now"):
        check_resume(checkpoint, record(dtype="bfloat16"))
    with pytest.raises(ConfigError, match="digest of the tokenizer a there, b now"):
        check_resume(checkpoint, record(tokenizer="b"))
    check_model(checkpoint, CONFIG, Path("config.json"))


def test_what_may_change_is_named(checkpoint):
    assert check_resume(checkpoint, record()) == ""
    longer = replace(CONFIG, max_position_embeddings=999)
    line = check_resume(checkpoint, record(longer, jax="0.11.2"))
    assert line == (
        "other than in the checkpoint: actor.max_position_embeddings "
        f"{CONFIG.max_position_embeddings} there, 999 now, jax 0.10.2 there, 0.11.2 now"
    )


def saved(folder: Path, now: dict) -> Path:
    """A checkpoint with the record `now`."""
    manager = CheckpointManager(
        folder, keep_latest=1, keep_best=0, best_metric="", asynchronous=False
    )
    manager.save(1, {}, {IDENTITY: now}, {})
    manager.close()
    return manager.path(1)


def test_changed_code_is_named(tmp_path, monkeypatch):
    """A run resumes bit for bit only with the functions that it began with."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rewards.py"
    file.write_text("def grade(completions): ...\n")
    settings = {"reward.functions": [f"{file}:grade", "exact_answer", saved]}
    config = apply_overrides(load_config("grpo"), settings)
    before = record() | {CODE: code_record(config)}
    assert list(before[CODE])[1:] == [
        f"config.reward.functions.0={file}:grade", "config.reward.functions.2=object:saved"
    ]  # fmt: skip
    checkpoint = saved(tmp_path / "run", before)
    assert check_resume(checkpoint, record() | {CODE: code_record(config)}) == ""
    file.write_text("def grade(completions): return 0\n")
    line = check_resume(checkpoint, record() | {CODE: code_record(config)})
    assert f"changed since the checkpoint: config.reward.functions.0={file}:grade. The" in line
    for command in ("init -q", "add rewards.py", "commit -q -m one"):
        names = ("-c", "user.name=a", "-c", "user.email=a")
        subprocess.run(["git", *names, *command.split()], check=True)
    assert "checkpoint: git commit, config" in check_resume(
        checkpoint, record() | {CODE: code_record(config)}
    )


def test_changed_rows_are_named(tmp_path):
    """Held-out rows, and columns for rewards: the position in the data does not depend on them."""

    def rows(**digests: str) -> dict:
        return record() | {identity.ROWS: digests}

    checkpoint = saved(tmp_path, rows(held_out="a", columns="b"))
    assert check_resume(checkpoint, rows(held_out="a", columns="b")) == ""
    assert check_resume(checkpoint, rows()) == ""  # several processes
    assert "held-out rows have changed" in check_resume(checkpoint, rows(held_out="x", columns="b"))
    both = check_resume(checkpoint, rows(held_out="x", columns="y")).splitlines()
    assert len(both) == 2 and "columns of the training rows have changed" in both[1]


def test_the_file_of_a_function_in_a_package(tmp_path, monkeypatch):
    """It is found without running code, as the package may be of the reward workers alone."""
    package = tmp_path / "package_of_mine"
    (package / "inner").mkdir(parents=True)
    names = ("__init__.py", "more.py", "inner/__init__.py")
    for name in names:
        (package / name).write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    modules = ("package_of_mine", "package_of_mine.more", "package_of_mine.inner")
    for module, name in zip(modules, names, strict=True):
        assert file_of(f"{module}:f") == package / name
    assert file_of("package_of_mine.less:f") is None
    assert file_of("no_package_of_mine:f") is None


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_on_disk_has_the_same_record(name):
    """Else a checkpoint would be refused because of its own files."""
    config = CONFIGS[name]
    again = config_from_hf(json.loads(json.dumps(to_hf_config(config, "causal_lm"))))
    assert config_record(again) == config_record(config)


def test_a_tokenizer_has_the_same_digest_after_it_was_saved(tmp_path):
    first = load_tokenizer(write_chat_tokenizer(tmp_path / "a"))
    first.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").digest() == first.digest()
    other = write_chat_tokenizer(tmp_path / "c", template=TEMPLATE.replace("\n", " "))
    digests = {first.digest(), load_tokenizer(other).digest(), CharTokenizer().digest()}
    assert len(digests) == 3
