"""Metrics of trajectories. Failed samples count as failures, and in nothing else."""

from collections import Counter
from collections.abc import Sequence

from jaxrl_llm.agents.trajectory import Trajectory, Turn


def metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a step by name; empty without trajectories.

    Turns are calls of the model. Lengths are in tokens: of a turn, of the observations of a sample.
    """
    if not trajectories:
        return {}
    number = len(trajectories)
    valid = [t for t in trajectories if not t.failed]
    result = {
        "env/masked_frac": (number - len(valid)) / number,
        "env/retries": float(sum(t.num_retries for t in trajectories)),
        "env/differs": float(sum(t.differs for t in trajectories)),
    }
    for kind, count in Counter(t.failure.partition(":")[0] for t in trajectories).items():
        if kind:
            result[f"env/failures/{kind.replace(' ', '_')}"] = float(count)
    for reason, count in Counter(t.stop_reason for t in trajectories).items():
        result[f"stop/{reason}"] = count / number
    if valid:
        result |= _of_valid(valid)
    return result


def _of_valid(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for t in trajectories for turn in t.turns]
    calls = [call for turn in turns for call in turn.calls]
    observed = [len(t.mask) - sum(t.mask) for t in trajectories]
    result = {
        **_spread("num_turns", [len(t.turns) for t in trajectories]),
        **_spread("observation_length", observed),
        **_spread("turn_length", [turn.end - turn.start for turn in turns]),
        **_spread("env_s", [t.tool_s for t in trajectories]),
        "tools/call_frequency": len(calls) / len(trajectories),
    }
    if calls:
        result["tools/failure_frequency"] = _share(turns, "num_failed", len(calls))
        result["tools/truncated_frac"] = _share(turns, "num_cut", len(calls))
        for status, count in Counter(call.status for call in calls).items():
            result[f"parse/{status}"] = count / len(calls)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return result | (_spread("env/reward", rewards) if rewards else {})


def _share(turns: Sequence[Turn], name: str, number: int) -> float:
    return sum(getattr(turn, name) for turn in turns) / number


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/min": min(values), f"{name}/max": max(values)}
