"""Weights that no run could go on from are neither saved nor taken."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.soundness import UselessWeights, check_loaded


def open_manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(
        folder, keep_latest=1, keep_best=0, best_metric="", asynchronous=False, max_growth=100.0
    )


def items(weight: object, moment: object = 0.0) -> dict:
    return {
        "actor": {"weight": jnp.array(weight, jnp.float32)},
        "actor_optimizer": {"mu": jnp.array([moment], jnp.float32)},
        "ahead": {"logprobs": jnp.array([-jnp.inf])},  # no weights: may be anything
    }


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (items([1.0, jnp.nan]), "NaN or infinity is in actor/weight"),
        (items([1.0, 2.0], -jnp.inf), "NaN or infinity is in actor_optimizer/mu"),
        (items([1e5, 0.0]), "actor/weight have a root mean square of 7.07e.04"),
        (items([1e30, 0.0]), "root mean square of more than 1e19"),
        (items([300.0, 400.0]), "norm of the actor's weights is 500, and it was 5 at the start"),
    ],
)
def test_a_save_of_useless_weights_keeps_the_one_before(tmp_path, bad, why):
    manager = open_manager(tmp_path)
    manager.save(1, items([3.0, 4.0]), {}, {})
    manager.growth.most = 99.0
    with pytest.raises(UselessWeights, match=f"step 2 is not saved: .*{why}"):
        manager.save(2, bad, {}, {})
    manager.save(3, items([30.0, 40.0]), {}, {})
    manager.close()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_3"]


def test_the_norms_of_the_start_outlive_a_restart(tmp_path):
    first = open_manager(tmp_path)
    for step, weight in enumerate([3.0, 90.0]):
        first.save(step, items([weight]), {}, {})
    first.close()
    again = open_manager(tmp_path)
    again.growth.begin(again.restore(1, items([0.0]))[1]["start_norms"])
    with pytest.raises(UselessWeights, match="it was 3 at the start"):
        again.save(2, items([900.0]), {}, {})


def test_loaded_weights_are_looked_at():
    check_loaded({"a": jnp.ones(3)}, "here")
    half = jnp.array([1e5]).astype(jnp.float16)  # its number does not fit
    with pytest.raises(UselessWeights, match="here cannot be used: NaN or infinity is in model/a"):
        check_loaded({"a": half}, "here")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("on_host", [0, 320])
def test_what_is_measured_equals_numpy(dtype, on_host, monkeypatch):
    monkeypatch.setattr(digests, "MOST_ON_HOST", on_host)
    x = (np.random.default_rng(1).normal(size=(64, 5)) * 50).astype(np.float32)
    array = jnp.asarray(x).astype(dtype)
    found = digests.measure({"item": {"x": array}})["item"]["x"]
    assert found.finite and found.size == 320
    floats = np.asarray(array.astype(jnp.float32)) if dtype in ("float32", "bfloat16") else 0.0
    np.testing.assert_allclose(found.rms, np.sqrt(np.mean(np.square(floats))), rtol=1e-5)
    np.testing.assert_allclose(found.squares, np.sum(np.square(floats)), rtol=1e-5)


def test_small_arrays_are_measured_without_a_program_for_each_shape(monkeypatch):
    monkeypatch.setattr(digests, "_measure_array", lambda x: pytest.fail(f"compiles {x.shape}"))
    digests.measure({"item": {str(n): np.ones((n, 2), np.float32) for n in (1, 2, 3)}})
    with pytest.raises(pytest.fail.Exception, match="compiles"):
        digests.measure({"item": {"large": np.ones(digests.MOST_ON_HOST + 1, np.float32)}})
