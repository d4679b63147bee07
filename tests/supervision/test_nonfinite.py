"""Weights that are not finite."""

import jax.numpy as jnp

from jaxrl_llm.supervision.nonfinite import nonfinite_values


def test_values_that_are_not_finite_are_named():
    good, bad = jnp.ones(3), jnp.array([1.0, jnp.inf])
    params = {"actor": {"head": good, "layer": {"up": bad}}, "critic": {"head": bad * jnp.nan}}
    assert nonfinite_values(params) == ["actor.layer.up", "critic.head"]
    assert nonfinite_values({"actor": {"head": good}}) == []
