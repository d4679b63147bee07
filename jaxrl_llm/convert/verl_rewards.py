"""verl's rewards in ours: functions by path, reward models, managers, and its choice by source."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.rules import Source, many

GSM8K_SOURCE = "openai/gsm8k"  # as verl's preprocessing names it


def set_rewards(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    """`reward.functions`, `reward.model` and `validation.grader`."""
    functions: list[Any] = []
    path = source.get("reward.custom_reward_function.path", "custom_reward_function.path")
    if path:
        name = source.get("reward.custom_reward_function.name", "custom_reward_function.name")
        function: dict[str, Any] = {"kind": "custom", "path": f"{path}:{name or 'compute_score'}"}
        if settings := _arguments(source):
            function["settings"] = settings
        functions = [function]
        values["validation.grader"] = functions[0]
    elif source.get("reward.reward_model.enable", "reward_model.enable"):
        _set_model(source, values)
    else:
        functions = _by_files(source, values, notes)
    values["reward.functions"] = [*functions, *_overlong(source)]


def _arguments(source: Source) -> dict[str, Any]:
    """The further arguments of a function, `reward_kwargs`."""
    folder = "custom_reward_function.reward_kwargs."
    keys = [key for key in source.settings if folder in key]
    return {key.partition(folder)[2]: source.settings[key] for key in keys}


def _set_model(source: Source, values: dict[str, Any]) -> None:
    path = source.get("reward.reward_model.model_path", "reward_model.model.path")
    if not path:
        raise ConfigError("reward_model.enable=True without a path: give reward_model.model.path")
    values["reward.model.path"] = str(Path(str(path)).expanduser())
    values["reward.model.dtype"] = "bfloat16"


def _by_files(source: Source, values: dict[str, Any], notes: list[str]) -> list[Any]:
    """verl looks the reward up by the rows' data_source; the names of the files hint at it."""
    names = " ".join(str(file).lower() for file in many(source.get("data.train_files")))
    graders = [
        {"kind": kind}
        for kind, hints in (("gsm8k", ("gsm8k",)), ("math_answer", ("math", "dapo", "aime")))
        if any(hint in names for hint in hints)
    ]
    kinds = ", ".join(grader["kind"] for grader in graders)
    notes.append(
        "reward.functions: verl picks a function by the data_source of each row. "
        + (f"The names of the files suggest {kinds}" if graders else "exact_answer stands in")
        + ("; on every row they are added" if len(graders) > 1 else "")
        + "; compare it with your data (docs/write-a-reward.md)"
    )
    graders = graders or [{"kind": "exact_answer"}]
    values["validation.grader"] = graders[-1]
    if len(graders) > 1:
        values["validation.graders"] = [{"source": GSM8K_SOURCE, "grader": {"kind": "gsm8k"}}]
    return graders


def _overlong(source: Source) -> list[Any]:
    """DAPO's penalty for long responses."""
    folders = ("reward.reward_kwargs.", "reward_model.reward_kwargs.")
    cfg = "overlong_buffer_cfg."
    if not source.get(*(f"{folder}{cfg}enable" for folder in folders)):
        return []
    longest = source.whole(*(f"{folder}max_resp_len" for folder in folders))
    penalty = source.number(*(f"{folder}{cfg}penalty_factor" for folder in folders))
    return [
        {
            "kind": "overlong_penalty",
            "max_length": longest or source.whole("data.max_response_length"),
            "buffer": source.whole(*(f"{folder}{cfg}len" for folder in folders)),
            "penalty": float(penalty or 1.0),
        }
    ]
