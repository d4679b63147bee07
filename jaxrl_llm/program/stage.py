"""A stage: one step of the dataflow, and what a program needs to know of it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.agents.trajectory import Trajectory
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.arguments import Numbered
from jaxrl_llm.distributed.multihost import HostRows
from jaxrl_llm.rewards.manager import RewardResult
from jaxrl_llm.types import ROLLOUT_AXES, Completion, Prompt

HOST = "host"  # role of a stage that runs Python
DEVICE = "device"  # role of a stage that is traced and needs no state
States = dict[str, Any]  # what each role keeps between steps, by its name


@dataclass(frozen=True)
class StageOutput:
    """The result of a stage: fields and metrics by name, and the new state of its role."""

    writes: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None  # for a stage that updates


class Pieces(Protocol):
    """A computation that is cut into programs. Each method is traced in a program of its own.

    `begin`, then `go_on` with the numbers from 0 on, then `end` do what the whole does. `kept`
    is what each `go_on` reads. `passed` and `moved` are what each of them replaces: the arrays of
    `moved` are donated, so their shapes stay.
    """

    def begin(self) -> tuple[Any, Any, Any]:
        """`kept`, `passed` and `moved` of the first program."""
        ...

    def go_on(self, number: int, kept: Any, passed: Any, moved: Any) -> tuple[Any, Any]:
        """The next `passed` and `moved`."""
        ...

    def end(self, passed: Any) -> Any:
        """The result."""
        ...


class Stage(Numbered):
    """One step of the dataflow. A subclass is a frozen dataclass whose `__call__` does the work.

    The keyword-only parameters of `__call__` are the fields of the batch that it reads. A stage
    that calls functions of the algorithm lists them in `functions`, and takes their fields as
    `**fields`. `writes` are the keys of `StageOutput.writes`; they are compared when the stage is
    traced. `numbers` names the fields with rates and coefficients: runs that differ only in these
    share their programs.

    A device stage is traced: `__call__(state of its role, step, *, ...)`. A host stage runs Python:
    `__call__(context, step, *, ...)` with numpy arrays. With several processes it gets the rows
    that its process owns, and writes those. One that `shares` roles gets their `states` too.
    """

    name: str  # its own among the stages of a plan; `timing_s/<name>`
    role: str = DEVICE  # whose state it gets: a model's role, the KL controller, DEVICE or HOST
    writes: tuple[str, ...] = ()
    updates: bool = False  # replaces its role's state: a goal of the plan, always kept
    # The step of the run (1-based) with which it begins. An update that has not begun leaves the
    # state as it was, and reports nothing.
    first_step: int = 1
    # The metrics of a host stage already cover all processes. Otherwise they count as means over
    # the rows of a process, and the mean over all rows is reported.
    gathers: bool = False
    generates: bool = False  # bound by memory: its time says nothing about the use of FLOPs
    # XLA's, for a program whose stages all have the same.
    compiler_options: Mapping[str, int] | tuple[()] = ()
    # The metric that says how often a loop ran whose number is data, by the scope around the loop.
    loop_metrics: Mapping[str, str] | tuple[()] = ()
    # Functions of the algorithm: their positional parameters are fields that are read too.
    functions: Sequence[Callable[..., Any]] = ()
    __call__: Callable[..., StageOutput]  # the work of one step; see above

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the stage gets, as keywords."""
        parameters = inspect.signature(type(self).__call__).parameters.values()
        own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        own = [name for name in own if name != "states"]
        named = [name for fn in self.functions for name in field_names(fn)]
        return tuple(dict.fromkeys((*own, *named)))

    @property
    def shares(self) -> tuple[str, ...]:
        """Other roles whose states the stage reads too."""
        return ()

    def state_of(self, states: States) -> Any:
        """The state that the stage gets."""
        return states.get(self.role)

    @property
    def num_pieces(self) -> int:
        """Programs between the first and the last, where several compile sooner; 0: one is made."""
        return 0

    def pieces(self, state: Any, step: jax.Array, **fields: jax.Array) -> Pieces:
        """The call with these arguments, as programs that run one after the other."""
        raise NotImplementedError(self.name)

    def shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Output shapes of a host stage for `rows` rows. Host stages are not traced."""
        return {name: jax.ShapeDtypeStruct((rows,), jnp.float32) for name in self.writes}

    def check(self, output: StageOutput, rows: int) -> None:
        """ValueError unless the output has the fields and the state that the stage declares.

        A wrong shape could broadcast silently and change the result. B is `rows`.
        """
        if set(output.writes) != set(self.writes):
            raise ValueError(
                f"stage {self.name!r} says that it writes {_shown(self.writes)} and returned "
                f"{_shown(output.writes)}: make `writes` and the returned keys the same"
            )
        if self.updates != (output.state is not None):
            raise ValueError(
                f"stage {self.name!r} has updates={self.updates} and returned "
                f"{'a' if output.state is not None else 'no'} state"
            )
        for name, value in output.writes.items():
            axes, shape = ROLLOUT_AXES.get(name), np.shape(value)
            if shape[:1] != (rows,) or (axes is not None and len(shape) != len(axes)):
                wanted = f"[{', '.join(axes)}]" if axes else "[B, ...]"
                raise ValueError(
                    f"stage {self.name!r} returned {name} of shape {shape}; it must be {wanted}, "
                    f"and B is {rows} samples"
                )


@dataclass(kw_only=True)
class StepContext:
    """The host's record of a step. Host stages read it and write their results here."""

    prompts: dict[int, Prompt]  # prompts of the rows that this process holds, by group
    n: int  # samples a prompt
    rows: HostRows  # rows of the batch here
    policy_version: int  # updates of the policy that generates, or begins to
    # Policy that sampled the last token of each owned row, where it may be another.
    last_policy_versions: np.ndarray | None = None
    first_sample: int = 0  # samples of this step before these, where a step generates repeatedly
    completions: list[Completion] = field(default_factory=list)  # one an owned row
    trajectories: list[Trajectory] = field(default_factory=list)  # likewise, of several turns
    responses: list[Any] = field(default_factory=list)  # likewise, `parts.Response` so far
    reward: RewardResult | None = None  # scores of `completions`

    def prompts_of(self, rows: np.ndarray) -> list[Prompt]:
        """The prompts that these rows of the batch answer."""
        return [self.prompts[row // self.n] for row in rows.tolist()]


def _shown(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
