"""One command from its options to rows, JSON lines and the exit code."""

import datetime
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from benchmarks import records
from benchmarks.harness import run_cases
from benchmarks.options import Options
from benchmarks.records import Row

FAILED = 1
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def run_command(options: Options, peers: Sequence[Row]) -> int:
    """Measure and report; 1 when a case failed, else 0.

    `peers` are the rows of peers that ran before this process touched a device.
    """
    about = describe(options)
    # A log file has no width, so take one that fits every column.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    lines = open(options.json, "a") if options.json is not None else None

    def report(row: Row) -> None:
        line = row.to_json(about)
        print(line, flush=True)
        if lines is not None:
            print(line, file=lines, flush=True)

    try:
        for row in peers:
            report(row)
        rows = [*peers]
        rows += run_cases(
            _cases(options),
            repeats=options.repeats,
            compiler_options=dict(options.compiler_options),
            report=report,
            profile=options.profile,
        )
    finally:
        if lines is not None:
            lines.close()
    records.show(rows, console)
    failed = [row for row in rows if (row.error and row.who == "ours") or row.profile_error]
    return FAILED if failed else 0


def describe(options: Options) -> dict[str, Any]:
    """Facts that every row of the command shares: the command, versions, device and date."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "command": " ".join(["python scripts/benchmark.py", *options.words]),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "backend": jax.default_backend(),
        "versions": versions | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _cases(options: Options) -> Any:
    # Imported here: each benchmark pulls in its own part of the product.
    module = importlib.import_module(f"benchmarks.{options.command}")
    return getattr(module, f"{options.command}_cases")(options)
