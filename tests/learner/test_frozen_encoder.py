"""Parts of an image encoder that do not learn have no state, and no weight decay moves them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import further

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.configs.grpo_vision import MODEL
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.models.vision import frozen_parameters


@pytest.mark.parametrize("name", further(["muon", "adamw", "sgd"]))
@pytest.mark.parametrize("train", further(["projector", "none", "all"]))
def test_what_is_frozen_stays(train, name):
    config = config_from_hf(MODEL, images=True)
    object.__setattr__(config.vision, "train", train)
    spec = model_spec(config)
    params = init_params(spec, jax.random.key(0))
    frozen = frozen_parameters(config.vision, params)
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.1), 10, spec.axes, frozen)
    state = optimizer.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(gradients, state, params, finite=True)
    after = optax.apply_updates(params, updates)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), after, params)
    assert all(jax.tree.leaves(moved["decoder"]))
    assert all(jax.tree.leaves(moved["vision"]["projector"])) == (train != "none")
    layers = jax.tree.leaves(moved["vision"]["layers"])
    assert all(layers) if train == "all" else not any(layers)
    sizes = sum(x.size for x in jax.tree.leaves(state))
    if name == "adamw":
        learned = sum(x.size for x in jax.tree.leaves(params))
        if frozen is not None:
            fixed = zip(jax.tree.leaves(params), jax.tree.leaves(frozen), strict=True)
            learned -= sum(x.size for x, is_fixed in fixed if is_fixed)
        assert abs(sizes - 2 * learned) < 10
