"""What is refused before any weights are loaded: data of first trainings, and files of models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import READS_TEXT as MODEL
from tiny import SUMS as ROWS
from tiny_models import random_tensors, write_directory
from tiny_program import EXACT, program_config

import jaxrl_llm as rl
from jaxrl_llm.checkpoint.huggingface import import_params
from jaxrl_llm.launch.dry_run import dry_run
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.trainer import data, states

SHORT = rl.SupervisedConfig(steps=1, batch_size=8)


def config(folder: Path) -> rl.Config:
    return program_config(folder / "run", reward=EXACT, warmup=SHORT)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded first")

    monkeypatch.setattr(states, "load_params", load)


def with_teacher(one: rl.Config) -> rl.Config:
    teacher = rl.TeacherConfig(hf_config=MODEL, training=SHORT)
    return replace(one, warmup=None, teacher=teacher, algorithm=rl.Distillation())


def with_reward_model(one: rl.Config) -> rl.Config:
    model = rl.RewardModelConfig(hf_config=MODEL, training=SHORT)
    return replace(one, warmup=None, reward=rl.RewardConfig(model=model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one, "gives? no examples.*--config.warmup=null leaves this training out"),
        (with_teacher, "--config.teacher.training=null leaves this training out"),
        (with_reward_model, "give no preferences"),
    ],
)
def test_rows_that_a_first_training_cannot_learn_are_refused_before_weights(
    tmp_path, change, message
):
    asked = change(config(tmp_path))
    with pytest.raises(ValueError, match=message):
        rl.train(asked, train_data=ROWS)
    assert not (tmp_path / "run" / "config.json").exists()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    files = (str(tmp_path / "rows.jsonl"),)
    with pytest.raises(ValueError, match=message):
        dry_run(replace(asked, data=replace(asked.data, train_files=files)))


@pytest.mark.parametrize(
    ("lost", "cut", "message"),
    [
        ("model.norm.weight", 0, "lacks 'model.norm.weight'"),
        ("", 1, "model.safetensors cannot be read .*; fetch it again"),
        ("", 10**9, "model.safetensors does not exist; the weights must be in safetensors"),
    ],
)
@pytest.mark.parametrize("algorithm", [rl.GRPO(), rl.SFT()])
def test_weights_that_are_not_whole_are_refused_before_the_data_are_read(
    tmp_path, monkeypatch, algorithm, lost, cut, message
):
    model = config_from_hf(MODEL | {"vocab_size": 96})
    tensors = {name: x for name, x in random_tensors(model).items() if name != lost}
    folder = write_directory(tmp_path / "model", model, tensors=tensors)
    file = folder / "model.safetensors"
    if cut:
        kept = file.read_bytes()[:-cut]
        file.write_bytes(kept) if kept else file.unlink()
    with pytest.raises(ValueError, match=message):
        import_params(folder, model_spec(model))
    monkeypatch.setattr(data, "load_run_prompts", states.load_params)  # as any that must not be
    monkeypatch.setattr(data, "load_offline_records", states.load_params)
    own = config(tmp_path)
    changes = {"actor.path": str(folder), "actor.hf_config": {}, "warmup": None}
    files = {"algorithm": algorithm, "data.train_tasks": [{"kind": "chain_sum"}]}
    asked = rl.load_config(own, changes | files)
    for start in (dry_run, rl.train):
        with pytest.raises(ValueError, match=message):
            start(asked)


@pytest.mark.parametrize("algorithm", [rl.GRPO(), rl.SFT()])
def test_a_dry_run_says_once_that_rows_may_exceed_the_positions(tmp_path, caplog, algorithm):
    changes = {
        "actor.hf_config": MODEL | {"max_position_embeddings": 6},
        "data.train_tasks": [{"kind": "chain_sum", "num_terms": 2, "num_digits": 1}],
    }
    dry_run(rl.load_config(config(tmp_path), changes | {"algorithm": algorithm, "warmup": None}))
    (line,) = [x.getMessage() for x in caplog.records if "positions" in x.getMessage()]
    assert "allow 8 tokens, and the model has 6 positions" in line
