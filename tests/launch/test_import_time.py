"""What `import jaxrl_llm.trainer.loop` costs: each start and each test process pays it."""

import os
import subprocess
import sys

# CPU-seconds of this process, then the libraries that were imported.
PROGRAM = """
import resource, sys
import {modules}
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *sorted(sys.modules))
"""
# Not needed to start: imported where they are used, or never (torch, ray).
LAZY = {"torch", "ray", "tensorboardX", "transformers", "pandas", "matplotlib"} | {
    "jax.experimental.pallas.mosaic_gpu"
}
# The trainer's import in multiples of jax and flax, which it cannot do without. On an idle machine
# those take 0.79 CPU-seconds, and the trainer's import 1.55; under load both grow.
MOST = 2.1


def imported(modules: str) -> tuple[float, set[str]]:
    """CPU-seconds, and what was imported."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM.format(modules=modules)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    seconds, *names = result.stdout.split()
    return float(seconds), set(names)


def test_starting_the_trainer_is_quick():
    """The faster one of two starts each; the second only where the first do not show it."""
    least, seconds = float("inf"), float("inf")
    for _ in range(2):
        least = min(least, imported("jax, flax.nnx")[0])
        now, modules = imported("jaxrl_llm.trainer.loop")
        assert modules & LAZY == set()
        seconds = min(seconds, now)
        if seconds < MOST * least:
            return
    raise AssertionError(f"{seconds:.2f} CPU-s; jax and flax alone take {least:.2f}")


def test_the_config_and_the_launchers_need_no_jax():
    launchers = "jaxrl_llm.launch.local, jaxrl_llm.launch.ray, jaxrl_llm.launch.runtime"
    flags = "jaxrl_llm.launch.command_line, jaxrl_llm.launch.config_keys"
    settings = "jaxrl_llm.config, jaxrl_llm.evaluation.answer_settings"
    _, modules = imported(f"{launchers}, {flags}, {settings}")
    assert modules & {"jax", "numpy", "rich", *LAZY} == set()
