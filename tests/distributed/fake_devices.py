"""Run a test in a fresh process that sees eight CPU devices.

The number of devices is fixed when jax starts, so it cannot change inside the session of pytest.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NUM_DEVICES = 8
TIMEOUT_S = 400


def on_eight_devices(body: Callable[[], None]) -> Callable[[], None]:
    """Decorates a test function without arguments; its failure shows the process's output."""

    @functools.wraps(body)
    def test() -> None:
        folder = Path(sys.modules[body.__module__].__file__ or "").parent
        code = (
            f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]; "
            f"import {body.__module__} as module; module.{body.__name__}.__wrapped__()"
        )
        env = dict(os.environ, JAX_PLATFORMS="cpu")
        flags = env.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    return test
