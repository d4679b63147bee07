"""The configuration of a run: its keys, in typed records, and rules that span them.

A key, with its default and comment: schema.py, algorithms.py, graders.py, tasks.py, alarms.py.
A bound of a key: its type, on the field. One that another key of the record is: `UpTo("key")`.
Rules that span keys, on conflicts, sizes and files: rules/. Roles on devices: placement.py.
Where a config comes from: loading.py.
Records, their shared types, their messages and overrides: jaxrl_llm/typed_records/.
"""
# ruff: noqa: F403

from jaxrl_llm.config.agents import *
from jaxrl_llm.config.alarms import *
from jaxrl_llm.config.algorithms import *
from jaxrl_llm.config.graders import *
from jaxrl_llm.config.loading import *
from jaxrl_llm.config.rules.check import *
from jaxrl_llm.config.schema import *
from jaxrl_llm.config.tasks import *
from jaxrl_llm.typed_records.messages import *
from jaxrl_llm.typed_records.overrides import *
from jaxrl_llm.typed_records.python_objects import *
from jaxrl_llm.typed_records.record import *
from jaxrl_llm.typed_records.tree import *
