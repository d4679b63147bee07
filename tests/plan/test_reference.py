"""The reference that a step begins with, where plans differ: on other devices, and offline."""

from dataclasses import replace

import jax
import numpy as np
from tiny_iteration import first_states, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.config import load_config
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer


def check(plan: Plan) -> None:
    (phase,) = plan.phases
    states = first_states(phase)
    old, policy = fetch(states["reference"]), fetch(plan.learner.params_in(states))
    for step in (1, 2, 4):
        assert plan.enter(step, states) is states
    reference = plan.enter(3, states)["reference"]
    places = jax.tree.map(lambda x: x.sharding, reference)
    assert places == plan.roles["reference"].param_shardings
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, policy)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), fetch(reference), expected
    )


SETTINGS = c.ReferenceConfig(refresh_every=2, mixup_alpha=0.25)


def test_a_reference_on_devices_of_its_own_follows():
    config = replace(tiny_config(), reference=SETTINGS, placement={"reference": "1"})
    mesh, other = (make_mesh(devices=jax.devices()[i : i + 1]) for i in (0, 1))
    meshes = {"reference": other}
    reward = ArrayReward(lambda responses, lengths: lengths)
    check(plan_online(config, load_tokenizer("char"), mesh, reward, role_meshes=meshes))


def test_the_reference_of_dpo_follows():
    config = replace(load_config("dpo", []), reference=SETTINGS)
    check(plan_offline(config, load_tokenizer("char"), make_mesh(devices=jax.devices()[:1])))
