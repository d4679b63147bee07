"""Devices and processes, the compile cache."""

import os
import subprocess
import sys
import threading

import jax
import pytest

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.launch import runtime
from jaxrl_llm.launch.host_memory import host_memory


def test_mesh_larger_than_the_cpu_names_the_flag():
    count = jax.device_count()
    with pytest.raises(ConfigError, match=f"--devices={8 * count}.*device_count={8 * count}"):
        runtime.fit_mesh(MeshConfig(fsdp=8 * count))
    assert runtime.fit_mesh(MeshConfig(data=count)) == MeshConfig(data=count)


def test_a_placement_fits_the_devices(monkeypatch, capsys):
    count = jax.device_count()
    assert runtime.fit_mesh(MeshConfig(), range(count)) == MeshConfig()
    assert not capsys.readouterr().err  # no device is idle
    runtime.fit_mesh(MeshConfig(), [0, count - 1])
    assert f"uses 2 of {count} devices" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"(?s)names device {count}, but {count} .* --devices="):
        runtime.fit_mesh(MeshConfig(), [0, count])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    # Roles of several processes have devices of their own, so the mesh need not have all.
    assert runtime.fit_mesh(MeshConfig(), range(count)) == MeshConfig()


def test_a_role_on_the_devices_of_a_rollout_ahead_is_refused(monkeypatch):
    config = Config(placement={"rollout": 1, "reference": "rollout"}, max_staleness=1)
    assert runtime._placed(config) == [0, 1, 1]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="and reference has.*placement.reference=actor"):
        runtime._placed(config)


def test_devices_flag_splits_the_cpu_which_keeps_what_is_freed():
    """Four arrays of 64 MB are 65,536 pages. In some rounds an array is freed late."""
    program = (
        "import os, resource\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
        "from jaxrl_llm.config import MeshConfig\n"
        "from jaxrl_llm.launch import runtime\n"
        "runtime.prepare(num_cpu_devices=8)\n"
        "import jax\n"
        "print(jax.device_count(), runtime.fit_mesh(MeshConfig(fsdp=8)).fsdp)\n"
        "print(runtime.IN_ORDER in os.environ['XLA_FLAGS'])\n"
        "fill = jax.jit(lambda value: jax.numpy.full(2**24, value))\n"
        "def faults():\n"
        "    for _ in range(4): fill(1.0).block_until_ready()\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "rounds = [faults() for _ in range(9)]\n"
        "print(min(b - a for a, b in zip(rounds, rounds[1:])) < 4096)\n"
        "runtime.fit_mesh(MeshConfig(data=2))\n"
        "runtime.fit_mesh(MeshConfig(fsdp=2))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout == "8 8\nTrue\nTrue\n", result.stderr
    assert result.stderr.splitlines() == [
        "the mesh uses 2 of 8 devices, 6 are idle; --config.mesh.data=8 uses all",
        "the mesh uses 2 of 8 devices, 6 are idle; with fsdp=2, --config.mesh.data=4 uses all",
    ]


def test_memory_of_a_container(tmp_path):
    machine = host_memory(())
    assert machine > 2**28
    for given, expected in (("max", machine), ("1048576", 2**20), (str(2**62), machine)):
        (tmp_path / "memory.max").write_text(given + "\n")
        limits = (tmp_path / "memory.max", tmp_path / "missing")
        assert host_memory(limits) == expected


def test_half_a_set_of_process_variables_is_refused():
    with pytest.raises(KeyError, match="JAXRL_NUM_PROCESSES"):
        runtime.join_processes({runtime.COORDINATOR: "127.0.0.1:1"})
    values = {runtime.COORDINATOR: "127.0.0.1:1", runtime.NUM_PROCESSES: "2"}
    with pytest.raises(ConfigError, match="from 0 to 1"):
        runtime.join_processes({**values, runtime.PROCESS_ID: "2"})


SHARED = {"SLURM_GPUS_ON_NODE": "4", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        # One task a node with four GPUs: all of them, where jax takes the first one.
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, 4, [0, 1, 2, 3]),
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2"}, 4, [2]),
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_LOCALID": "1"}, 4, [2, 3]),
        # --gpus-per-task=1: the task sees only its own GPU, whatever its number is.
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2"}, 1, [0]),
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, 0, None),  # a CPU
        ({"OMPI_COMM_WORLD_RANK": "0"}, 4, None),
    ],
)
def test_gpus_of_a_slurm_task(environment, gpus, expected):
    assert runtime.slurm_gpus(environment, [str(i) for i in range(gpus)]) == expected


