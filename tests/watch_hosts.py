"""Runs a script and writes what this process took from devices, from other hosts and from data.

    python tests/watch_hosts.py FOLDER script.py ARGUMENTS

FOLDER/hosts-<process>.json then has counts of `Watched`.
"""

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass
class Watched:
    # Bytes of arrays that came from devices. Scalars, and flags of parameters, are not of samples.
    fetched: int = 0
    largest_message: int = 0  # bytes of the largest value that it gave other hosts
    checked: int = 0  # records that it read, tokenised and kept before the first step
    read_again: int = 0  # rows of other hosts' stripes that its batches needed


def after(module: Any, name: str, note: Callable[..., None]) -> None:
    """Call `note(result, *arguments)` after each call of a function."""
    function = getattr(module, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        note(result, *arguments)
        return result

    setattr(module, name, watched)


def main(folder: Path, script: str) -> None:
    import jax

    from jaxrl_llm.data import dataset
    from jaxrl_llm.distributed import multihost

    found = Watched()

    def fetched(result: Any, *_: Any) -> None:
        # A digest of an array is four uint32.
        others = (bool, np.uint32)
        of_samples = [x for x in jax.tree.leaves(result) if np.ndim(x) and x.dtype not in others]
        found.fetched += sum(x.nbytes for x in of_samples)

    def checked(stripe: Any, *_: Any) -> None:
        found.checked += len(stripe.items)

    def read_again(*_: Any) -> None:
        found.read_again += 1

    dumps = json.dumps

    def message(value: Any) -> str:
        found.largest_message = max(found.largest_message, len(dumps(value)))
        return dumps(value)

    after(multihost, "_to_host", fetched)
    # Not in the module of jax, which the checkpoints use too.
    multihost.multihost_utils = SimpleNamespace(**vars(multihost.multihost_utils))
    after(multihost.multihost_utils, "process_allgather", fetched)
    after(dataset, "_check_stripe", checked)
    after(dataset._Reader, "records_at", read_again)
    multihost.json = SimpleNamespace(dumps=message, loads=json.loads)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        number = jax.process_index()
        (folder / f"hosts-{number}.json").write_text(dumps(asdict(found)))


if __name__ == "__main__":
    folder, script, *rest = sys.argv[1:]
    sys.argv = [script, *rest]
    main(Path(folder), script)
