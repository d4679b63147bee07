"""Values that no run can have are refused by the config alone, with a remedy that works."""

import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.config import (
    GRPO,
    Alarm,
    AlarmsConfig,
    Config,
    ConfigError,
    OptimizerConfig,
    load_config,
)
from jaxrl_llm.config.rules.check import bounds_by_keys
from jaxrl_llm.config.schema import CheckpointConfig
from jaxrl_llm.estimate.lengths import lengths_in
from jaxrl_llm.references import is_file, is_folder, nearest_file
from jaxrl_llm.typed_records.record import Kind, Record, fields_of, validate

# The numbers that may be infinite: a bound that infinity switches off.
UNBOUNDED = {
    *("OptimizerConfig.max_grad_norm", "CheckpointConfig.max_growth"),
    *("PPO.cliprange_value", "TurnPPO.cliprange_value"),
}


def records(cls: type = Record) -> set[type]:
    return {cls}.union(*(records(child) for child in cls.__subclasses__()))


def accepts(cls: Any, name: str, value: Any) -> bool:
    """True if the field alone takes the value."""
    try:
        validate(cls, {name: value})
    except ValidationError as error:
        return not any(found["loc"][:1] == (name,) for found in error.errors())
    return True


def test_no_number_is_nan_and_few_may_be_infinite():
    rooms = ("jaxrl_llm.config.", "jaxrl_llm.typed_records.")
    ours = [cls for cls in records() if cls.__module__.startswith(rooms)]
    of_lists = {"reward.weights": [math.nan], "algorithm.reward_weights": [math.inf]}
    infinite = set()
    for cls in ours:
        for name in fields_of(cls) if cls not in (Record, Kind) else ():
            if fields_of(cls)[name].annotation is float:
                assert not accepts(cls, name, math.nan), f"{cls.__name__}.{name}"
                infinite |= {f"{cls.__name__}.{name}"} if accepts(cls, name, math.inf) else set()
    assert infinite == UNBOUNDED
    for key, value in of_lists.items():
        with pytest.raises(ConfigError, match=rf"config.{key}.0=.*: must be a finite number"):
            load_config("grpo", {"algorithm": "gdpo", key: value})
    assert OptimizerConfig(max_grad_norm=math.inf).max_grad_norm == math.inf
    assert CheckpointConfig(max_growth=math.inf).max_growth == math.inf


def test_a_key_that_bounds_another_is_of_its_record_and_a_number():
    found = {(cls, key.key) for cls in records() for _, key in bounds_by_keys(cls)}
    assert len(found) >= 5
    for cls, key in found:
        assert fields_of(cls)[key].annotation in (int, float), f"{cls.__name__}.{key}"


