"""The records of the config: one default in one place, strict values, differences, JSON."""

import inspect
from dataclasses import replace

import pytest
from pydantic import ValidationError

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
from jaxrl_llm.algorithms.build import BUILDERS, ESTIMATORS, LOSSES, build_algorithm
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.config.algorithms import Aggregation, KLType
from jaxrl_llm.data.priority import WEIGHTS
from jaxrl_llm.data.tasks import TASKS
from jaxrl_llm.rewards.graders import FUNCTIONS

OURS = FUNCTIONS | WEIGHTS | {cls: TASKS[cls.kind] for cls in c.TASKS}


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.kind)
def test_a_record_is_the_settings_of_its_function(cls):
    function = OURS[cls]
    parameters = inspect.signature(function).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    fields = {
        name: inspect.Parameter.empty if entry.is_required() else entry.default
        for name, entry in cls.__pydantic_fields__.items()
        if not (name == "size" and issubclass(cls, c.Task))
    }
    assert fields == settings
    assert [type(x) for x in fields.values()] == [type(settings[name]) for name in fields]
    assert cls.kind == function.__name__


def test_every_record_has_its_function():
    assert set(FUNCTIONS) == set(c.GRADERS) and set(WEIGHTS) == set(c.PRIORITIES)
    assert set(TASKS) == {cls.kind for cls in c.TASKS}
    assert set(BUILDERS) == set(c.ALGORITHMS) - {c.Custom}
    for records in (c.ALGORITHMS, c.GRADERS, c.PRIORITIES, c.TASKS):
        kinds = [cls.kind for cls in records]
        assert "" not in kinds and len(set(kinds)) == len(kinds)


def test_the_names_of_a_record_are_those_of_the_functions():
    assert Aggregation.__args__ == tuple(AGGREGATIONS)
    assert KLType.__args__ == (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS))
    pair = c.Pair.__pydantic_fields__
    assert pair["adv_estimator"].annotation.__args__ == tuple(ESTIMATORS)
    assert pair["loss_mode"].annotation.__args__ == tuple(LOSSES)


@pytest.mark.parametrize("name", c.packaged_configs())
def test_every_config_is_the_same_after_json(name):
    config = c.open_config(name)
    assert c.from_json(c.to_json(config)) == config
    assert c.differences(config, c.from_json(c.to_json(config))) == []


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: c.Config(seed="1"), "seed"),
        (lambda: c.Config(save_every=1.0), "save_every"),
        (lambda: c.DataConfig(shuffle="false"), "shuffle"),
        (lambda: c.Config(sed=1), "did you mean 'seed'"),
        (lambda: c.GRPO(clip_hihg=0.3), "did you mean 'clip_high'"),
        (lambda: c.OptimizerConfig(learning_rate=float("nan")), "learning_rate"),
        (lambda: c.RewardConfig(functions=(c.GRPO(),)), "functions"),
    ],
)
def test_values_in_python_are_strict(make, word):
    with pytest.raises(ValidationError, match=word):
        make()


def test_a_list_is_a_tuple_and_an_integer_a_number():
    config = c.Config(reward=c.RewardConfig(functions=[c.ExactAnswer()], weights=[1]))
    assert config.reward.functions == (c.ExactAnswer(),)
    assert config.reward.weights == (1.0,) and type(config.reward.weights[0]) is float


def test_differences_name_the_keys():
    a = c.open_config("grpo")
    b = replace(a, seed=1, algorithm=replace(a.algorithm, clip_low=0.1), warmup=None)
    b = replace(b, data=replace(b.data, train_tasks=(c.ChainSum(num_terms=2),)))
    assert c.differences(a, b) == [
        "seed",
        "data.train_tasks.0.num_terms",
        "algorithm.clip_low",
        "warmup",
    ]
    other = replace(a, algorithm=c.RLOO())
    assert "algorithm.kind" in c.differences(a, other)
    assert c.differences(a, replace(a, reward=replace(a.reward, functions=()))) == [
        "reward.functions"
    ]


def test_online_or_offline_is_the_records_kind():
    config = c.open_config("grpo")
    assert not c.is_offline(config)
    assert c.is_offline(replace(config, algorithm=c.DPO()))
    assert not c.is_offline(replace(config, algorithm=c.Custom(path="x.py:f")))
    assert c.is_offline(replace(config, algorithm=c.Custom(path="x.py:f", offline=True)))


CUSTOM = """
from jaxrl_llm.algorithms.build import build_algorithm
from jaxrl_llm.config import DPO, GRPO


def online(*, clip_low: float, clip_high: float = 0.3):
    return build_algorithm(GRPO(clip_low=clip_low, clip_high=clip_high))


def offline():
    return build_algorithm(DPO())


def neither():
    return 3


def fails():
    return 1 / 0


number = 3
"""


def test_a_users_algorithm_is_checked_when_it_is_built(tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)

    def build(name, offline=False, **settings):
        path = f"{tmp_path}/mine.py:{name}"
        return build_algorithm(c.Custom(path=path, settings=settings, offline=offline))

    assert build("online", clip_low=0.1).policy_loss.keywords["clip_high"] == 0.3
    assert build("offline", offline=True).model_kind == "causal_lm"
    for name, settings, message in (
        ("onlin", {}, "did you mean 'online'"),
        ("online", {}, "needs the setting 'clip_low'"),
        ("online", {"clip_hihg": 1}, "did you mean 'clip_high'"),
        ("offline", {}, "set offline=True"),
        ("neither", {}, "returned int"),
        ("fails", {}, r"mine.py:fails failed in .*mine.py, line 19: ZeroDivisionError: division"),
        ("number", {}, "is of type int, not a function or class"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, **settings)
