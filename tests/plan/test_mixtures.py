"""What a plan says of mixtures of experts before any array exists."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from tiny import MODEL
from tiny_iteration import even_tokens, first_states, open_iteration, run_step, tiny_config

from jaxrl_llm.config import GRPO, ConfigError, LoraConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner.rows import ROUTES
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import CharTokenizer

VOCAB = {"vocab_size": 96}
EXPERTS = tiny.EXPERTS | VOCAB
GPT_OSS_EXPERTS = LoraConfig(rank=2, targets=("all-linear", "gate_up_proj", "down_proj"))
OLMOE = EXPERTS | {"model_type": "olmoe"}
GPT_OSS = tiny.GPT_OSS | VOCAB
GEMMA_2 = VOCAB | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "hidden_act": None,
}
DEEPSEEK = tiny.DEEPSEEK | VOCAB | {"q_lora_rank": None}


def planned(model, **changes):
    config = tiny_config(model_reward=False)
    actor = replace(config.actor, hf_config=MODEL | model, **changes.pop("actor", {}))
    for name, value in changes.items():
        of = getattr(config, name)
        changes[name] = replace(of, **value) if isinstance(value, dict) else value
    mesh = make_mesh(devices=jax.devices()[:1])
    config = replace(config, actor=actor, **changes)
    return plan_online(config, CharTokenizer(), mesh, ArrayReward(even_tokens)).phases[0]


def test_the_coefficients_are_those_of_the_actor():
    router = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.2}
    found = planned(EXPERTS, actor=router | {"router_aux_loss_by_layer": True})
    update = next(stage for stage in found.stages if stage.name == "update_actor")
    assert (update.loss.router.aux_coef, update.loss.router.z_coef) == (0.1, 0.2)
    assert update.loss.router.by_layer


def readers(iteration):
    return [stage.name for stage in iteration.stages if ROUTES in stage.reads]


def test_routes_are_recorded_and_replayed_unless_switched_off():
    found = planned(EXPERTS)
    generation = next(stage for stage in found.stages if stage.generates)
    assert ROUTES in generation.writes
    assert readers(found) == ["old_log_prob", "update_actor"]
    off = planned(EXPERTS, rollout={"routing_replay": False})
    dense = planned({"vocab_size": 96})
    for other in (off, dense):
        assert readers(other) == []
        assert all(ROUTES not in stage.writes for stage in other.stages)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            {"vocab_size": 96},
            {"actor": {"router_z_loss_coef": 0.1}},
            "z_loss_coef=0.1: .*no routers",
        ),
        (
            {"vocab_size": 96},
            {"actor": {"router_aux_loss_by_layer": True}},
            "True: .*no routers",
        ),
        ({"vocab_size": 96}, {"mesh": {"expert": 2}}, "mesh.expert=2: no model .*has experts"),
        (EXPERTS, {"actor": {"lora": LoraConfig(rank=2, dropout=0.1)}}, "targets=q_proj,k_proj"),
        (OLMOE, {}, "olmoe has no scalar model"),
        (EXPERTS, {"actor": {"router_bias_rate": 0.1}}, "router_bias_rate=0.1: .*softmax"),
        (DEEPSEEK, {"actor": {"router_z_loss_coef": 0.1}}, "router_z_loss_coef=0.1: .*sigmoid"),
        (
            {"vocab_size": 96},
            {"actor": {"router_bias_rate": 0.1}},
            "bias_rate=0.1: .*no routers",
        ),
        (
            DEEPSEEK,
            {"actor": {"lora": LoraConfig(rank=2, dropout=0.1)}},
            "targets=q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj$",
        ),
        (DEEPSEEK, {"exact": "strict"}, "with latent differ .*exact=repeatable"),
        (GPT_OSS | {"sliding_window": None, "layer_types": None}, {"exact": "strict"}, "sinks"),
        (DEEPSEEK | {"num_key_value_heads": 2}, {}, "num_kv_heads 2 with latent attention"),
    ],
)
def test_what_is_not_done_is_refused(model, changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        planned(model, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (EXPERTS, {}),
        (EXPERTS, {"micro_batch_tokens": 24}),
        (EXPERTS, {"lora": LoraConfig(rank=2)}),
        (GPT_OSS, {"micro_batch_tokens": 24}),
        (GPT_OSS, {"lora": GPT_OSS_EXPERTS}),
        (DEEPSEEK, {"micro_batch_tokens": 24, "router_bias_rate": 0.1}),
        (DEEPSEEK, {"lora": LoraConfig(rank=2)}),
    ],
    ids=str,
)
def test_the_first_step_sees_the_policy_that_sampled(model, changes):
    config = tiny_config(model_reward=False, algorithm={"use_kl_in_reward": False})
    actor = replace(config.actor, hf_config=MODEL | model, ppo_epochs=1, ppo_mini_batch_size=16)
    actor = replace(actor, **changes)
    config = replace(config, actor=actor, algorithm=GRPO(use_kl_loss=True))
    iteration = open_iteration(config)
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    assert batch.rollout_routes.dtype == np.int8
    assert metrics["actor/ppo_kl"] == 0.0  # the ratio is exactly 1
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["rollout_corr/kl"] < 1e-6
