"""A mixture that was made of a dense model computes what that one does, in files of its family."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import CONFIGS, random_tensors, tiny_config, write_directory

from jaxrl_llm.checkpoint.huggingface import import_params, load_model_config
from jaxrl_llm.checkpoint.upcycling import Upcycling, upcycle
from jaxrl_llm.launch import commands
from jaxrl_llm.learner.forward import ForwardSettings, response_statistics
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import Mixture

FILE = "model.safetensors"


def logprobs_and_loads(folder):
    rng = np.random.default_rng(5)
    prompts, responses = rng.integers(1, 96, (4, 5)), rng.integers(1, 96, (4, 6))
    fields = sample_fields(*map(jnp.asarray, (prompts, np.full(4, 5), responses, np.full(4, 6))))
    spec = model_spec(load_model_config(folder))

    def found(params):
        result = response_statistics(params, rows_of(fields), spec=spec, settings=ForwardSettings())
        return result.logprobs, result.routed and result.routed.counts_E

    return jax.jit(found)(import_params(folder, spec))


def test_the_mixture_computes_the_dense_model(tmp_path, capsys):
    dense = write_directory(tmp_path / "dense", CONFIGS["llama_tied"])
    output = tmp_path / "moe"
    flags = [f"--model={dense}", f"--output={output}", "--experts=4", "--router_std=0.5"]
    assert commands.prepare(["upcycle", *flags]) == 0
    assert f"wrote {output}" in capsys.readouterr().out
    expected, _ = logprobs_and_loads(dense)
    logprobs, counts_LE = logprobs_and_loads(output)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert (counts_LE > 0).sum() > 4  # not the first two experts of each layer alone
    again = upcycle(dense, tmp_path / "again", Upcycling(experts=4, router_std=0.5))
    assert (again / FILE).read_bytes() == (output / FILE).read_bytes()


@pytest.mark.parametrize(
    ("name", "names", "router"),
    [
        ("mistral", ("block_sparse_moe", "w1", "w3", "w2"), "block_sparse_moe.gate"),
        ("qwen3", ("mlp", "gate_proj", "up_proj", "down_proj"), "mlp.gate"),
    ],
)
def test_experts_are_the_dense_layer_bit_for_bit(name, names, router, tmp_path):
    dense = write_directory(tmp_path / "dense", CONFIGS[name], dtype="bfloat16")
    mixture = Upcycling(experts=3, experts_per_token=1, router_std=0.25, seed=1)
    before, after = (
        load_file(path / FILE) for path in (dense, upcycle(dense, tmp_path / "moe", mixture))
    )
    module, *theirs = names
    for i in range(2):
        for own, one in zip(("gate", "up", "down"), theirs, strict=True):
            expected = before.pop(f"model.layers.{i}.mlp.{own}_proj.weight").tobytes()
            for e in range(3):
                expert = f"model.layers.{i}.{module}.experts.{e}.{one}.weight"
                assert after.pop(expert).tobytes() == expected
        weight = after.pop(f"model.layers.{i}.{router}.weight").astype(np.float32)
        assert weight.shape == (3, 48) and 0.2 < weight.std() < 0.3
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert after[tensor].tobytes() == value.tobytes(), tensor
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"experts": 1}, "--experts=1: a mixture has at least 2"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token=3 of --experts=2.*1 to 2"),
        ({"experts": 2, "router_std": 0.0}, "stay equal; leave the flag out"),
        ({"experts": 2, "router_std": float("nan")}, "--router_std=nan"),
    ],
)
def test_numbers_that_make_no_mixture_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Upcycling(**numbers)


EXPERTS = Mixture(num_experts=2, experts_per_token=1, expert_size=40, normalized=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config("mixtral", mixture=EXPERTS), "a mixtral, which has experts: give a dense one"),
        (CONFIGS["qwen2"], "no family with experts.*qwen2: give a model of llama, mistral, qwen3"),
        (tiny_config("qwen3", qk_norm=True, sliding_window=(None, 4)), "sliding_window"),
    ],
)
def test_models_without_a_counterpart_are_refused(config, message, tmp_path):
    write_directory(tmp_path / "model", config)
    with pytest.raises(ValueError, match=message):
        upcycle(tmp_path / "model", tmp_path / "moe", Upcycling(experts=2))
    assert not (tmp_path / "moe").exists()


def test_a_folder_with_files_and_weights_of_two_dtypes_are_refused(tmp_path):
    tensors = random_tensors(CONFIGS["mistral"])
    name = next(iter(tensors))
    tensors[name] = tensors[name].astype(np.float16)
    dense = write_directory(tmp_path / "dense", CONFIGS["mistral"], tensors=tensors)
    with pytest.raises(ValueError, match="weights in F16, F32: write it in one dtype"):
        upcycle(dense, tmp_path / "moe", Upcycling(experts=2))
    with pytest.raises(ValueError, match="exists and is not empty"):
        upcycle(dense, dense, Upcycling(experts=2))
