"""What a reward function is called with: the requests that go to it, built from samples.

Only the standard library is imported here, as in `function.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl_llm.rewards.function import FunctionInfo, did_you_mean

if TYPE_CHECKING:  # types.py imports jax, which a worker must not
    from jaxrl_llm.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The part of TRL's `trainer_state` that reward functions use."""

    global_step: int
    max_steps: int | None


@dataclass(frozen=True, kw_only=True)
class BatchCall:
    """One call of a TRL function: lists with one entry a sample."""

    fields: dict[str, list[Any]]  # prompts, completions, completion_ids and the columns
    state: TrainerState
    size: int


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """One call of a verl function."""

    fields: dict[str, Any]


def batch_call(
    prompts: "Sequence[Prompt]", completions: "Sequence[Completion]", state: TrainerState
) -> BatchCall:
    """The arguments of a TRL function; a conversational prompt gets a conversational completion."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    fields: dict[str, list[Any]] = {
        "data_source": [p.data_source for p in prompts],
        "ground_truth": [p.ground_truth for p in prompts],
    }
    for name in names:
        if name not in ("prompt", "completion"):  # they come in the plural
            fields[name] = [p.columns.get(name) for p in prompts]
    fields["prompts"] = [p.text if p.messages is None else list(p.messages) for p in prompts]
    fields["completions"] = [
        c.text if p.messages is None else [{"role": "assistant", "content": c.text}]
        for p, c in zip(prompts, completions, strict=True)
    ]
    fields["completion_ids"] = [list(c.tokens) for c in completions]
    return BatchCall(fields=fields, state=state, size=len(prompts))


def sample_call(prompt: "Prompt", completion: "Completion") -> SampleCall:
    """The arguments of verl's compute_score; rows without `extra_info` pass their columns."""
    extra_info = prompt.columns.get("extra_info")
    return SampleCall(
        fields={
            "data_source": prompt.data_source,
            "solution_str": completion.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": dict(prompt.columns if extra_info is None else extra_info),
        }
    )


def check_columns(info: FunctionInfo, request: BatchCall | SampleCall) -> None:
    """Refuse a function that asks for a column that no row of the batch has."""
    given = set(request.fields)
    if isinstance(request, BatchCall):
        given |= {"trainer_state", "log_extra", "log_metric"}
    for name in info.required:
        if name not in given:
            raise ValueError(
                f"The reward function {info.path} asks for {name!r}, but the rows have: "
                f"{', '.join(sorted(request.fields))}. Add the column to the data, or give the "
                "parameter a default." + did_you_mean(name, given)
            )


def split_batch(request: BatchCall) -> list[BatchCall]:
    """The same call, one a sample."""
    return [
        BatchCall(
            fields={name: [values[i]] for name, values in request.fields.items()},
            state=request.state,
            size=1,
        )
        for i in range(request.size)
    ]
