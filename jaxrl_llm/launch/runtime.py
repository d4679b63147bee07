"""What a script does around its work: arguments, errors, devices, processes, the compile cache.

jax is imported inside the functions that need it, so that a mistake in the arguments is answered
at once.
"""

import linecache
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.validation import validate

USER_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT

# Set by launch/local.py, or by hand on a cluster without Slurm or Open MPI.
COORDINATOR = "JAXRL_COORDINATOR"  # host:port where process 0 listens
NUM_PROCESSES = "JAXRL_NUM_PROCESSES"
PROCESS_ID = "JAXRL_PROCESS_ID"

# Of a GPU's memory; jax's own default leaves a quarter unused. NCCL and cuDNN need the rest.
GPU_MEMORY_FRACTION = "0.92"

# Most of the host's memory that XLA takes for arrays there, in GB: checkpoints pass through it, and
# moments that are kept there fill it. XLA's own limit is 64; 7B parameters have 61 GB of moments.
HOST_MEMORY_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
XLA_HOST_MEMORY_GB = 64
HOST_MEMORY_FRACTION = 0.75
# Where Linux says what a container is given: version 2 of its control groups, and version 1.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

# jax's own variable: a folder of compiled programs that several runs share.
COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"

# On a GPU, gradients of the embedding and of attention otherwise add up in the order in which
# threads happen to arrive, and a resumed run would drift away from one that was never stopped.
EXACT = "xla_gpu_exclude_nondeterministic_ops"

# (variable that holds the number of processes, what sets it) for jax's own detection.
_CLUSTERS = (("SLURM_NTASKS", "SLURM_STEP_ID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))


# ------------------------------------------------------------------------- scripts


def run_script(
    main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run `main(arguments)` and exit with its code (None is 0).

    A user's mistake (ConfigError, or a ValueError that this package raised on purpose) becomes one
    message on stderr and exit code 2; Ctrl-C exits with 130; any other error keeps its traceback.
    `--help` prints the docstring of the script.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print((sys.modules["__main__"].__doc__ or "").strip())
        sys.exit(0)
    try:
        code = main(arguments) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ValueError as error:
        if not is_for_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    sys.exit(code)


def is_for_user(error: ValueError) -> bool:
    """Whether the message alone tells the user what to do, so that a traceback would only hide it.

    True for a ConfigError, and for a ValueError from a `raise` statement of this package: those
    name the remedy. One that numpy or jax raised below us keeps its traceback.
    """
    if isinstance(error, ConfigError):
        return True
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    file = Path(last.tb_frame.f_code.co_filename).resolve()
    source = linecache.getline(str(file), last.tb_lineno).strip()
    ours = Path(__file__).resolve().parents[2]
    folders = [ours / name for name in ("jaxrl_llm", "models", "scripts", "configs")]
    return source.startswith("raise ") and any(file.is_relative_to(folder) for folder in folders)


# ------------------------------------------------------------------------- start-up


def start(config: Config, *, num_cpu_devices: int = 0) -> Config:
    """Make the process ready for `config`; call it before anything else touches jax's devices.

    Joins the other processes when a launcher started several, splits the CPU into
    `num_cpu_devices` (the flag --devices) when that is not 0, switches the compile cache on, and
    checks that the mesh fits the devices. Returns the config with the mesh that is used: several
    processes and a mesh of one device put every device on the `data` axis.
    """
    prepare(num_cpu_devices=num_cpu_devices, exact=config.exact)
    join_processes()
    mesh = fit_mesh(config.mesh)
    if mesh != config.mesh:
        config = replace(config, mesh=mesh)
        validate(config)  # more replicas may not divide the batch
    if config.compile_cache:
        enable_compile_cache(config.compile_cache)
    elif not os.environ.get(COMPILE_CACHE):
        run_dir = config.run_dir or str(Path("runs") / config.name)
        enable_compile_cache(str(Path(run_dir) / "compile_cache"))
    return config


def prepare(*, num_cpu_devices: int = 0, exact: bool = False) -> None:
    """Environment and jax settings that must be there before the first device is touched."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)
    limit = max(XLA_HOST_MEMORY_GB, int(HOST_MEMORY_FRACTION * host_memory() / 2**30))
    os.environ.setdefault(HOST_MEMORY_LIMIT, str(limit))
    # XLA's C++ notes (autotuning, slow compile alarms) would drown the console.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    flags = os.environ.get("XLA_FLAGS", "")
    if exact and EXACT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{EXACT}=true".strip()
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


def host_memory(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """Bytes of memory that this process may have: the machine's, or what its container is given."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    given = [path.read_text().strip() for path in limits if path.exists()]
    return min(found + [int(value) for value in given if value.isdigit()])


def join_processes(environment: dict[str, str] | None = None) -> None:
    """Join jax.distributed when the environment says that this process is one of several."""
    from jaxrl_llm.distributed import multihost

    env = dict(os.environ) if environment is None else environment
    given = [name for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if env.get(name)]
    if given:
        missing = {COORDINATOR, NUM_PROCESSES, PROCESS_ID} - set(given)
        if missing:
            raise ConfigError(
                f"{', '.join(given)} is set, but {', '.join(sorted(missing))} is not; set all "
                f"three: host:port of process 0, the number of processes, and this one's number"
            )
        count, number = int(env[NUM_PROCESSES]), int(env[PROCESS_ID])
        if not 0 <= number < count:
            raise ConfigError(f"{PROCESS_ID}={number}: must be from 0 to {count - 1}")
        if count > 1:
            multihost.initialize(env[COORDINATOR], count, number)
        return
    for size, step in _CLUSTERS:
        # An interactive Slurm shell has NTASKS but is no step of several processes.
        if int(env.get(size) or 1) > 1 and env.get(step):
            multihost.initialize()
            return


def fit_mesh(mesh: MeshConfig) -> MeshConfig:
    """`mesh`, or all devices on `data` when several processes share a mesh of one device.

    ConfigError when it does not fit, with the flag that gives a CPU more devices.
    """
    import jax

    from jaxrl_llm.distributed.mesh import check_mesh

    count, processes = jax.device_count(), jax.process_count()
    if processes > 1 and mesh.num_devices == 1:
        return replace(mesh, data=count)
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    try:
        check_mesh(sizes, count, processes)
    except ValueError as error:
        if jax.default_backend() == "cpu" and mesh.num_devices > count and processes == 1:
            raise ConfigError(
                f"{error}\nTo try a mesh on a CPU, split it: --devices={mesh.num_devices} (the "
                f"same as XLA_FLAGS=--xla_force_host_platform_device_count={mesh.num_devices})."
            ) from None
        raise ConfigError(str(error)) from None
    return mesh


def enable_compile_cache(folder: str) -> None:
    """Keep compiled programs in `folder`, so that a resumed run does not compile again."""
    import jax

    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
