"""Two real processes over loopback: joining, barriers, rows of hosts, draws, an exported model."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import tiny_config, write_directory

from jaxrl_llm.distributed import multihost
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import batch_sharding, replicated

PROGRAM = """
    import sys, time
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
    from jaxrl_llm.data.priority import PriorityLoader
    from jaxrl_llm.distributed import multihost
    from jaxrl_llm.distributed.mesh import make_mesh
    from jaxrl_llm.distributed.sharding import TRAIN_RULES, batch_sharding, replicated, shardings
    from jaxrl_llm.models.base import model_spec
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

    # Each holds two of four rows. Under `tensor` both hold all of them, and own two each.
    for axes, held in (({"fsdp": 2}, [2 * process, 2 * process + 1]), ({"tensor": 2}, range(4))):
        sharding = batch_sharding(make_mesh(**axes))
        mine = multihost.host_rows(sharding, 4)
        assert mine.held.tolist() == list(held) and mine.shared == ("tensor" in axes), mine
        assert mine.owned.tolist() == [2 * process, 2 * process + 1], mine
        placed = multihost.place_held({"rows": rows[mine.held]}, sharding, mine)
        np.testing.assert_array_equal(multihost.fetch_rows(placed, mine)["rows"], rows[mine.owned])
        scores = np.array([0.5, np.nan, -3.0, 1e-8], np.float32)
        kinds = {"scores": scores, "ids": np.arange(4, dtype=np.uint32), "flags": scores > 0}
        owned = {name: x[mine.owned] for name, x in kinds.items()}
        placed = multihost.place_owned(owned, sharding, mine)
        for name, array in multihost.fetch(placed).items():
            assert placed[name].sharding == sharding and array.dtype == kinds[name].dtype
            np.testing.assert_array_equal(array, kinds[name])

    for turn in range(3):
        found = multihost.gather_objects({"process": process, "turn": turn})
        assert found == [{"process": i, "turn": turn} for i in range(2)], found
    assert multihost.value_of_main(process) == 0
    assert multihost.sum_over_processes(process + 0.5) == 2.0

    # Weights that differ between processes, as a wrong function of a user's may: draws do not.
    prompts = [Prompt(token_ids=(i,), text=str(i), row=i) for i in range(8)]
    tilt = (1 + np.arange(8.0)) ** (9 if process else -9)

    def weigh(mean):
        return np.resize(tilt, mean.shape)

    loader = PriorityLoader(prompts, weigh, batch_size=2, seed=0, uniform=0.0)
    for step in range(1, 13):
        drawn = np.array([prompt.row for prompt in loader.draw(step)])
        everyone = multihost.gather_objects(drawn.tolist())
        assert everyone[0] == everyone[1], everyone
        loader.update(step, np.zeros(1, np.float32), multihost.host_rows(batch_sharding(mesh), 2))

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
        try:
            multihost.gather_objects(1, "lonely gather", timeout_s=1)
            raise SystemExit("a value was gathered from one process")
        except multihost.BarrierTimeout as error:
            assert error.missing == (1,), error
    multihost.barrier("not lonely", timeout_s=60)

    # Each holds half of a model. Both import it, both export it, one of them writes.
    source, out = sys.argv[3:]
    spec = model_spec(load_model_config(source))
    placed = shardings(spec.axes, spec.params, mesh, TRAIN_RULES)
    params = import_params(source, spec, placed)
    assert not params["decoder"]["embed"]["table"].is_fully_addressable
    export(out, spec, params, tokenizer_files_from=source)
    multihost.barrier("end", timeout_s=60)
    print("process", process, "is done")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.nightly
def test_two_processes_share_arrays_and_a_model_and_a_barrier_names_who_is_missing(tmp_path):
    port, env = free_port(), dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    source, out = write_directory(tmp_path / "source", tiny_config()), tmp_path / "out"
    commands = [
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(process), str(port), source, out]
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
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize(
    "holders, group, owned",
    [
        ({(0, 8): {0}, (8, 16): {1}}, 4, {0: range(8), 1: range(8, 16)}),
        # Not in the order of the processes, and two ranges of one process.
        (
            {(0, 4): {1}, (4, 8): {0}, (8, 12): {1}},
            2,
            {0: range(4, 8), 1: [*range(4), *range(8, 12)]},
        ),
        # Three processes hold four groups of four: 1, 1 and 2 of them.
        ({(0, 16): {0, 1, 2}}, 4, {0: range(8), 1: range(8, 12), 2: range(12, 16)}),
        # Each pair of processes holds half a group: the first of them owns it.
        ({(0, 4): {0, 1}, (4, 8): {2, 3}}, 8, {0: range(4), 1: (), 2: range(4, 8), 3: ()}),
    ],
)
def test_every_row_has_one_owner_and_groups_stay_whole(holders, group, owned):
    num_rows = max(stop for _, stop in holders)
    for process, expected in owned.items():
        rows = multihost.rows_of_process(holders, num_rows, group, process)
        assert rows.owned.tolist() == list(expected), process
        own = [range(*ends) for ends, found in holders.items() if process in found]
        assert rows.held.tolist() == sorted(row for part in own for row in part)
    assert sorted(row for rows in owned.values() for row in rows) == list(range(num_rows))


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
