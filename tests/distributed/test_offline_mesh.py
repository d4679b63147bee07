"""An offline step on eight devices equals that on one: padded, in micro-batches and packed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_iteration import MODEL, random_params

from jaxrl_llm import config as c
from jaxrl_llm.config import (
    ActorConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
)
from jaxrl_llm.data.collating import collate_records
from jaxrl_llm.data.run_data import load_records, train_sources
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.models.lora import split
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.reference import copying
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.nightly

SIZE = 16
# A large eps: otherwise Adam turns the rounding of gradients near 0 into whole steps.
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, eps=1e-3)


def step(
    algorithm: str, mesh: MeshConfig, num_layers: int = 1, **actor: Any
) -> tuple[Any, dict[str, float]]:
    """Parameters and metrics after one step of a tiny run, in numpy."""
    model = MODEL | {"vocab_size": 96, "num_hidden_layers": num_layers}
    config = Config(
        total_steps=4,
        mesh=mesh,
        data=DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(num_terms=2, size=SIZE),),
            train_batch_size=SIZE,
            max_prompt_length=4,
            max_response_length=4,
            truncation="right",
        ),
        actor=ActorConfig(hf_config=model, optimizer=OPTIMIZER, **actor),
        algorithm={cls.kind: cls for cls in c.ALGORITHMS}[algorithm](),
    )
    tokenizer = load_tokenizer("char")
    devices = make_mesh(**mesh.sizes)
    plan = plan_offline(config, tokenizer, devices)
    kind, role = plan.record_algorithm.records, plan.learner
    records = load_records(config, train_sources(config), kind.name, tokenizer, None)[:SIZE]
    batch = collate_records(records, length=8, pad_id=0, mismatched="mismatched" in kind.groups)
    params = jax.device_put(
        random_params(role.spec.params, seed=1, scale=0.3), role.param_shardings
    )
    states = {}
    if role.base:
        states[role.base], params = split(params)
    elif "reference" in plan.roles:
        moved = jax.tree.map(lambda x: x * jnp.float32(1.2), params)
        states["reference"] = copying(plan.roles["reference"])(moved)
    states[role.name] = role.state(params)
    held_out = jax.jit(plan.held_out)
    placed = make_global(batch, batch_sharding(devices))
    before = fetch(held_out(states, placed))
    if plan.record_algorithm.judge_pairs is not None:
        sources = train_sources(config)
        pairs = load_records(config, sources, "preferences", tokenizer, None)[:SIZE]
        rows = make_global(
            collate_records(pairs, length=8, pad_id=0, size=SIZE), batch_sharding(devices)
        )
        before |= fetch(jax.jit(plan.held_out_pairs)(states, rows))
    states, _, metrics = plan.at(1).program.run(states, placed, 1, None, Timer())
    return fetch(
        (states[role.name].params, metrics | {f"held out {k}": x for k, x in before.items()})
    )


def assert_same(found: Any, expected: Any) -> None:
    (params, metrics), (expected_params, expected_metrics) = found, expected
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    for name in expected_metrics.keys() - {"micro_batches", "row_use"}:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=2e-4, atol=2e-5, err_msg=name
        )


def test_dpo_on_eight_devices_equals_one():
    expected = step("dpo", MeshConfig())
    assert_same(step("dpo", MeshConfig(data=2, fsdp=2, tensor=2), micro_batch_size=2), expected)


def test_packed_kto_on_eight_devices_equals_one():
    expected = step("kto", MeshConfig())
    assert expected[1]["kl"] != 0 and expected[1]["held out rewards/margins"] != 0
    assert_same(step("kto", MeshConfig(fsdp=4, data=2), micro_batch_tokens=16), expected)
