"""Rules that span keys of a config, checked without jax in milliseconds.

A rule yields faults. All rules in their order, and the rules of no other file: check.py.
Two settings that exclude or need each other: a row of conflicts.py.
What the mesh, the batches and the models must divide: sizes.py.
Files, folders, functions and packages that must be there: paths.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

# "<KEY>: why its value cannot work", in which <KEY> stands for config.KEY=VALUE.
Faults = Iterator[str]
NO_KEY = "\0"  # a "<" of a user's text


def fault_of(test: Callable[[Any], object], value: Any) -> str:
    """The message of a test that raises ValueError; empty where it does not."""
    try:
        test(value)
    except ValueError as error:
        return str(error).replace("<", NO_KEY)
    return ""
