"""Experts under mixes of axes: log-probs, router losses and gradients equal one device's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DEEPSEEK, EXPERTS, GPT_OSS, MODEL
from tiny_iteration import random_params

from jaxrl_llm.config import MeshConfig, ModelSettings
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.learner.forward import response_statistics
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.learner.rows import ROUTES, rows_of
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.plan.roles import make_role

L, E, K, N, P, R = 4, 4, 2, 16, 5, 6  # layers of experts, experts, of a token; the batch
MODELS = {
    "qwen3_moe": EXPERTS | {"num_hidden_layers": L},
    "gpt_oss": GPT_OSS | {"num_hidden_layers": L},
    "deepseek_v3": DEEPSEEK | {"num_hidden_layers": 1 + L, "n_shared_experts": 1},
}
ROUTER = RouterLoss(aux_coef=0.5, by_layer=True, z_coef=0.25)
ROUTINGS = ("own", "balanced", "all to one device", "partly given")
WITH_ALL = {
    "pipeline": 2,
    "expert": 2,
    "sequence": 2,
    "pipeline_rounds": 2,
    "pipeline_micro_batches": 2,
}


def batch(routing: str) -> dict[str, Any]:
    """Samples of uneven lengths, and the experts that their tokens are given; -1 gives none."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, R + 1, N)
    fields = {
        "prompts": rng.integers(8, 24, (N, P)).astype(np.int32),
        "prompt_lengths": rng.integers(1, P + 1, N).astype(np.int32),
        "responses": rng.integers(8, 24, (N, R)).astype(np.int32),
        "response_lengths": lengths.astype(np.int32),
        "mask": (np.arange(R) < lengths[:, None]).astype(np.float32),
        "weights": rng.normal(size=(N, R)).astype(np.float32),
    }
    routes = np.argsort(rng.normal(size=(N, P + R, L, E)))[..., :K]
    if routing == "all to one device":
        routes = np.broadcast_to([0, 1], routes.shape)
    if routing == "own":
        routes = np.full_like(routes, -1)
    if routing == "partly given":
        routes = np.where(rng.random((N, P + R, 1, 1)) < 0.5, routes, -1)
    return fields | {ROUTES: routes.astype(np.int8)}


@functools.cache
def program(family: str, sizes: tuple[tuple[str, int], ...], packed: bool, scan: bool) -> Any:
    """A compiled function of a batch: log-probs, the routers' sums, and gradients of a loss."""
    spec = model_spec(config_from_hf(MODEL | MODELS[family]))
    config = MeshConfig(**dict(sizes))
    mesh = make_mesh(**config.sizes)
    settings = ModelSettings(scan_layers=scan, remat="full")
    role = make_role("actor", spec, settings, mesh, phases=config)
    num = config.pipeline_micro_batches
    rows = Packed(row_tokens=96, num_replicas=config.num_replicas, rows=num)
    parts = rows if packed else Padded()

    def loss(params: Any, fields: Any) -> Any:
        part = parts.split(fields).at(0)
        statistics = response_statistics(params, rows_of(part), spec=spec, settings=role.forward)
        assert statistics.routed is not None
        added, metrics = ROUTER(statistics.routed, jnp.float32(1.0))
        logprobs = statistics.logprobs * fields["mask"]
        value = (logprobs * fields["weights"]).sum() + added
        return value, (logprobs, metrics)

    params = make_global(random_params(spec.params, 3, scale=0.2), role.param_shardings)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda fields: fetch(run(params, make_global(fields, batch_sharding(mesh))))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "sizes", "packed", "scan"),
    [
        ("qwen3_moe", WITH_ALL, True, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3_moe", WITH_ALL, False, True),
                (
                    "qwen3_moe",
                    {"pipeline": 2, "expert": 4, "pipeline_micro_batches": 2},
                    False,
                    False,
                ),
                ("qwen3_moe", {"pipeline": 4, "expert": 2}, False, True),
                ("qwen3_moe", {"pipeline": 2, "expert": 2, "tensor": 2}, True, True),
                ("qwen3_moe", {"data": 2, "pipeline": 2, "expert": 2}, True, False),
                ("qwen3_moe", {"sequence": 4, "expert": 2}, True, False),
                ("qwen3_moe", {"sequence": 2, "expert": 2, "tensor": 2}, False, False),
                ("qwen3_moe", {"fsdp": 2, "sequence": 4}, True, True),
                ("gpt_oss", {"pipeline": 2, "expert": 2, "tensor": 2}, True, False),
                ("gpt_oss", {"pipeline": 2, "expert": 2, "sequence": 2}, False, False),
                ("deepseek_v3", WITH_ALL, True, False),
                ("deepseek_v3", {"sequence": 2, "expert": 2, "tensor": 2}, True, False),
            )
        ),
    ],
    ids=str,
)
def test_a_mix_equals_one_device(family, sizes, packed, scan):
    run, alone = (
        program(family, tuple(sizes.items()), packed, scan),
        program(family, (), False, False),
    )
    for routing in ROUTINGS:
        fields = batch(routing)
        found, expected = run(fields), alone(fields)
        jax.tree.map(close, found, expected)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    difference = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert difference <= 1e-5 * np.linalg.norm(expected) + 1e-9
