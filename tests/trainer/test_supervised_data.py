"""The data of a warm-up, a teacher and a reward model are read before any weights are there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import READS_TEXT as MODEL
from tiny import SUMS as ROWS

import jaxrl_llm as rl
from jaxrl_llm.launch.dry_run import dry_run
from jaxrl_llm.trainer import states

SHORT = rl.SupervisedConfig(steps=1, batch_size=8)


def config(folder: Path) -> rl.Config:
    return rl.Config(
        run_dir=str(folder / "run"),
        total_steps=2,
        data=rl.DataConfig(
            tokenizer="char", train_batch_size=8, max_prompt_length=4, max_response_length=4
        ),
        actor=rl.ActorConfig(hf_config=MODEL, ppo_mini_batch_size=8),
        rollout=rl.RolloutConfig(n=2),
        algorithm=rl.GRPO(),
        reward=rl.RewardConfig(functions=(rl.ExactAnswer(extract="whole"),)),
        log=rl.LogConfig(tensorboard=False, samples_every=0, trace=False),
        warmup=SHORT,
    )


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
