"""Metrics of trajectories, by hand."""

import json

import pytest

from jaxrl_llm.agents.call_formats import Call
from jaxrl_llm.agents.statistics import metrics, records
from jaxrl_llm.agents.trajectory import Drift, Trajectory, Turn, restored, without_ids


def trajectory(number, turns, mask, **fields):
    names = {"id": str(number), "sample": number, "group": 0, "prompt_ids": (1,)}
    return Trajectory(**names, turns=tuple(turns), mask=tuple(mask), **fields)


def test_by_hand():
    right, wrong = Call("f", "{}", {}), Call("", "{", {}, "invalid_json", "no")
    samples = records(
        [
            trajectory(
                0,
                [
                    Turn(start=0, end=2, calls=(right, wrong), num_failed=1, num_cut=1),
                    Turn(start=5, end=6, reward=0.5),
                ],
                [1, 1, 0, 0, 0, 1],
                final_reward=1.0,
                has_tools=True,
                drift=Drift(2, 1, 4),
                tool_s=2.0,
            ),
            trajectory(
                1,
                [Turn(start=0, end=4)],
                [1] * 4,
                stop_reason="max_tokens",
                num_retries=1,
                drift=Drift(1, 0, 0),
            ),
            trajectory(2, [], [], stop_reason="failed", failure="crash: it died", num_retries=1),
            trajectory(3, [], [], stop_reason="timeout", failure="timeout: late", differs=True),
        ]
    )
    assert metrics(json.loads(json.dumps(samples))) == {
        "env/masked_frac": 0.5,
        "env/retries": 2.0,
        "env/differs": 1.0,
        "env/failures/crash": 1.0,
        "env/failures/timeout": 1.0,
        **{f"stop/{name}": 0.25 for name in ("completed", "max_tokens", "failed", "timeout")},
        **{"num_turns/mean": 1.5, "num_turns/min": 1, "num_turns/max": 2},
        **{"observation_length/mean": 1.5, "observation_length/min": 0},
        "observation_length/max": 3,
        **{"turn_length/mean": pytest.approx(7 / 3), "turn_length/min": 1, "turn_length/max": 4},
        **{"env_s/mean": 1.0, "env_s/min": 0.0, "env_s/max": 2.0},
        **{"tools/call_frequency": 1.0, "tools/failure_frequency": 0.5},
        **{"tools/truncated_frac": 0.5, "parse/ok": 0.5, "parse/invalid_json": 0.5},
        **{"rollout/drift_frac": pytest.approx(1 / 3), "rollout/drift_tokens_mean": 2.0},
        "rollout/drift_tokens_max": 4.0,
        **{"env/reward/mean": 1.5, "env/reward/min": 1.5, "env/reward/max": 1.5},
    }
    assert metrics([]) == {}
    assert set(metrics(records([trajectory(0, [], [], stop_reason="aborted")]))) == {
        *("env/masked_frac", "env/retries", "env/differs", "stop/aborted"),
    }


def test_a_trajectory_comes_back_from_a_checkpoint():
    call = Call("f", '{"a": 1}', {"a": 1}, id="x")
    own = trajectory(
        4,
        [
            Turn(start=0, end=2, message=1, calls=(call,), reward=0.25, state="s"),
            Turn(start=3, end=4),
        ],
        [1, 1, 0, 1],
        response_ids=(7, 8, 9, 5),
        logprobs=(-0.5, -0.25, 0.0, -1.0),
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": ""}),
        drift=Drift(2, 1, 4),
        failure="crash: it died",
        row_starts=(2,),
    )
    kept = json.loads(json.dumps(without_ids(own)))
    padded = [*own.response_ids, 0], [1.0, 1.0, 0.0, 1.0, 0.0], [*own.logprobs, 0.0]
    assert restored(kept, *padded) == own
