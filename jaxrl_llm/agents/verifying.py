"""Environments that look at an answer: a verifier that asks again, and Python in the sandbox."""

from types import SimpleNamespace
from typing import Any

from jaxrl_llm.agents.environments import Step
from jaxrl_llm.rewards.calling import TrainerState, batch_call, call, sample_call
from jaxrl_llm.rewards.code import extract_code
from jaxrl_llm.rewards.loading import load_bound
from jaxrl_llm.sandbox.box import Limits, Sandbox

RUNS_IN_POOL = True  # a grader or a program may take seconds
OUTPUT_KB = 64  # what a program may print
_LOADED: dict[str, Any] = {}  # graders and the sandbox of this process


class Retry:
    """A verifier: a wrong answer gets `message` and another turn, up to `attempts` answers.

    The reward of a turn is the change of the score, so a later right answer pays no more than a
    first one (SCoRe, arXiv:2409.12917).
    """

    def __init__(
        self,
        *,
        grader: tuple[str, dict[str, Any], bytes],
        attempts: int = 2,
        message: str = "Wrong. Try again.",
        enough: float = 1.0,
    ) -> None:
        self._left, self._message, self._enough = attempts, message, enough
        key = repr(grader)
        if key not in _LOADED:
            _LOADED[key] = load_bound(*grader)
        self._function, self._info = _LOADED[key]
        self._row: dict[str, Any] = {}
        self._score = 0.0

    def reset(self, **row: Any) -> None:
        """Keep the row, which grades the answer."""
        self._row = row

    def step(self, action: str) -> Step:
        """Grade an answer. RuntimeError where the grader fails, which says nothing about it."""
        self._left -= 1
        score = self._graded(action)
        reward, self._score = score - self._score, score
        if score >= self._enough or not self._left:
            return Step(reward=reward, done=True)
        return Step(self._message, reward=reward)

    def _graded(self, answer: str) -> float:
        prompt = self._row.get("prompt")
        sample: Any = SimpleNamespace(
            columns=self._row,
            data_source=self._row.get("data_source", "default"),
            ground_truth=self._row.get("ground_truth"),
            text=prompt if isinstance(prompt, str) else "",
            messages=None if isinstance(prompt, str) else prompt,
        )
        completion: Any = SimpleNamespace(text=answer, tokens=())
        if self._info.kind == "batch":
            state = TrainerState(global_step=0, max_steps=None)
            request: Any = batch_call([sample], [completion], state, self._info.required)
        else:
            request = sample_call(sample, completion)
        reply = call(self._function, self._info, request)
        graded = None if reply.error else reply.graded[0]
        error = reply.error if graded is None else graded.error
        if error is not None or graded is None or graded.value is None:
            why = "it returned None" if error is None else error.message
            raise RuntimeError(f"the grader {self._info.name} gave no score: {why}")
        return graded.value


class CodeEnvironment:
    """Answers a turn that has a block of Python with its output. A turn without one is the answer.

    Reward functions grade it. Each program runs in a new, empty folder.
    """

    def __init__(
        self, *, seconds: float = 5.0, memory_mb: int = 512, limits_only: bool = False
    ) -> None:
        self._settings = {"seconds": seconds, "memory_mb": memory_mb, "limits_only": limits_only}

    def reset(self) -> None:
        """Nothing is kept between programs."""

    def step(self, action: str) -> Step:
        """Run the last block of Python."""
        source = extract_code(action)
        if source is None:
            return Step(done=True)
        return Step(python(source, **self._settings))


def python(
    code: str, *, seconds: float = 5.0, memory_mb: int = 512, limits_only: bool = False
) -> str:
    """Run a Python program, and get what it prints.

    Args:
        code: The program. It begins in an empty folder, without network and packages.
        seconds: Time limit of the program.
        memory_mb: Memory limit of the program.
        limits_only: Whether it runs without namespaces.
    """
    limits = Limits(seconds=seconds, memory_mb=memory_mb, output_kb=OUTPUT_KB)
    key = f"sandbox {limits} {limits_only}"
    if key not in _LOADED:
        _LOADED[key] = Sandbox(limits, limits_only=limits_only)
    outcome = _LOADED[key].run_source(code)
    if outcome.why == "lost":
        raise RuntimeError(outcome.describe())
    if outcome.succeeded:
        return outcome.stdout
    errors = outcome.stderr[-2000:] if outcome.why == "ended" else ""
    return "\n".join(filter(None, (outcome.stdout.rstrip(), errors.rstrip(), outcome.describe())))
