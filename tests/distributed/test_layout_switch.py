"""perf/layout_switch_gb: the bytes of the switch that a run really does, in its own dtype."""

from dataclasses import replace

import jax
from tiny_iteration import tiny_config

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.tokenizer import load_tokenizer


def test_bytes_are_counted_in_the_dtype_of_generation():

    def switched(**rollout) -> int:
        config = replace(tiny_config(), mesh=MeshConfig(fsdp=4))
        config = replace(config, rollout=replace(config.rollout, **rollout))
        mesh = make_mesh(1, 4, 1, devices=jax.devices()[:4])
        plan = plan_online(config, load_tokenizer("char"), mesh, None)
        kept = sum(x.size for x in jax.tree.leaves(plan.learner.spec.params))
        sharded = sum(
            x.size
            for x, s in zip(
                jax.tree.leaves(plan.learner.spec.params),
                jax.tree.leaves(plan.learner.param_shardings),
                strict=True,
            )
            if "fsdp" in s.spec
        )
        assert 0 < sharded <= kept
        width = 2 if rollout else 4
        # Three quarters of what fsdp splits are on the other devices.
        assert plan.layout_switch_bytes == sharded * width * 3 // 4
        return plan.layout_switch_bytes

    assert switched(dtype="bfloat16") * 2 == switched()
