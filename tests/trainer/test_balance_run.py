"""A run of DeepSeek-V3's shape with a balance bias: exact resume, and the bias in its export."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_run import config_of
from tiny_run import assert_same_bits

from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.trainer.loop import train

MODEL = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 16,
}
RATE = 0.25  # 4 steps add up without rounding
FLAGS = {
    "actor__hf_config": json.dumps(MODEL),
    "actor__router_bias_rate": str(RATE),
    "actor__dtype": "bfloat16",
    "algorithm": '{"kind": "grpo"}',
    "checkpoint__asynchronous": "false",
    "checkpoint__keep_latest": "9",
    "save_every": "1",
    "warmup": "null",
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bias_and_exports_it(tmp_path):
    run, config = config_of(tmp_path / "run", total_steps="2", **FLAGS)
    last = train(config).checkpoint
    resume = str(run.step_path(1))
    again, config = config_of(tmp_path / "again", total_steps="2", resume=resume, **FLAGS)
    train(config)
    assert 1 not in again.metrics()
    assert_same_bits(run.weights(2), again.weights(2))
    folder = export_checkpoint(last, tmp_path / "model", dtype="bfloat16")
    bias = load_file(folder / "model.safetensors")[BIAS]
    assert bias.dtype == np.float32
    steps = bias / RATE
    np.testing.assert_array_equal(steps, np.round(steps))
    assert np.abs(steps).max() >= 1
