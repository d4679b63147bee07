"""A run of a model with layers of a gated delta rule: it learns, resumes exactly, and exports."""

import json

import numpy as np
import pytest
from test_run import config_of
from tiny import HYBRID
from tiny_run import assert_same_bits

from jaxrl_llm.checkpoint.huggingface import load_model_config
from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.trainer.run import train

FLAGS = {
    "algorithm": '{"kind": "grpo"}',
    "actor__optimizer__learning_rate": "0.01",
    "actor__micro_batch_tokens": "16",
    "checkpoint__asynchronous": "false",
    "checkpoint__keep_latest": "9",
    "save_every": "6",
    "total_steps": "12",
    "rollout__n": "4",
}


@pytest.mark.slow
def test_a_run_learns_and_resumes_exactly(tmp_path):
    changes = {f"actor.hf_config.{key}": json.dumps(value) for key, value in HYBRID.items()}
    flags = FLAGS | changes | {"actor.hf_config.model_type": HYBRID["model_type"]}
    run, config = config_of(tmp_path / "one", **flags)
    last = train(config).checkpoint
    found = run.weights(12)
    rewards = [row["critic/score/mean"] for row in run.metrics().values() if len(row) > 9]
    assert rewards[0] < 0.2 and rewards[-1] > 0.5, rewards
    one = run.weights(6)
    moved = {name for name, x in found.items() if not np.array_equal(x, one[name])}
    assert any("log_speed" in name for name in moved) and any("v_conv" in name for name in moved)
    again, config = config_of(tmp_path / "two", resume=str(run.step_path(6)), **flags)
    train(config)
    assert_same_bits(again.weights(12), found)
    out = load_model_config(export_checkpoint(last, tmp_path / "model"))
    assert out.delta is not None and out.delta.value_heads == 4
