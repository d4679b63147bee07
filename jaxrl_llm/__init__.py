"""Reinforcement learning of language models on GPU meshes, in JAX.

The library: `import jaxrl_llm as rl`. Each name is imported at its first use, and jax by the first
function that needs it. docs/library.md has a complete program.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.config import *  # noqa: F403
    from jaxrl_llm.evaluation.answering import Answer as Answer
    from jaxrl_llm.evaluation.answering import OpenModel as OpenModel
    from jaxrl_llm.evaluation.async_model import AsyncModel as AsyncModel
    from jaxrl_llm.launch.library import evaluate as evaluate
    from jaxrl_llm.launch.library import export as export
    from jaxrl_llm.launch.library import open_model as open_model
    from jaxrl_llm.launch.library import train as train
    from jaxrl_llm.supervision.callbacks import Callback as Callback
    from jaxrl_llm.supervision.callbacks import Sample as Sample
    from jaxrl_llm.supervision.callbacks import StepReport as StepReport
    from jaxrl_llm.trainer.output import Summary as Summary
    from jaxrl_llm.types import Completion as Completion

__version__ = "0.1.0"

_HOMES = {
    "train": "launch.library",
    "evaluate": "launch.library",
    "export": "launch.library",
    "open_model": "launch.library",
    "from_json": "config",
    "load_config": "config",
    "packaged_configs": "config",
    "to_json": "config",
    "Answer": "evaluation.answering",
    "AsyncModel": "evaluation.async_model",
    "Callback": "supervision.callbacks",
    "Completion": "types",
    "OpenModel": "evaluation.answering",
    "Sample": "supervision.callbacks",
    "StepReport": "supervision.callbacks",
    "Summary": "trainer.output",
}


def __getattr__(name: str) -> Any:
    # The records of a config are not listed, as there are many. Modules have small letters, and
    # importing one of them must not import the config.
    if name in _HOMES or name[:1].isupper():
        home = import_module(f"{__name__}.{_HOMES.get(name, 'config')}")
        if hasattr(home, name):
            globals()[name] = found = getattr(home, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    records = [name for name in vars(import_module(f"{__name__}.config")) if name[:1].isupper()]
    return sorted({"__version__", *_HOMES, *records})
