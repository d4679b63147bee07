"""The configuration of a run: typed records, the command line, and rules that span fields.

A key, with its default and comment: schema.py, algorithms.py, graders.py, tasks.py, alarms.py.
A bound of a key: its type, on the field; types that several fields have are in bounds.py.
A bound that another key of the record is: `UpTo("key")`, on the field.
Two settings that exclude or need each other: a row of conflicts.py.
What sizes must divide: size_rules.py. Roles on devices: placement.py.
A file, folder, function or package that must be there: paths.py.
Any other rule of several keys: rules.py, which also lists all rules in their order.
The words for a wrong type, bound or key: messages.py.
Where a config comes from: loading.py. `--config.KEY=VALUE`: overrides.py.
"""
# ruff: noqa: F403

from typing import Any

from jaxrl_llm.config.alarms import *
from jaxrl_llm.config.algorithms import *
from jaxrl_llm.config.graders import *
from jaxrl_llm.config.loading import *
from jaxrl_llm.config.messages import *
from jaxrl_llm.config.overrides import *
from jaxrl_llm.config.python_objects import *
from jaxrl_llm.config.records import *
from jaxrl_llm.config.rules import *
from jaxrl_llm.config.schema import *
from jaxrl_llm.config.tasks import *
from jaxrl_llm.config.tree import *

_REPLACED = {
    "FunctionConfig": "a record such as GRPO(clip_low=0.1) or ExactAnswer(), or "
    "Custom(path='my_file.py:my_function', settings={…})",
    "TaskConfig": "a record such as ChainSum(num_terms=3, size=64)",
}


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise ImportError(f"{name} is gone: write {_REPLACED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
