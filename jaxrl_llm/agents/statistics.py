"""Metrics of trajectories. Failed samples count as failures, and in nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.agents.trajectory import Drift, Trajectory

Record = dict[str, Any]  # what metrics need of a trajectory, in JSON's types


def records(trajectories: Sequence[Trajectory]) -> list[Record]:
    """One record a trajectory. They are small, so processes can exchange them."""
    return [
        {
            "failed": t.failed,
            "failure": t.failure.partition(":")[0],
            "stop_reason": t.stop_reason,
            "retries": t.num_retries,
            "differs": t.differs,
            "turns": [turn.end - turn.start for turn in t.turns],
            "observed": len(t.mask) - sum(t.mask),
            "calls": [call.status for turn in t.turns for call in turn.calls],
            "failed_calls": sum(turn.num_failed for turn in t.turns),
            "cut": sum(turn.num_cut for turn in t.turns),
            "reward": t.reward,
            "tool_s": t.tool_s,
            "branches": t.num_branches,
            "rows": t.num_rows,
            "shortened": t.shortened,
            "has_tools": t.has_tools,
            "drift": t.drift,
        }
        for t in trajectories
    ]


def metrics(samples: Sequence[Record]) -> dict[str, float]:
    """Metrics of a step by name; empty without samples.

    Turns are calls of the model. Lengths are in tokens: of a turn, of the observations of a sample.
    """
    if not samples:
        return {}
    number = len(samples)
    valid = [sample for sample in samples if not sample["failed"]]
    result = {
        "env/masked_frac": (number - len(valid)) / number,
        "env/retries": float(sum(sample["retries"] for sample in samples)),
        "env/differs": float(sum(sample["differs"] for sample in samples)),
    }
    for kind, count in Counter(sample["failure"] for sample in samples).items():
        if kind:
            result[f"env/failures/{kind.replace(' ', '_')}"] = float(count)
    for reason, count in Counter(sample["stop_reason"] for sample in samples).items():
        result[f"stop/{reason}"] = count / number
    if valid:
        result |= _of_valid(valid)
    return result


def _of_valid(samples: Sequence[Record]) -> dict[str, float]:
    calls = [status for sample in samples for status in sample["calls"]]
    result = {
        **_spread("num_turns", [len(sample["turns"]) for sample in samples]),
        **_spread("observation_length", [sample["observed"] for sample in samples]),
        **_spread("turn_length", [length for sample in samples for length in sample["turns"]]),
        **_spread("env_s", [sample["tool_s"] for sample in samples]),
    }
    if any(sample["has_tools"] for sample in samples):
        result["tools/call_frequency"] = len(calls) / len(samples)
    if calls:
        for name, key in (("failure_frequency", "failed_calls"), ("truncated_frac", "cut")):
            result[f"tools/{name}"] = sum(sample[key] for sample in samples) / len(calls)
        for status, count in Counter(calls).items():
            result[f"parse/{status}"] = count / len(calls)
    if any(sample["branches"] for sample in samples):
        result |= _spread("rollout/rows", [sample["rows"] for sample in samples])
        forked = sum(sample["branches"] > 1 for sample in samples)
        result["rollout/fork_frac"] = forked / len(samples)
        shortened = sum(sample["shortened"] for sample in samples)
        result["rollout/shortened_frac"] = shortened / len(samples)
    result |= _drift([Drift(*sample["drift"]) for sample in samples if sample["drift"]])
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return result | (_spread("env/reward", rewards) if rewards else {})


def _drift(samples: Sequence[Drift]) -> dict[str, float]:
    if not samples:
        return {}
    tokens = [sample.tokens for sample in samples]
    turns = sum(sample.turns for sample in samples)
    return {
        "rollout/drift_frac": sum(sample.drifted for sample in samples) / turns,
        "rollout/drift_tokens_mean": sum(tokens) / len(tokens),
        "rollout/drift_tokens_max": float(max(tokens)),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/min": min(values), f"{name}/max": max(values)}
