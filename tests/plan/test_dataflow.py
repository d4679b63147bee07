"""`plan` against plans written out by hand."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxrl_llm.plan.dataflow import plan, segments
from jaxrl_llm.program.stage import DEVICE, HOST, Stage, StageOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Fake(Stage):
    """A stage that is never run."""

    name: str
    role: str
    given: tuple[str, ...]
    writes: tuple[str, ...]
    updates: bool

    @property
    def reads(self):
        return self.given


def stage(name, reads=(), writes=(), role="actor", updates=False):
    return Fake(name=name, given=tuple(reads), writes=tuple(writes), role=role, updates=updates)


GEN = stage("gen", ("prompts",), ("responses", "mask", "rollout_logprobs"))
OLD = stage("old_log_prob", ("responses",), ("old_logprobs",))
REF = stage("ref", ("responses",), ("reference_logprobs",), "reference")
VALUES = stage("values", ("responses",), ("values",), "critic")
HOST_REWARD = stage("reward", ("responses",), ("scores",), HOST)
MODEL_REWARD = stage("reward", ("responses",), ("scores",), "reward")
KL = stage(
    "kl", ("scores", "old_logprobs", "reference_logprobs"), ("rewards",), "kl_controller", True
)
ADV = stage("adv", ("rewards", "values"), ("advantages", "returns"), "device")
CRITIC = stage("update_critic", ("returns", "values"), (), "critic", True)
ACTOR = stage("update_actor", ("advantages", "old_logprobs"), (), "actor", True)


def names(stages):
    return [s.name for s in stages]


def test_ppo_with_a_host_reward_orders_device_work_before_the_host_waits():
    shuffled = [ACTOR, HOST_REWARD, KL, ADV, VALUES, GEN, CRITIC, REF, OLD]
    planned = names(plan(shuffled))
    assert planned[0] == "gen"
    assert set(planned[1:4]) == {"values", "ref", "old_log_prob"}
    assert planned[4:7] == ["reward", "kl", "adv"]
    assert set(planned[7:]) == {"update_critic", "update_actor"}


def test_host_reward_splits_the_iteration_where_the_host_waits():
    planned = plan([GEN, OLD, REF, VALUES, HOST_REWARD, KL, ADV, CRITIC, ACTOR])
    assert [s.name for s in segments(planned)] == [
        "gen",
        "old_log_prob+ref+values",
        "reward",
        "kl+adv+update_critic+update_actor",
    ]
    assert [s.is_host for s in segments(planned)] == [False, False, True, False]


def test_model_reward_makes_one_program():
    planned = plan([GEN, OLD, REF, VALUES, MODEL_REWARD, KL, ADV, CRITIC, ACTOR])
    assert len(segments(planned)) == 1
    assert len(segments(planned, fuse=False)) == 9


def test_stages_nobody_needs_are_left_out():
    place = stage("kl", ("scores", "mask"), ("rewards",), "device")
    group = stage("adv", ("rewards", "mask"), ("advantages",), "device")
    actor = stage("update_actor", ("advantages", "old_logprobs"), (), "actor", True)
    planned = plan([GEN, OLD, REF, VALUES, HOST_REWARD, place, group, actor])
    assert names(planned) == ["gen", "old_log_prob", "reward", "kl", "adv", "update_actor"]


def test_an_update_waits_for_every_reader_of_the_old_state():
    late = stage("values", ("responses",), ("values",), "actor")
    update = stage("update_actor", ("responses",), (), "actor", True)
    critic = stage("update_critic", ("values",), (), "critic", True)
    planned = names(plan([GEN, update, critic, late]))
    assert planned.index("values") < planned.index("update_actor")


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([GEN, ACTOR, OLD], "reads 'advantages', which no stage writes"),
        ([GEN, OLD, stage("again", ("mask",), ("old_logprobs",)), ACTOR], "both 'old_log_prob'"),
        ([stage("x", ("old_logprob",), (), "actor", True)], "did you mean 'old_logprobs'"),
        ([stage("x", ("costs",), (), "actor", True), stage("y", (), ("cost",))], "mean 'cost'"),
        ([stage("x", (), ("prompts",))], "which is an input"),
        ([GEN, GEN], "two stages are called 'gen'"),
        (
            [
                stage("a", ("values",), ("returns",)),
                stage("b", ("returns",), ("values",)),
                stage("u", ("values",), (), "critic", True),
            ],
            "wait for each other",
        ),
    ],
)
def test_a_broken_graph_is_refused_by_name(stages, words):
    with pytest.raises(ValueError, match=words):
        plan(stages)


# ------------------------------------------------------------------------- declarations


@dataclass(frozen=True, kw_only=True, eq=False)
class Penalty(Stage):
    """Reads what its signature names, and what a function of the algorithm reads."""

    functions: tuple = (lambda values, mask, *, scale=1.0: values,)
    name = "penalty"
    writes = ("cost",)

    def __call__(self, state, step, *, scores, mask, **fields):
        return StageOutput({"cost": scores})


def test_a_stage_reads_what_its_signature_and_its_functions_name():
    assert Penalty().reads == ("scores", "mask", "values")
    assert Penalty().role == DEVICE and Penalty().writes == ("cost",)


def test_a_field_that_a_stage_writes_is_known_to_others():
    reader = stage("reader", ("cost",), (), "actor", True)
    planned = names(plan([reader, Penalty(), GEN, VALUES, MODEL_REWARD]))
    assert planned.index("penalty") < planned.index("reader")


COST = np.ones(4)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (StageOutput({"costs": COST}), "says that it writes cost and returned costs"),
        (StageOutput({"cost": COST, "more": COST}), "returned cost, more"),
        (StageOutput(), "returned nothing"),
        (StageOutput({"cost": COST}, state=1), "updates=False and returned a state"),
        (
            StageOutput({"cost": COST.mean()}),
            r"cost of shape \(\); it must be \[B, ...\], and B is 4",
        ),
        (StageOutput({"cost": COST[:3]}), r"cost of shape \(3,\)"),
    ],
)
def test_what_a_stage_returns_is_what_it_says(output, words):
    with pytest.raises(ValueError, match=words):
        Penalty().check(output, 4)
    Penalty().check(StageOutput({"cost": COST}, {"mine": 1.0}), 4)


def test_a_field_of_the_batch_has_its_own_shape():
    scores = stage("mine", ("rewards",), ("scores",))
    with pytest.raises(ValueError, match=r"scores of shape \(4, 1\); it must be \[B\], and"):
        scores.check(StageOutput({"scores": COST[:, None]}), 4)
    scores.check(StageOutput({"scores": COST}), 4)
