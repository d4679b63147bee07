"""The reference that a step begins with, where plans differ: on other devices, and offline."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import MODEL
from tiny_iteration import even_tokens, first_states, random_params, run_step, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.checkpoint.huggingface import export, import_params
from jaxrl_llm.config import load_config
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.learner.forward import response_logprobs
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.plan import Plan, check_reference
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.states import untrained_states


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


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_reference_may_be_another_model_of_other_sizes(tmp_path, apart, rank):
    tokenizer, devices = load_tokenizer("char"), jax.devices()
    hf = MODEL | {"vocab_size": tokenizer.vocab_size, "num_hidden_layers": 2, "hidden_size": 24}
    spec = model_spec(config_from_hf(hf), "causal_lm")
    export(tmp_path, spec, random_params(spec.params, seed=3), tokenizer_files_from=tokenizer)
    config = tiny_config(model_reward=False, algorithm={"use_kl_loss": True})
    actor = {k: v for k, v in config.actor.hf_config.items() if k != "vocab_size"}
    lora = c.LoraConfig(rank=rank)
    config = replace(
        config,
        algorithm=c.GRPO(),
        actor=replace(config.actor, hf_config=actor, lora=lora),
        reference=c.ReferenceConfig(path=str(tmp_path)),
        placement={"reference": "1"} if apart else {},
    )
    other = {"reference": make_mesh(devices=devices[1:2])} if apart else {}
    mesh, reward = make_mesh(devices=devices[:1]), ArrayReward(even_tokens)
    plan = plan_online(config, tokenizer, mesh, reward, role_meshes=other)
    assert "reference" in plan.frozen and ("base" in plan.roles) == bool(rank)
    _, batch, metrics = run_step(plan.phases[0], untrained_states(plan), 1)
    fields = (batch.prompts, batch.prompt_lengths, batch.responses, batch.response_lengths)
    rows, settings = rows_of(sample_fields(*fields)), plan.roles["reference"].forward
    params = import_params(tmp_path, spec)
    logprobs, _ = response_logprobs(params, rows, spec=spec, settings=settings)
    mask = np.asarray(batch.mask)
    found = batch.reference_logprobs * mask
    np.testing.assert_allclose(found, logprobs * mask, rtol=1e-4, atol=1e-5)
    assert metrics["actor/kl_loss"] > 0.01


def test_a_reference_that_nothing_reads_is_refused():
    config = replace(
        tiny_config(model_reward=False),
        algorithm=c.GRPO(use_kl_loss=False),
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    plan = plan_online(config, load_tokenizer("char"), mesh, ArrayReward(even_tokens))
    with pytest.raises(c.ConfigError, match="reads no reference; leave it out, or set a KL"):
        check_reference(replace(config, reference=c.ReferenceConfig(path="org/other")), plan)
