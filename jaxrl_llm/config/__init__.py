"""The configuration of a run: typed records, the command line, and rules that span fields."""
# ruff: noqa: F403

from typing import Any

from jaxrl_llm.config.alarms import *
from jaxrl_llm.config.algorithms import *
from jaxrl_llm.config.command_line import *
from jaxrl_llm.config.functions import *
from jaxrl_llm.config.given import *
from jaxrl_llm.config.loading import *
from jaxrl_llm.config.messages import *
from jaxrl_llm.config.overrides import *
from jaxrl_llm.config.records import *
from jaxrl_llm.config.rules import *
from jaxrl_llm.config.schema import *
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
