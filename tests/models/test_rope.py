"""Rope scaling: frequencies by hand, the rule of a run's context, bad values, sampler = trainer.

The logits of every kind are compared with transformers' in test_models.py and tests/parity/.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, model_config
from tiny_iteration import first_states, open_iteration, packed, prompts, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.models import families
from jaxrl_llm.models.base import ModelConfig
from jaxrl_llm.models.layers import rope_frequencies, rope_tables
from jaxrl_llm.models.rope import DynamicRope, Llama3Rope, LongRope, YarnRope

SIZES = {"vocab_size": 8, "hidden_size": 128, "intermediate_size": 8, "num_layers": 1}
WIDE = ModelConfig(
    family="llama", **SIZES, num_heads=1, num_kv_heads=1, head_dim=128, rope_theta=500000.0
)
LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 6.0, 8.0]}


def test_llama3_scaling_keeps_fast_pairs_and_divides_slow_ones():
    scaling = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    plain = rope_frequencies(WIDE)
    scaled = rope_frequencies(replace(WIDE, rope_scaling=scaling))
    wavelength = 2 * np.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_sharpens_attention():
    config = replace(WIDE, rope_scaling=YarnRope(factor=4.0, original_max_position_embeddings=8192))
    plain, scaled = rope_frequencies(WIDE), rope_frequencies(config)
    turns = 8192 * plain / (2 * np.pi)
    # The bounds are rounded outwards to whole pairs, hence the neighbour.
    fast, slow = np.roll(turns > 32, -1), np.roll(turns < 1, 1)
    fast[-1] = slow[0] = False
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 4, rtol=1e-6)
    assert fast.sum() > 10 and slow.sum() > 10
    assert ((scaled < plain) & (scaled > plain / 4))[turns < 32 * (turns > 1)].all()
    cos, sin = rope_tables(config, jnp.array([[0, 3, 77]]))
    scale = 0.1 * math.log(4.0) + 1.0
    np.testing.assert_allclose(cos**2 + sin**2, np.full(cos.shape, scale**2), rtol=1e-5)
    given = replace(config.rope_scaling, attention_factor=1.5)
    assert given.attention_scale == 1.5


def test_dynamic_is_no_scaling_up_to_the_trained_length_and_fixed_beyond_it():
    config = model_config(rope_scaling=DynamicRope(factor=2.0))  # 32 positions, 8 a head
    plain = rope_frequencies(model_config())
    assert config.for_context(32) == config
    np.testing.assert_array_equal(rope_frequencies(config), plain)
    fixed = config.for_context(64)
    # (factor * length / trained - (factor - 1)) ** (H / (H - 2)) = 3 ** (8 / 6)
    assert fixed.rope_theta == pytest.approx(10000 * 3 ** (4 / 3))
    assert families.to_hf_config(fixed)["rope_parameters"]["rope_type"] == "default"
    assert fixed.max_position_embeddings == 64
    assert fixed.for_context(128) == fixed


def test_longrope_takes_one_set_of_factors_for_a_run():
    scaling = LongRope(
        factor=2.0,
        original_max_position_embeddings=16,
        short_factor=(1.0, 1.5, 2.0, 3.0),
        long_factor=(1.0, 4.0, 6.0, 8.0),
    )
    config = model_config(rope_scaling=scaling)
    plain = rope_frequencies(model_config())
    assert config.for_context(16) == config
    np.testing.assert_allclose(rope_frequencies(config) * [1, 1.5, 2, 3], plain, rtol=1e-6)
    fixed = config.for_context(17)
    np.testing.assert_allclose(rope_frequencies(fixed) * [1, 4, 6, 8], plain, rtol=1e-6)
    assert fixed.for_context(99) == fixed
    assert scaling.attention_scale == pytest.approx(math.sqrt(1 + math.log(2) / math.log(16)))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "proportional"}, "rope type 'proportional' is not supported"),
        ({"type": "su", **LONG}, "rope type 'su' is not supported"),
        ({"type": "linear"}, "'linear' without factor"),
        ({"type": "linear", "factor": 0.5}, "factor=0.5: it must be at least 1"),
        ({"type": "dynamic", "factor": "2"}, "factor='2': give a positive number"),
        ({"type": "yarn", "factor": True}, "factor=True"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 0}, "beta_fast=0"),
        ({"type": "yarn", "factor": 2.0, "beta_slow": 64}, "beta_slow=64 and beta_fast=32"),
        ({"type": "yarn", "factor": 2.0, "truncate": 1}, "truncate=1: give true or false"),
        ({"type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor=-1.0"),
        ({"type": "yarn", "factor": 2.0, "mscale": math.nan}, "mscale=nan"),
        ({"type": "yarn", "original_max_position_embeddings": "8k"}, "embeddings='8k'"),
        ({"type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "a rope_theta above 1"),
        ({"type": "yarn", "factor": 2.0, "rope_theta": "1e6"}, "rope_theta='1e6'"),
        ({"type": "llama3", "factor": 2.0}, "without low_freq_factor, high_freq_factor"),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor=4.0",
        ),
        ({"type": "longrope", "short_factor": [1.0] * 4}, "'longrope' without long_factor"),
        ({"type": "longrope", **LONG, "long_factor": [1.0] * 3}, "long_factor=.*: give 4 numbers"),
        ({"type": "longrope", **LONG, "short_factor": 1.0}, "short_factor=1.0: give 4 numbers"),
        ({"type": "longrope", **LONG, "short_factor": [1, 1, 1, -1]}, "short_factor="),
        (
            {"type": "longrope", **LONG, "original_max_position_embeddings": 1},
            "original_max_position_embeddings=1: it must be at least 2",
        ),
        (["yarn"], "give a table of keys"),
    ],
)
def test_bad_values_are_refused_by_key(rope, message):
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            families.config_from_hf({**MODEL, key: rope})


BEYOND = {  # the 4 or 8 tokens that the model was trained with
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 4},
    "dynamic": {"factor": 4.0},
    "longrope": {**LONG, "original_max_position_embeddings": 4},
}


def iteration_of(kind):
    """The programs of rows of up to 11 tokens, and the model as its files describe it."""
    hf = {**MODEL, "rope_scaling": {"type": kind, **BEYOND[kind]}, "max_position_embeddings": 8}
    config = packed(tiny_config(model_reward=False), 40)
    actor = replace(config.actor, hf_config=hf)
    config = replace(config, actor=actor, algorithm=c.GRPO(use_kl_loss=False))
    return open_iteration(config), families.config_from_hf(hf)


@pytest.mark.parametrize("kind", BEYOND)
def test_the_sampler_and_the_trainer_have_the_frequencies_of_the_longest_row(kind):
    iteration, described = iteration_of(kind)
    model = iteration.roles["actor"].spec.config
    assert model == described.for_context(11)
    assert (model == described) == (kind == "yarn")


# Both read the frequencies of one config. Longrope's depend on the length and scale
# attention too, as the others' do one by one.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind != "longrope" else ()) for kind in BEYOND],
)
def test_the_sampler_and_the_trainer_have_the_same_log_probs(kind):
    """The sampler decodes token by token; the trainer packs rows of several samples."""
    iteration, _ = iteration_of(kind)
    stages = {stage.name: stage for stage in iteration.stages}

    @jax.jit
    def sample_and_score(state, fields):
        for name in ("gen", "old_log_prob"):
            given = {field: fields[field] for field in stages[name].reads}
            fields |= stages[name](state, 1, **given).writes
        return fields

    fields = {name: x for name, x in vars(prompts(iteration.config)).items() if x is not None}
    found = sample_and_score(first_states(iteration)["actor"], fields)
    assert found["mask"].sum(axis=1).max() == 5
    np.testing.assert_allclose(found["rollout_logprobs"], found["old_logprobs"], atol=2e-5)