def test_gpus_that_slurm_tasks_cannot_share_are_refused():
    environment = SHARED | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_LOCALID": "0"}
    with pytest.raises(ConfigError, match="3 Slurm tasks .* 4 GPUs .*--ntasks-per-node=1"):
        runtime.slurm_gpus(environment, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("tasks", "gpus", "variables", "remedy"),
    [
        ("1(x2)", 1, {"SLURM_GPUS_ON_NODE": "8"}, "8 GPUs .* 1 task .* 1 of them"),
        # The step was given one GPU, the job eight.
        ("1(x2)", 1, {"SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}, "8 GPUs"),
        ("1(x2)", 1, {"SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_NODE": "h100:8"}, "8 GPUs"),
        ("2(x2)", 2, {"SLURM_GPUS_ON_NODE": "8"}, "2 tasks .* 4 of them .2 GPUs seen by each"),
    ],
)
def test_slurm_tasks_that_leave_gpus_idle_are_refused(tasks, gpus, variables, remedy):
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": tasks, "CUDA_VISIBLE_DEVICES": "0,1"[: 2 * gpus - 1]}
    with pytest.raises(ConfigError, match=remedy + ".*srun --ntasks-per-node=1"):
        runtime.join_processes(step | variables)


@pytest.fixture
def joined(monkeypatch):
    """The arguments that jax.distributed.initialize gets."""
    found = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: found.update(settings))
    return found


def test_a_slurm_step_with_one_task_a_node_joins_with_all_gpus(joined):
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    step |= SHARED | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    runtime.join_processes(step)
    assert joined["local_device_ids"] == [0, 1, 2, 3]
    assert joined["coordinator_bind_address"] is None  # as jax detects it


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1:99", "127.0.0.1:99"),
        ("localhost:99", "localhost:99"),
        ("[::1]:99", "[::1]:99"),
        ("node7:99", None),
    ],
)
def test_a_loopback_service_listens_on_loopback_only(joined, address, bound):
    values = {runtime.COORDINATOR: address, runtime.NUM_PROCESSES: "2", runtime.PROCESS_ID: "0"}
    runtime.join_processes(values | {"SLURM_LOCALID": "0"})
    assert joined["coordinator_bind_address"] == bound
    assert joined["local_device_ids"] is None
    assert joined["cluster_detection_method"] == "deactivate"  # else Slurm would choose a GPU


def test_one_process_joins_nothing():
    runtime.join_processes({})
    runtime.join_processes({"SLURM_NTASKS": "4"})  # a shell of an allocation, not a step of it
    one = {runtime.COORDINATOR: "x:1", runtime.NUM_PROCESSES: "1", runtime.PROCESS_ID: "0"}
    runtime.join_processes(one)
    assert jax.process_count() == 1


def test_devices_are_opened_while_something_else_is_done(monkeypatch):
    meanwhile, opened = threading.Event(), []

    def devices():
        assert meanwhile.wait(20)
        return ["device", "not used"]

    monkeypatch.setattr(jax, "local_devices", devices)
    monkeypatch.setattr(jax, "device_put", lambda _, device: opened.append(device))
    with runtime._devices_are_opened(1):
        meanwhile.set()
    assert opened == ["device"]


def test_whoever_asks_for_devices_that_cannot_be_opened_gets_the_error(monkeypatch):
    def devices():
        raise RuntimeError("no GPU")

    monkeypatch.setattr(jax, "devices", devices)
    with runtime._devices_are_opened(1):
        pass
    with pytest.raises(RuntimeError, match="no GPU"):
        jax.devices()


def test_where_programs_are_kept(tmp_path):
    """The config's folder, else the one that jax's variable names, else the run's own."""
    program = (
        "import jax, os\n"
        "from jaxrl_llm.config import Config\n"
        "from jaxrl_llm.launch import runtime\n"
        "def show(**settings):\n"
        "    runtime.start(Config(run_dir='run', **settings))\n"
        "    print(jax.config.jax_compilation_cache_dir)\n"
        "show()\n"
        "show(compile_cache='given')\n"
        "del os.environ['JAX_COMPILATION_CACHE_DIR']\n"
        "show()\n"
    )
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": "/shared"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    expected = ["/shared", str(tmp_path / "given"), str(tmp_path / "run" / "compile_cache")]
    assert done.stdout.splitlines() == expected, done.stderr


def test_compile_cache_is_used_by_the_next_process(tmp_path):
    program = (
        "import jax, sys\n"
        "from jaxrl_llm.launch import runtime\n"
        "runtime.enable_compile_cache(sys.argv[1])\n"
        "runtime.cache_short_programs()\n"
        "assert jax.config.jax_persistent_cache_min_compile_time_secs <= 0.1\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "events = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: events.append(event))\n"
        "jax.jit(lambda x: x @ x)(jax.numpy.ones((4, 4)))\n"
        "print('/jax/compilation_cache/cache_hits' in events)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(2)]
    assert [run.stdout for run in runs] == ["False\n", "True\n"], runs[1].stderr
