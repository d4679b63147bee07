"""Prepares a process for a run: devices, other processes, the compile cache.

Functions import jax only where they need it, so a mistake in the arguments is reported at once.
"""

import faulthandler
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.config import AUTO, Config, ConfigError, MeshConfig, check, run_folder
from jaxrl_llm.config.placement import ROLLOUT, devices_of_roles
from jaxrl_llm.distributed.placement import numbers_of_roles
from jaxrl_llm.launch.exits import NoMesh
from jaxrl_llm.launch.freed_memory import keep_freed_memory
from jaxrl_llm.launch.host_memory import host_memory
from jaxrl_llm.launch.interrupts import imports

# Set by launch/local.py and launch/ray.py, or by hand where neither these nor Slurm start it.
COORDINATOR = "JAXRL_COORDINATOR"  # host:port where process 0 listens
NUM_PROCESSES = "JAXRL_NUM_PROCESSES"
PROCESS_ID = "JAXRL_PROCESS_ID"
# Set by a launcher that goes on without a lost process: then the planner chooses the mesh.
FEWER = "JAXRL_FEWER_PROCESSES"

# Fraction of a GPU's memory that jax takes. Its default is 0.75. NCCL and cuDNN need the rest.
GPU_MEMORY_FRACTION = "0.92"

# XLA's limit for arrays in host memory, in GB. Checkpoints pass through it, and the offloaded
# optimizer state lies in it: 61 GB for 7B parameters. XLA's default is 64.
HOST_MEMORY_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
XLA_HOST_MEMORY_GB = 64
HOST_MEMORY_FRACTION = 0.75

# Has every CPU device run its collectives in the same order. With XLA's default each device begins
# with any of those that are ready, and devices of one process can wait for each other for ever.
IN_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"

LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"

# jax's variable for a folder of compiled programs that several runs share.
COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"

# Without it, a GPU adds gradients of the embedding and of attention in the order in which threads
# finish, and a resumed run would differ from one that was never stopped.
EXACT = "xla_gpu_exclude_nondeterministic_ops"

