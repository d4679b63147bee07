"""Two real processes over loopback: joining, barriers, global arrays, draws by priority."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np

from jaxrl_llm.distributed import multihost
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import batch_sharding, replicated

PROGRAM = """
    import sys, time
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxrl_llm.data.priority import PriorityLoader
    from jaxrl_llm.distributed import multihost
    from jaxrl_llm.distributed.mesh import make_mesh
    from jaxrl_llm.distributed.sharding import batch_sharding, replicated
    from jaxrl_llm.types import Prompt

    process = int(sys.argv[1])
    multihost.initialize(f"127.0.0.1:{sys.argv[2]}", 2, process, timeout_s=60)
    assert jax.process_count() == 2 and multihost.is_main() == (process == 0)
    try:
        make_mesh(data=1)
        raise SystemExit("a mesh that leaves a process out was accepted")
    except ValueError as error:
        assert "--config.mesh.data=2 fits" in str(error), error
    mesh = make_mesh(fsdp=2)

    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    tree = multihost.make_global({"rows": rows}, batch_sharding(mesh))
    (shard,) = tree["rows"].addressable_shards
    np.testing.assert_array_equal(shard.data, rows[2 * process : 2 * process + 2])

    def program(x):
        return {"twice": x * 2, "total": x.sum()}

    out = jax.jit(program, out_shardings={"twice": batch_sharding(mesh),
                                          "total": replicated(mesh)})(tree["rows"])
    host = multihost.fetch({**out, "mine": np.float32(7)})
    np.testing.assert_array_equal(host["twice"], rows * 2)
    assert host["total"] == rows.sum() and host["mine"] == 7

    # Weights that differ between processes, as a wrong function of a user's may: draws do not.
    prompts = [Prompt(token_ids=(i,), text=str(i), row=i) for i in range(8)]
    tilt = (1 + np.arange(8.0)) ** (9 if process else -9)

    def weigh(mean):
        return np.resize(tilt, mean.shape)

    loader = PriorityLoader(prompts, weigh, batch_size=2, seed=0, uniform=0.0)
    for step in range(1, 13):
        drawn = np.array([prompt.row for prompt in loader.draw(step)])
        everyone = multihost.gather_rows(drawn[None])
        np.testing.assert_array_equal(everyone[0], everyone[1])
        loader.update(step, np.zeros(2, np.float32))

    multihost.barrier("ready", timeout_s=30)
    multihost.barrier("ready", timeout_s=30)  # a name may be used again
    if process == 0:
        start = time.monotonic()
        try:
            multihost.barrier("lonely", timeout_s=1)
            raise SystemExit("the barrier let one process pass")
        except multihost.BarrierTimeout as error:
            assert error.missing == (1,), error
            assert "'lonely': process 1 of 2 did not arrive within 1 s" in str(error), error
        assert time.monotonic() - start < 20
    multihost.barrier("end", timeout_s=60)
    print("process", process, "is done")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_share_arrays_and_a_barrier_names_who_is_missing():
    port, env = free_port(), dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    commands = [
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(process), str(port)]
        for process in range(2)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def test_a_lone_process_needs_no_coordinator():
    mesh = make_mesh(devices=jax.devices()[:1])
    rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    tree = multihost.make_global(
        {"a": rows, "b": {"c": rows[0]}}, {"a": batch_sharding(mesh), "b": replicated(mesh)}
    )
    host = multihost.fetch(tree)
    np.testing.assert_array_equal(host["a"], rows)
    np.testing.assert_array_equal(host["b"]["c"], rows[0])
    multihost.barrier("alone", timeout_s=0.01)
    assert multihost.is_main()