REFUSED: dict[str, tuple[dict[Any, Any], str]] = {
    "a seed beyond int32": ({"seed": 2**31}, "config.seed=2147483648: must be at most 2147483647"),
    "steps": ({"total_steps": "99999999999999999999"}, "must be at most 2147483647; 200 works"),
    "format": (
        {"reward.functions": [{"kind": "format_match", "pattern": "("}]},
        "functions.0.pattern='(': expected a regular expression, but it is not valid: missing )",
    ),
    "port": (
        {"reward.functions": [{"kind": "remote", "url": "http://a:70000"}]},
        "functions.0.url='http://a:70000': expected an address such as http://",
    ),
    "name": ({"models": [{"name": "a.b"}]}, "models.0.name='a.b': expected a name of letters"),
    "a role's name": (
        {"models": [{"name": "critic"}]},
        "models.0.name='critic': a role of the trainer has that name; another works, such as cost",
    ),
    "a name twice": (
        {"models": [{"name": "a", "path": "o/m"}, {"name": "a", "path": "o/m"}]},
        "config.models.1.name=a: another model has that name",
    ),
    "unused threshold": (
        {"algorithm.rollout_is_threshold": "abc"},
        "config.algorithm.rollout_is_threshold=abc: an importance threshold",
    ),
    "nan": ({"algorithm.rollout_is_threshold": math.nan}, "expected a positive number such as"),
    "rule": (
        {"algorithm.rollout_rs": "seq_mean", "algorithm.rollout_rs_threshold": 2},
        "config.algorithm.rollout_rs=seq_mean: no rejection rule 'seq_mean'; did you mean",
    ),
    "threshold of a rule": (
        {"algorithm.rollout_rs": "token_k2", "algorithm.rollout_rs_threshold": "x"},
        "config.algorithm.rollout_rs_threshold=x: the threshold 'x' of the rejection rule token_k2",
    ),
    "weights of gdpo": (
        {"algorithm": "gdpo", "algorithm.reward_weights": [1, 2]},
        "config.algorithm.reward_weights=[1,2]: 2 weights for 1 functions",
    ),
    "no parts": (
        {"algorithm": "gdpo", "reward.functions": [], "reward.model": {"training": {}}},
        "config.algorithm=gdpo: it standardises the reward functions one by one, and there is none",
    ),
    "empty": ({"resume": ""}, "expected auto, never, or the folder of a checkpoint"),
    "latin-1": ({"run_dir": "/tmp/\udcfc"}, "expected text in UTF-8; set LC_ALL=C.UTF-8"),
    "columns": ({"data.columns": {"prompt": 3}}, "config.data.columns.prompt=3: expected text"),
    "rows": ({"data.train_rows": 3}, "expected a list of dicts, one a row"),
    "table": ({"data.train_rows": {1: 2}.keys() | {3}}, "the first row is of type int"),
    "second row": ({"data.train_rows": [{"a": 1}, {2: 3}]}, "row 1 is no dict with names of"),
    "timer": (
        {"reward.timeout_s": 1e30},
        "timeout_s=1e+30: must be at most 1e+09; 30 works",
    ),
    "token": ({"rollout.stop_token_ids": [-1]}, "stop_token_ids.0=-1: must be 0 or more"),
    "long name": ({"resume": "x" * 5000}, "expected auto, never, or the folder of a checkpoint"),
    "long file": ({"data.train_files": "x" * 5000}, "no file or folder 'xxx"),
    "batch": (
        {"data.train_batch_size": 268435399, "actor.ppo_mini_batch_size": 3, "total_steps": 1},
        "must divide config.data.train_batch_size=268435399",
    ),
    "buffer": (
        {"reward.functions": [{"kind": "overlong_penalty", "max_length": 4, "buffer": 5}]},
        "functions.0.buffer=5: it is above config.reward.functions.0.max_length=4",
    ),
    "length": (
        {"reward.functions": [{"kind": "length_range", "maximum": 4, "minimum": 5}]},
        "functions.0.minimum=5: it is above config.reward.functions.0.maximum=4",
    ),
    "scores": ({"data.priority": {"kind": "learnability", "low": 1}}, "low=1: it is not below"),
    "covariance": ({"algorithm": {"kind": "clip_cov", "clip_cov_lb": 6}}, "clip_cov_ub=5"),
    "warm-up": (
        {
            "actor.optimizer.schedule": "cosine",
            "actor.optimizer.total_steps": 5,
            "actor.optimizer.warmup_steps": 5,
        },
        "leaves no step for config.actor.optimizer.schedule=cosine",
    ),
    "no kind": (
        {"models": [{"kind": "scalar"}]},
        "models.0.name is missing: it has no default",
    ),
    "a kind": (
        {"algorithm": "dro"},
        "beta is missing: it has no default",
    ),
    "path": ({"stages": [{"path": "f.py:g"}]}, "write {kind: custom, path: f.py:g, "),
    "single value": ({"algorithm.loss_scale.x": 3}, "loss_scale is a single value and has no keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_cannot_work_is_refused(name):
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("grpo", overrides)


def test_a_path_of_a_program_is_its_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}')
    given = {"run_dir": tmp_path / "run", "data.train_files": [tmp_path / "a.jsonl"]}
    given |= {"warmup": None}
    config = load_config("grpo", given)
    assert config.run_dir == str(tmp_path / "run")
    assert config.data.train_files == (str(tmp_path / "a.jsonl"),)


@pytest.mark.parametrize("content", [b"\xff", b'{"a"', b"[" * 99999])
def test_a_config_that_is_no_json_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.json is no JSON text: .*give a Python file"):
        load_config(str(tmp_path))


def test_what_is_there_instead_of_a_file(tmp_path):
    (tmp_path / "run").touch()
    assert nearest_file(tmp_path / "run") == f"; {str(tmp_path / 'run')!r} is a file"
    assert nearest_file(tmp_path / "runn") == f"; did you mean {str(tmp_path / 'run')!r}?"
    assert not is_folder("x" * 5000) and not is_file("x" * 5000) and is_file(tmp_path / "run")
    with pytest.raises(ConfigError, match="the path of the model is empty"):
        find_model_path("")


def test_lengths_of_a_file_are_not_empty(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_bytes(b"[1]")
    with pytest.raises(ConfigError, match="no line PROMPT,RESPONSE"):
        lengths_in(file)


def test_null_is_the_empty_list():
    stops = [load_config("grpo", [("rollout.stop", text)]) for text in ("null", "['null']")]
    assert [config.rollout.stop for config in stops] == [(), ("null",)]


def test_python_sets_an_alarm_by_its_action():
    stop: Any = "stop"
    assert AlarmsConfig(kl=stop).kl.threshold == AlarmsConfig().kl.threshold
    given: Any = Alarm(action="stop")
    assert AlarmsConfig(kl=given) == AlarmsConfig(kl=stop)
    off: Any = "off"
    assert Config(alarms=off).alarms.ratio.action == "off"
    with pytest.raises(ConfigError, match=r"config\.alarms\.kl\.action='stpo': expected one of"):
        load_config("grpo", {"alarms": {"kl": "stpo"}})


def test_a_column_of_thresholds_is_kept():
    assert GRPO(rollout_is_threshold="0.5_2").rollout_is_threshold == "0.5_2"
    threshold: Any = 3
    assert type(GRPO(rollout_is_threshold=threshold).rollout_is_threshold) is float