# (variable with the number of processes, variable that only a step of them has), for clusters that
# jax detects.
_CLUSTERS = (("SLURM_NTASKS", "SLURM_STEP_ID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))


def start(
    config: Config, *, num_cpu_devices: int = 0, meanwhile: Callable[[], None] = lambda: None
) -> Config:
    """Prepare the process for `config`; returns the config with the mesh that is used.

    `meanwhile` is called while a thread opens the devices: a GPU takes a second or two.

    It joins the other processes if a launcher started several. It splits the CPU into
    `num_cpu_devices` (the flag --devices) unless that is 0. It checks that the mesh fits the
    devices, and enables the compile cache. Several processes with a mesh of one device put every
    device on the `data` axis.

    Requires: nothing has touched jax's devices yet.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in C++ then shows the Python stacks
    prepare(num_cpu_devices=num_cpu_devices, exact=config.exact != "off")
    set_log_level(config.log.level)
    join_processes()
    _take_unequal_processes(config)
    # With a placement it is not known yet which of them are used.
    with _devices_are_opened(0 if config.placement else config.mesh.num_devices):
        meanwhile()
    if config.placement == AUTO or os.environ.get(FEWER):
        config = _planned(config)
    placed = _placed(config)
    mesh = fit_mesh(config.mesh, placed)
    if mesh != config.mesh:
        config = replace(config, mesh=mesh)
        check(config)  # more replicas may not divide the batch
    from jaxrl_llm.estimate.fitting import with_memory

    config = with_memory(config)
    if config.compile_cache:
        enable_compile_cache(config.compile_cache)
    elif not os.environ.get(COMPILE_CACHE):
        enable_compile_cache(str(run_folder(config) / "compile_cache"))
    cache_short_programs()
    return config


def _planned(config: Config) -> Config:
    """`config` with the layout of the planner, which it prints.

    Raises: ConfigError without one, NoMesh where processes were lost.
    """
    from jaxrl_llm.estimate.automatic import automatic

    try:
        config, why = automatic(replace(config, placement=AUTO, node_groups={}))
    except ConfigError as error:
        if os.environ.get(FEWER):
            raise NoMesh(str(error)) from None
        raise
    print("\n".join(why), file=sys.stderr, flush=True)
    return config


@contextmanager
def _devices_are_opened(used: int) -> Iterator[None]:
    """A thread opens the devices; at the end they are open, or whoever asks for them next fails.

    It claims the memory of the first `used`.

    Several processes open them together, when the first of them are asked for.
    """
    import jax

    def open_devices() -> None:
        with suppress(Exception):  # the next call raises it again
            for device in jax.local_devices()[:used]:
                jax.device_put(0.0, device)  # it claims the device's memory, which takes a second

    opening = threading.Thread(target=open_devices, daemon=True)
    if not jax.distributed.is_initialized():
        opening.start()
    yield
    if opening.ident is not None:
        opening.join()


def _placed(config: Config) -> list[int]:
    """The numbers of all devices of a `placement`; empty without one.

    Raises: ConfigError where the devices and processes of this launch are not those it names.
    """
    import jax

    from jaxrl_llm.distributed.mesh import devices_of_nodes

    if not config.placement:
        return []
    roles = devices_of_roles(config)
    rollout = roles.get(ROLLOUT)
    shared = [role for role, group in roles.items() if role != ROLLOUT and group == rollout]
    if config.max_staleness and shared and jax.process_count() > 1:
        raise ConfigError(
            f"config.max_staleness={config.max_staleness}: with several processes no other role "
            f"may have the devices of the rollout, which generates meanwhile, and {shared[0]} has; "
            f"give it others, for example --config.placement.{shared[0]}=actor"
        )
    plain = [d for group in roles.values() for d in group if isinstance(d, int)]
    if max(plain, default=0) >= jax.device_count():
        return plain  # `fit_mesh` knows the remedy
    numbers = numbers_of_roles(config, devices_of_nodes())
    return [number for group in numbers.values() for number in group]


def cache_short_programs() -> None:
    """Keep short programs in the compile cache, unless the environment says how short.

    A start has a hundred that draw or measure an array, and a GPU's take 30 to 600 ms each.
    """
    import jax

    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        least = 0.0 if jax.default_backend() == "gpu" else 0.1
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def devices_are_used() -> bool:
    """True if this process has touched jax's devices, so that settings of them come too late."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def prepare(*, num_cpu_devices: int = 0, exact: bool = False) -> None:
    """Set what jax and XLA read when the first device is touched.

    In a program that has used jax before, these settings stay as they are.

    Raises: ConfigError when that program has another number of devices.
    """
    if devices_are_used():
        _check_used_devices(num_cpu_devices, exact)
    else:
        _set_up_devices(num_cpu_devices, exact)


def _take_unequal_processes(config: Config) -> None:
    """Let processes have unequal numbers of devices, where the roles of a run are placed on them.

    Raises: ConfigError without a placement: rows and layouts are shared out equally then.
    """
    import jax

    sizes = [len(jax.local_devices(process)) for process in range(jax.process_count())]
    if len(set(sizes)) == 1:
        return
    if not config.placement:
        raise ConfigError(
            f"the processes have {', '.join(map(str, sizes))} devices; start all with the same "
            "number, or give roles their devices: config.node_groups, config.placement"
        )
    import orbax.checkpoint  # noqa: F401  # defines the flag
    from absl import flags

    # Orbax then meets at jax's coordinator. Its other way needs the same number in each process.
    flags.FLAGS["experimental_orbax_use_distributed_barrier"].value = True
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def set_log_level(level: str) -> None:
    """Show log lines of this package from `level` on; with `debug` also what jax compiles."""
    import jax

    logging.getLogger("jaxrl_llm").setLevel(level.upper())
    if level in ("debug", "info"):  # Python's last resort shows warnings and errors
        logging.basicConfig(format=LOG_FORMAT)
    if level == "debug":
        jax.config.update("jax_log_compiles", True)


def _set_up_devices(num_cpu_devices: int, exact: bool) -> None:
    if num_cpu_devices or not visible_gpus():
        keep_freed_memory()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
    limit = max(XLA_HOST_MEMORY_GB, int(HOST_MEMORY_FRACTION * host_memory() / 2**30))
    os.environ.setdefault(HOST_MEMORY_LIMIT, str(limit))
    # Hides XLA's C++ notes (autotuning, slow compile alarms).
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    flags = os.environ.get("XLA_FLAGS", "")
    if exact and EXACT not in flags:
        flags = f"{flags} --{EXACT}=true"
    if num_cpu_devices > 1 and "xla_cpu_scheduler_type" not in flags:
        flags = f"{flags} {IN_ORDER}"
    if flags.strip():
        os.environ["XLA_FLAGS"] = flags.strip()
    with imports():
        import jax

    if num_cpu_devices:
        if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
            raise ConfigError(
                "--devices and XLA_FLAGS=--xla_force_host_platform_device_count both set the "
                "number of CPU devices; drop one"
            )
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _check_used_devices(num_cpu_devices: int, exact: bool) -> None:
    import jax

    if num_cpu_devices and jax.device_count() != num_cpu_devices:
        raise ConfigError(
            f"{num_cpu_devices} CPU devices were asked for, but this program has used jax with "
            f"{jax.device_count()} devices already; begin with this call, in a new process"
        )
    if exact and jax.default_backend() == "gpu" and EXACT not in os.environ.get("XLA_FLAGS", ""):
        print(
            "config.exact=repeatable (or strict) comes too late: this program has used the GPU "
            "already, so a resumed run may differ in its last bits. Set "
            f"XLA_FLAGS=--{EXACT}=true before it starts, or config.exact=off",
            file=sys.stderr,
            flush=True,
        )


def join_processes(environment: dict[str, str] | None = None) -> None:
    """Join jax.distributed if the environment says that this process is one of several.

    Raises: KeyError when only some of our three variables are set, ConfigError for a number out of
        range, for which the others would wait.
    """
    from jaxrl_llm.distributed import multihost

    env = dict(os.environ) if environment is None else environment
    if any(env.get(name) for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)):
        count, number = int(env[NUM_PROCESSES]), int(env[PROCESS_ID])
        if not 0 <= number < count:
            raise ConfigError(f"{PROCESS_ID}={number}: must be from 0 to {count - 1}")
        if count > 1:
            multihost.initialize(env[COORDINATOR], count, number)
        return
    for size, step in _CLUSTERS:
        # An interactive Slurm shell has NTASKS but is not a step of several processes.
        if int(env.get(size) or 1) > 1 and env.get(step):
            multihost.initialize(local_device_ids=slurm_gpus(env, visible_gpus(env)))
            return


def slurm_gpus(environment: Mapping[str, str], gpus: Sequence[str]) -> list[int] | None:
    """The GPUs of this Slurm task, as indices into `gpus`; None leaves the choice to jax.

    jax gives each task one GPU, by the task's number on its node. A task that has several GPUs,
    such as the only task of a node, would lose the others. `gpus` are those that the task can see.

    Raises: ConfigError when the tasks of a node cannot share its GPUs equally, or when they leave
        some of the job's GPUs idle.
    """
    tasks = _tasks_on_this_node(environment)
    if not gpus or tasks is None:
        return None
    # With --gpus-per-task each task sees only its own GPUs.
    on_node = _gpus_of_job(environment) or len(gpus)
    if len(gpus) * tasks < on_node:
        raise ConfigError(
            f"Slurm gave the job {on_node} GPUs on this node, and its {_count(tasks, 'task')} "
            f"here can use {len(gpus) * tasks} of them ({_count(len(gpus), 'GPU')} seen by each): "
            f"start one task a node that sees all, srun --ntasks-per-node=1 "
            f"--gpus-per-task={on_node}, or one task a GPU, srun --ntasks-per-node={on_node} "
            f"--gpus-per-task=1; to use fewer, ask for fewer with --gpus-per-node"
        )
    if tasks == 1 or len(gpus) < on_node:
        return list(range(len(gpus)))
    if len(gpus) % tasks:
        raise ConfigError(
            f"{tasks} Slurm tasks on this node cannot share its {len(gpus)} GPUs equally; use "
            f"--ntasks-per-node=1 (one process with all GPUs) or {len(gpus)} (one GPU each)"
        )
    each, number = len(gpus) // tasks, int(environment["SLURM_LOCALID"])
    return list(range(number * each, (number + 1) * each))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gpus_of_job(environment: Mapping[str, str]) -> int:
    """The GPUs that Slurm gave the job on this node, as far as its variables say; 0 if unknown.

    A step may have fewer. SLURM_GPUS_PER_NODE may have a type: "h100:8".
    """
    texts = [environment.get("SLURM_GPUS_ON_NODE") or ""]
    texts.append(environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2])
    texts.append(str(len([gpu for gpu in environment.get("SLURM_JOB_GPUS", "").split(",") if gpu])))
    return max(int(text) for text in (*texts, "0") if text.isdecimal())


