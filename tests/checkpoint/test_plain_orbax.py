"""A checkpoint is read by orbax alone, as docs/jax-users.md shows it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.trainer.states import to_items

PAGE = Path(__file__).parents[2] / "docs" / "jax-users.md"


def test_three_ways(tmp_path):
    split = NamedSharding(make_mesh(fsdp=2, devices=jax.devices()[:2]), PartitionSpec("fsdp"))
    params = {"a": {"kernel": jax.device_put(jnp.arange(8.0).reshape(4, 2), split)}}
    state = init_state(params, make_optimizer(OptimizerConfig(), 10))
    manager = CheckpointManager(
        tmp_path, keep_latest=1, keep_best=0, best_metric="", asynchronous=False
    )
    manager.save(1, to_items({"actor": state}, []), {"step": 1}, {})
    manager.close()
    folder, expected = tmp_path / "global_step_1" / "actor", np.arange(8.0).reshape(4, 2)

    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder)["a"]["kernel"]
    assert restored.sharding.is_equivalent_to(split, 2)
    np.testing.assert_array_equal(restored, expected)

    (code,) = re.findall(r"```python\n(import jax\nimport orbax.*?)```", PAGE.read_text(), re.S)
    names = {}
    exec(re.sub(r'folder = ".*"', f"folder = {str(folder)!r}", code), names)
    restored = names["params"]["a"]["kernel"]
    assert restored.dtype == jnp.bfloat16 and len(restored.sharding.device_set) == 1
    np.testing.assert_array_equal(restored.astype(jnp.float32), expected)

    with ocp.PyTreeCheckpointer() as checkpointer:
        as_numpy = {"a": {"kernel": ocp.RestoreArgs(restore_type=np.ndarray)}}
        restored = checkpointer.restore(folder, restore_args=as_numpy)["a"]["kernel"]
        moments = checkpointer.restore(tmp_path / "global_step_1" / "actor_optimizer")
    assert type(restored) is np.ndarray
    np.testing.assert_array_equal(restored, expected)
    assert moments["opt_state"][0]["mu"]["a"]["kernel"].shape == (4, 2)
