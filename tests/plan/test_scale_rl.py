"""The example of ScaleRL's recipe: the keys that it sets, and the step that they plan."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_iteration import even_tokens

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.config import load_config
from jaxrl_llm.data.priority import weight_function
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "scale_rl.py"


def test_the_keys_make_scale_rls_loss(tmp_path):
    """-sg(min(ratio, 5)) A / std(A) log pi, the mean over prompts of the mean over their tokens."""
    config = load_config(str(EXAMPLE), [("run_dir", str(tmp_path))])
    mesh = make_mesh(devices=jax.devices()[:1])
    plan = plan_online(config, load_tokenizer("char"), mesh, ArrayReward(even_tokens))
    (phase,) = plan.phases
    plan.trace()
    assert phase.collecting and phase.roles["actor"].spec.float32_head
    algorithm = phase.algorithm
    reads = field_names(algorithm.policy_loss)
    assert "rollout_logprobs" in reads and "old_logprobs" not in reads
    rewards, groups = np.float32([[1], [0], [1], [3]]), np.int32([0, 0, 1, 1])
    ones = jnp.ones((4, 1))
    advantages, _ = algorithm.advantage(jnp.array(rewards), ones, jnp.array(groups))
    centred = np.array([0.5, -0.5, -1.0, 1.0])
    np.testing.assert_allclose(advantages[:, 0], centred / centred.std(ddof=1), rtol=1e-5)
    ratio = np.array([1.5, 0.5, 8.0, 1.0])
    fields = {"rollout_logprobs": -ones, "logprobs": jnp.log(ratio)[:, None] - 1.0, "mask": ones}
    fields |= {"advantages": advantages}
    loss, _ = algorithm.policy_loss(*(fields[name] for name in reads))
    expected = -np.minimum(ratio, 5.0) * np.asarray(advantages)[:, 0] * (np.log(ratio) - 1.0)
    np.testing.assert_allclose(loss[:, 0], expected, rtol=1e-5)
    assert config.algorithm.loss_aggregation == "prompt-mean"
    weigh = weight_function(config.data.priority)
    np.testing.assert_array_equal(weigh(np.array([0.0, 0.875, 0.9, 1.0])), [1, 1, 0, 0])
