"""A run of a model with layers of a gated delta rule: it learns, resumes exactly, and exports."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_run import config_of
from tiny import HYBRID
from tiny_run import assert_same_bits

from jaxrl_llm.checkpoint.huggingface import load_model_config
from jaxrl_llm.checkpoint.peft import WEIGHTS, import_adapter, read_lora
from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.trainer.loop import train

CHANGES = {f"actor.hf_config.{key}": json.dumps(value) for key, value in HYBRID.items()}
CHANGES["actor.hf_config.model_type"] = HYBRID["model_type"]
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
def test_adapters_resume_exactly_and_are_exported(tmp_path):
    """On projections of the rule alone, over a base in float8, with shared prompts in its rows."""
    lora = {"rank": 2, "alpha": 8, "targets": [".*linear_attn[.].*"]}
    flags = FLAGS | CHANGES | {"actor__lora": json.dumps(lora), "actor__base_dtype": "float8"}
    flags |= {"total_steps": "2", "save_every": "1", "warmup": "null"}
    run, config = config_of(tmp_path / "one", **flags)
    last = train(config).checkpoint
    found, first = run.weights(2), run.weights(0)
    adapters = {name for name, x in found.items() if name.startswith("actor[") and x.ndim}
    assert adapters and all("adapter" in name and "['0']" in name for name in adapters)
    assert all(not np.array_equal(found[name], first[name]) for name in adapters)
    again, config = config_of(tmp_path / "two", resume=str(run.step_path(1)), **flags)
    train(config)
    assert_same_bits(again.weights(2), found)
    folder = export_checkpoint(last, tmp_path / "adapter", adapter=True)
    tensors = load_file(folder / WEIGHTS)
    layer = "base_model.model.model.layers.0.linear_attn."
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    assert {*tensors} == {f"{layer}{n}.lora_{ab}.weight" for n in names for ab in "AB"}
    assert tensors[f"{layer}in_proj_qkv.lora_B.weight"].shape == (2 * 2 * 6 + 4 * 5, 2)
    model = load_model_config(export_checkpoint(last, tmp_path / "merged"))
    spec = model_spec(model, lora=read_lora(folder, model, "causal_lm", dtype="float32", dropout=0))
    own = jax.tree_util.tree_leaves_with_path(import_adapter(folder, spec))
    assert len(own) == len(adapters)
    for path, value in own:
        name = jax.tree_util.keystr(path)
        (of_run,) = [found[each] for each in adapters if each.endswith(name)]
        np.testing.assert_array_equal(value, of_run)


@pytest.mark.slow
def test_a_run_learns_and_resumes_exactly(tmp_path):
    flags = FLAGS | CHANGES
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
