"""What digests cost a save and a load: python scripts/benchmarks/checkpoint_digests.py SHAPE FOLDER

Saves and loads the parameters of a named shape in float32, with random values, on one device.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_llm.checkpoint import digests, manager
from jaxrl_llm.checkpoint.layout import is_complete
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.shapes import SHAPES


def main(shape: str, folder: str) -> None:
    """Print the seconds of each part as JSON."""
    spec = model_spec(SHAPES[shape], dtype="float32")
    params = jax.block_until_ready(jax.jit(lambda key: init_params(spec, key))(jax.random.key(0)))
    items = {"actor": params}
    found = {"gigabytes": sum(x.nbytes for x in jax.tree.leaves(params)) / 1e9}
    digests.array_digests(items)  # compiles
    found["array digests"] = min(seconds(lambda: digests.array_digests(items)) for _ in range(3))
    path = Path(folder) / "checkpoints"
    shutil.rmtree(path, ignore_errors=True)
    checkpoints = CheckpointManager(
        path, keep_latest=1, keep_best=0, best_metric="", asynchronous=True
    )
    started = time.perf_counter()
    found["save returns"] = seconds(lambda: checkpoints.save(1, items, {"step": 1}, {}))
    step = checkpoints.path(1)
    while not is_complete(step):
        time.sleep(0.01)
    found["save is on disk"] = time.perf_counter() - started
    found["file digests, in the background"] = seconds(checkpoints.wait)
    checkpoints.close()
    found["files compared"] = seconds(lambda: digests.check_files(step))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    for x in jax.tree.leaves(params):
        x.delete()
    found["load with both"] = seconds(
        lambda: jax.block_until_ready(manager.restore(step, {"actor": abstract}))
    )
    device = jax.devices()[0].device_kind
    print(
        json.dumps({"shape": shape, "device": device} | {k: round(v, 3) for k, v in found.items()})
    )


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
