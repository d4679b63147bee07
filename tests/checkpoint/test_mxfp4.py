"""Files of gpt-oss whose experts are in four bits, against their values by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, write_directory

from jaxrl_llm.checkpoint.huggingface import import_params, load_model_config
from jaxrl_llm.models.base import model_spec

E, D, F = 2, 64, 32
CONFIG = replace(
    CONFIGS["gpt_oss"],
    hidden_size=D,
    intermediate_size=F,
    mixture=replace(CONFIGS["gpt_oss"].mixture, num_experts=E, expert_size=F),
)
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@pytest.fixture
def folder(tmp_path):
    """A model's folder with the experts of both layers in blocks, and the tensors in it."""
    path = write_directory(tmp_path, CONFIG, dtype="bfloat16")
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors.pop(name).shape
        shape = (E, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 130, shape).astype(np.uint8)
    save_file(tensors, path / "model.safetensors")
    hf = json.loads((path / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(hf))
    return path, tensors


def by_hand(tensors, name, expert, i, output):
    """One value: a sign, two bits of exponent and one of fraction, times the scale of its block."""
    byte = int(tensors[f"{name}_blocks"][expert, output, i // 32, i % 32 // 2])
    code = byte >> 4 if i % 2 else byte & 15
    exponent, fraction = code >> 1 & 3, code & 1
    value = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
    scale = 2.0 ** (int(tensors[f"{name}_scales"][expert, output, i // 32]) - 127)
    return (-value if code & 8 else value) * scale


def test_values_are_those_of_the_format(folder):
    path, tensors = folder
    assert load_model_config(path) == CONFIG
    mlp = import_params(path, model_spec(CONFIG))["decoder"]["layers"]["1"]["mlp"]
    gate, up, down = (np.asarray(mlp[name]["kernel"]) for name in ("gate", "up", "down"))
    for e, i, f in np.ndindex(E, D, F):
        assert gate[e, i, f] == by_hand(tensors, GATE_UP, e, i, 2 * f)
        assert up[e, i, f] == by_hand(tensors, GATE_UP, e, i, 2 * f + 1)
        assert down[e, f, i] == by_hand(tensors, DOWN, e, f, i)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: None, "down_proj_scales' is missing"),
        (lambda scales: scales[:, 1:], "has no scales that fit"),
        (lambda scales: np.full_like(scales, 255), "down_proj' of .* holds NaN"),
        (lambda scales: np.full_like(scales, 254), "down_proj' of .* holds NaN or infinity"),
    ],
)
def test_damaged_scales_are_refused_by_name(folder, change, message):
    path, tensors = folder
    name = f"{DOWN}_scales"
    found = change(tensors.pop(name))
    save_file(tensors if found is None else tensors | {name: found}, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        import_params(path, model_spec(CONFIG))
