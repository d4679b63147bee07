"""Gated delta rules under mixes of axes: log-probs and gradients equal one device's."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from tiny import EXPERTS, HYBRID, MODEL
from tiny_iteration import random_params

from jaxrl_llm.config import MeshConfig, ModelSettings
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.kernels.gated_delta import runs
from jaxrl_llm.learner.forward import response_logprobs
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import rows_of
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.plan.roles import make_role

pytestmark = pytest.mark.nightly

N, GROUP, P, R = 16, 2, 13, 12
# Without this epsilon the norm of an output near 0 multiplies what is rounded by thousands.
EVEN = {"rms_norm_eps": 0.1}
HALVES = HYBRID | EVEN  # a rule in every second layer
OF_EXPERTS = {"model_type": "qwen3_next", "shared_expert_intermediate_size": 8}
MODELS = {
    "four layers": HALVES | {"num_hidden_layers": 4},
    "eight layers": HALVES | {"num_hidden_layers": 8},
    "three of four": HALVES | {"num_hidden_layers": 8, "full_attention_interval": 4},
    "experts": EXPERTS | HALVES | OF_EXPERTS | {"num_hidden_layers": 4},
}
STAGES = {"pipeline": 2, "pipeline_micro_batches": 2}
ROUNDS = {"pipeline": 2, "pipeline_rounds": 2, "fsdp": 2}
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def batch() -> dict[str, Any]:
    """Samples of uneven lengths; a group answers one prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, R + 1, N)
    prompts = rng.integers(8, 24, (N // GROUP, P)), rng.integers(1, P + 1, N // GROUP)
    tokens, prompt_lengths = (x.repeat(GROUP, axis=0).astype(np.int32) for x in prompts)
    return {
        "prompts": tokens,
        "prompt_lengths": prompt_lengths,
        "responses": rng.integers(8, 24, (N, R)).astype(np.int32),
        "response_lengths": lengths.astype(np.int32),
        "mask": (np.arange(R) < lengths[:, None]).astype(np.float32),
        "weights": rng.normal(size=(N, R)).astype(np.float32),
    }


def found(
    model: str,
    sizes: dict[str, int],
    *,
    packed: bool,
    scan: bool = False,
    dtype: str = "float32",
) -> Any:
    """A weighted sum of log-probs with these, and its gradient."""
    spec = model_spec(config_from_hf(MODEL | MODELS[model]))
    config = MeshConfig(**sizes)
    mesh = make_mesh(**config.sizes)
    settings = ModelSettings(scan_layers=scan, remat="full", dtype=dtype)
    role = make_role("actor", spec, settings, mesh, phases=config)
    rows, replicas = config.pipeline_micro_batches, config.num_replicas
    row_tokens = 32 + 144 // (rows * replicas)  # most of which are real
    packing = Packed(row_tokens=row_tokens, group=GROUP, num_replicas=replicas, rows=rows)
    parts = packing if packed else Padded()

    def loss(params: Any, fields: Any) -> Any:
        part = parts.split(fields).at(0)  # which holds all samples
        found, _ = response_logprobs(params, rows_of(part), spec=spec, settings=role.forward)
        logprobs = found * fields["mask"]
        return (logprobs * fields["weights"]).sum(), logprobs

    params = make_global(random_params(spec.params, 3, scale=0.05), role.param_shardings)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return fetch(run(params, make_global(batch(), batch_sharding(mesh))))


one_device = functools.cache(lambda model: found(model, {}, packed=False, scan=True))


@pytest.mark.parametrize(
    ("model", "sizes", "packed", "scan"),
    [
        ("four layers", {"pipeline": 2, "sequence": 2, "tensor": 2}, True, False),
        SLOW("four layers", {"sequence": 2, "fsdp": 2}, True, False),
        SLOW("four layers", {"data": 2, "sequence": 4}, True, False),
        SLOW("four layers", {"sequence": 8}, False, False),
        SLOW("eight layers", {"data": 2, "sequence": 2, "tensor": 2}, False, True),
        SLOW("experts", {"sequence": 2, "expert": 2, "tensor": 2}, True, False),
        SLOW("experts", STAGES | {"expert": 2, "sequence": 2}, True, False),
        SLOW("four layers", {"data": 2, "pipeline": 2, "tensor": 2}, False, False),
        SLOW("eight layers", ROUNDS, True, False),
        SLOW("eight layers", {"pipeline": 2}, False, True),
        SLOW("three of four", STAGES, True, False),
        SLOW("experts", STAGES | {"expert": 2}, True, False),
    ],
    ids=str,
)
def test_a_mix_equals_one_device(monkeypatch, model, sizes, packed, scan):
    monkeypatch.setattr(runs, "CHUNK", 8)
    mix = found(model, sizes, packed=packed, scan=scan)
    jax.tree.map(close, mix, one_device(model))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"sequence": 4}, {"pipeline": 2, "sequence": 2, "tensor": 2}])
def test_gradients_in_bfloat16(sizes):
    """In the mean of all weights a mesh is as far from float32 as one device is."""
    exact = one_device("four layers")[1]

    def distance(sizes: dict[str, int]) -> float:
        gradients = found("four layers", sizes, packed=True, dtype="bfloat16")[1]
        pairs = zip(*map(jax.tree.leaves, (gradients, exact)), strict=True)
        return float(np.mean([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]))

    of_one = distance({})
    assert of_one > 1e-3
    assert distance(sizes) <= 1.5 * of_one


def close(found: np.ndarray, expected: np.ndarray) -> None:
    difference = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert difference <= 1e-5 * np.linalg.norm(expected)
