"""Groups along `data` add their own micro-batches; one sum over `data` gives a device's result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EXPERTS, MODEL
from tiny_iteration import random_params

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_algorithm, build_online
from jaxrl_llm.config import MeshConfig, ModelSettings
from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import shard_rows, shard_stacked
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.learner.losses import PolicyLoss, with_counts
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.plan.roles import Role, make_role

B, P, R = 16, 6, 5
ALGORITHM = build_online(c.PPO(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01))
DENSE, MIXTURE = "dense", "mixture"
MODELS = {
    name: config_from_hf(MODEL | of_kind | {"num_hidden_layers": 1})
    for name, of_kind in ((DENSE, {}), (MIXTURE, EXPERTS))
}
ROUTER = RouterLoss(aux_coef=0.5, z_coef=0.25)


def fields() -> dict[str, np.ndarray]:
    """An update's fields, with responses of uneven lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, R + 1, B)
    mask = (np.arange(R) < lengths[:, None]).astype(np.float32)
    names = ("old_logprobs", "reference_logprobs", "advantages")
    return {name: rng.normal(size=(B, R)).astype(np.float32) * mask for name in names} | {
        "prompts": rng.integers(0, MODEL["vocab_size"], (B, P)).astype(np.int32),
        "prompt_lengths": rng.integers(1, P + 1, B).astype(np.int32),
        "responses": rng.integers(0, MODEL["vocab_size"], (B, R)).astype(np.int32),
        "response_lengths": lengths.astype(np.int32),
        "mask": mask,
    }


def role_on(sizes: dict[str, int], model: str) -> Role:
    phases = MeshConfig(**sizes)
    settings = ModelSettings(remat="full")
    spec = model_spec(MODELS[model])
    return make_role("actor", spec, settings, make_mesh(**phases.sizes), phases=phases)


def update(role: Role, row_tokens: int = 0, algorithm: Algorithm = ALGORITHM) -> tuple[Any, str]:
    """Gradients and metrics of two or more micro-batches, and the compiled program."""
    layout, mesh = role.layout, role.mesh
    parts: Any = Padded(num=2, shard=shard_stacked(layout))
    if row_tokens:
        parts = Packed(
            row_tokens=row_tokens,
            num_replicas=layout.num_replicas,
            rows=role.forward.rows_of_pass,
            shard=shard_rows(layout),
        )
    loss = PolicyLoss(
        algorithm=algorithm,
        spec=role.spec,
        settings=role.forward,
        temperature=0.9,
        with_log_ratios=True,
        router=RouterLoss() if role.spec.config.mixture is None else ROUTER,
    )

    def run(params: Any, batch: Any) -> Any:
        return accumulate(
            loss,
            params,
            with_counts(batch, jnp.bool_(False)),
            cast_ahead=role.forward.cast_ahead,
            micro_batches=parts,
            measure=lambda ratios, batch: {"ratios": ratios * batch["mask"]},
            groups=role.groups_for(algorithm.by_sample),
        )

    params = make_global(random_params(role.spec.params, 3, scale=0.2), role.param_shardings)
    batch = make_global(fields(), batch_sharding(mesh))
    shardings = role.param_shardings, None
    compiled = jax.jit(run, out_shardings=shardings).lower(params, batch).compile()
    text = compiled.as_text()
    assert text is not None
    return fetch(compiled(params, batch)), text


def gradient_bytes(role: Role) -> float:
    """What a device receives when its shards of all gradients are summed over `data` in float32."""
    shapes, places = map(jax.tree.leaves, (role.spec.params, role.param_shardings))
    sizes = [
        np.prod(s.shard_shape(x.shape), dtype=int) for x, s in zip(shapes, places, strict=True)
    ]
    groups = role.mesh.shape["data"]
    return 4 * float(sum(sizes)) * 2 * (groups - 1) / groups


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "model", "row_tokens"),
    [
        ({"data": 2, "fsdp": 2}, MIXTURE, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"data": 4}, DENSE, 22),
                ({"data": 8}, MIXTURE, 0),
                ({"data": 2, "fsdp": 2, "tensor": 2}, DENSE, 22),
                ({"data": 2, "sequence": 2, "tensor": 2}, DENSE, 22),
                ({"data": 2, "expert": 2, "fsdp": 2}, MIXTURE, 0),
                ({"data": 2, "expert": 2, "tensor": 2}, MIXTURE, 0),
                ({"data": 4, "sequence": 2}, MIXTURE, 0),
            )
        ),
    ],
    ids=str,
)
def test_one_sum_over_data_gives_the_gradients_of_one_device(sizes, model, row_tokens):
    role = role_on(sizes, model)
    (found, metrics), text = update(role, row_tokens)
    (expected, of_one), _ = update(role_on({}, model))
    for name in of_one.keys() - {"micro_batches", "row_use"}:
        np.testing.assert_allclose(metrics[name], of_one[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert metrics["micro_batches"] > 1
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
    shape = role.mesh.shape
    axes = MeshAxes(names=tuple(map(str, shape)), sizes=tuple(shape.values()))
    sums = [x for x in collectives(text, axes, []) if x.kind == "all-reduce" and "data" in x.axis]
    each = [x.bytes * x.times for x in sums if x.loops or x.times > 1]
    once = [x.bytes for x in sums if not x.loops and x.times == 1]
    whole = gradient_bytes(role)
    assert sum(each) <= 0.02 * whole  # numbers of tokens alone
    assert whole <= sum(once) <= 1.02 * whole + 4 * B * R


@pytest.mark.nightly
def test_a_loss_that_compares_samples_sees_those_of_all_groups():
    """KL-Cov chooses tokens of a whole micro-batch."""
    algorithm = build_online(c.KLCov(kl_cov_ratio=0.2))
    (found, metrics), _ = update(role_on({"data": 2}, DENSE), algorithm=algorithm)
    (expected, of_one), _ = update(role_on({}, DENSE), algorithm=algorithm)
    np.testing.assert_allclose(metrics["loss"], of_one["loss"], rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize(
    ("settings", "by_sample"),
    [
        (c.PPO(), True),
        (c.GSPO(), True),
        (c.DPO(), True),
        (c.ClipCov(), False),
        (c.Pair(loss_mode="kl_cov"), False),
        (c.Pair(loss_mode="vanilla"), True),
        (c.GRPO(bypass_mode=True), False),
    ],
    ids=str,
)
def test_which_losses_compare_samples(settings, by_sample):
    assert build_algorithm(settings).by_sample == by_sample


def test_where_micro_batches_sum_over_data_as_before():
    assert role_on({"fsdp": 8}, DENSE).data_groups is None
    modules = frozenset({"model.layers.0.self_attn.q_proj"})
    spec = model_spec(MODELS[DENSE], lora=Lora(rank=2, alpha=2.0, modules=modules, dropout=0.1))
    assert make_role("actor", spec, ModelSettings(), make_mesh(data=2)).data_groups is None
    half = ModelSettings(dtype="bfloat16")
    assert make_role("actor", model_spec(MODELS[DENSE]), half, make_mesh(data=2)).data_groups
    mixed = make_role("actor", model_spec(MODELS[DENSE]), half, make_mesh(data=2, fsdp=2))
    assert mixed.data_groups is None  # XLA's CPU compiler ends the process
