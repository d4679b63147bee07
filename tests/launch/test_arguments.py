"""A wrong argument of the library is refused before jax is prepared, with what it must be."""

from functools import partial
from typing import Any

import pytest

import jaxrl_llm as rl
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch import library

ENTRIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "train": (rl.train, {"config": "grpo"}),
    "open_model": (rl.open_model, {"model": "."}),
    "evaluate": (rl.evaluate, {"model": ".", "config": "grpo"}),
    "export": (rl.export, {"model": ".", "output": "out"}),
    "load_config": (rl.load_config, {"config": "grpo"}),
}


async def waits(report):
    """A callback whose call runs nothing."""


def yields(report):
    yield report


class Waits:
    async def __call__(self, report):
        pass


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a device is touched")

    monkeypatch.setattr(library, "start", refuse)
    monkeypatch.setattr(library, "prepare", refuse)


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        ("train", {"config": 3}, "config=3: expected a Config, a file with get_config"),
        ("train", {"config": "a\0b"}, "expected a Config, a file"),
        ("train", {"config": "x" * 5000}, "the config file x+ does not exist"),
        ("train", {"rewards": print}, r"rewards=<.*>: expected a list such as \[my_function\]"),
        ("train", {"rewards": "exact_answer"}, "rewards='exact_answer': expected a list"),
        ("train", {"rewards": ["exact_answer"], "reward_weights": 1}, "reward_weights=1: expected"),
        ("train", {"callbacks": print}, r"callbacks=.*: expected a list such as \[my_callback\]"),
        ("train", {"callbacks": [3]}, r"callbacks\[0\]=3: expected a function"),
        (
            "train",
            {"callbacks": [lambda: None]},
            r"callbacks\[0\]=.*: expected a function of one argument \(too many positional",
        ),
        *(
            ("train", {"callbacks": [each]}, r"callbacks\[0\]=.*: expected a plain function")
            for each in (waits, partial(waits), Waits(), yields)
        ),
        (
            "train",
            {"train_data": "rows.jsonl"},
            "train_data='rows.jsonl': expected a list of dicts, one a row; a file is named",
        ),
        ("train", {"val_data": {"prompt": ["1"]}}, "val_data=.*: expected a list of dicts"),
        ("evaluate", {"val_data": "rows.jsonl"}, "val_data='rows.jsonl': expected a list of dicts"),
        ("train", {"num_cpu_devices": "2"}, "num_cpu_devices='2': expected a whole number, 0 or"),
        ("train", {"end_process": 3}, "end_process=3: expected os._exit or None"),
        ("open_model", {"model": None}, "model=None: expected a path"),
        ("open_model", {"dtype": "float16"}, "dtype='float16': expected one of float32, bfloat16"),
        ("evaluate", {"model": 3}, "model=3: expected a path"),
        ("export", {"output": None}, "output=None: expected a path"),
        (
            "export",
            {"output": "x" * 5000},
            r"output='x+\.\.\.: expected a path \(File name too long",
        ),
        ("export", {"dtype": "int8"}, "dtype='int8': expected one of None, float32"),
        ("export", {"adapter": 1}, "adapter=1: expected one of False, True"),
        ("export", {"max_shard_bytes": 0}, "max_shard_bytes=0: expected a whole number, 1 or more"),
        ("load_config", {"overrides": None}, "the overrides None are no dict and no list of pairs"),
        ("load_config", {"overrides": "seed=1"}, "the overrides 'seed=1' are no dict"),
        ("load_config", {"overrides": ["seed=1"]}, r"write {'rollout\.n': 8}"),
    ],
)
def test_a_wrong_argument_is_refused(entry, given, message):
    function, others = ENTRIES[entry]
    with pytest.raises(ConfigError, match=message):
        function(**others | given)