def _tasks_on_this_node(environment: Mapping[str, str]) -> int | None:
    """Number of tasks of the Slurm step on this node; None outside of Slurm.

    Slurm writes the tasks of all nodes as "2(x3),1": 2 on each of three nodes, then 1.
    """
    if "SLURM_LOCALID" not in environment:
        return None
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else None


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """The ids of the NVIDIA GPUs that a program with this environment can see."""
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu and gpu != "-1"]
    numbers = [re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*")]
    return sorted((match[1] for match in numbers if match), key=int)


def fit_mesh(mesh: MeshConfig, placed: Sequence[int] = ()) -> MeshConfig:
    """`mesh`, or all devices on `data` when several processes share a mesh of one device.

    `placed` are the numbers of all devices of a `placement`. Prints one line when devices are idle.

    Raises: ConfigError when it does not fit, with the flag that gives a CPU more devices.
    """
    import jax

    from jaxrl_llm.distributed.mesh import check_mesh, larger_mesh

    count, processes = jax.device_count(), jax.process_count()
    if processes > 1 and mesh.num_devices == 1 and not placed:
        return replace(mesh, data=count)
    wanted = max([mesh.num_devices, *(number + 1 for number in placed)])
    try:
        check_mesh(mesh.sizes, count, 1 if placed else processes)
        if wanted > count:
            raise ValueError(
                f"config.placement names device {wanted - 1}, but {count} devices are available, "
                f"numbered from 0 to {count - 1}."
            )
    except ValueError as error:
        if jax.default_backend() == "cpu" and wanted > count and processes == 1:
            raise ConfigError(
                f"{error}\nTo try it on a CPU, split the CPU: --devices={wanted} (the same as "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted})."
            ) from None
        raise ConfigError(str(error)) from None
    used = len(set(placed)) or mesh.num_devices
    if used < count:
        remedy = "" if placed else f"; {larger_mesh(mesh.sizes, count)} uses all"
        print(
            f"the mesh uses {used} of {count} devices, {count - used} are idle{remedy}",
            file=sys.stderr,
            flush=True,
        )
    return mesh


def enable_compile_cache(folder: str) -> None:
    """Keep compiled programs in `folder`, so that a resumed run does not compile again."""
    import jax

    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).resolve()))
