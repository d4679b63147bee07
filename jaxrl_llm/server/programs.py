"""Answers the samples of a step by a user's program, which asks a server of the engine.

The program runs in worker processes. The server runs in a thread while a batch is generated. The
trainer's thread drives the engine.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl_llm import config as c
from jaxrl_llm.agents.conversation import Budgets
from jaxrl_llm.agents.drift import MEASURED, drift_of
from jaxrl_llm.agents.driver import Sample, columns_of, id_of
from jaxrl_llm.agents.rows import joined
from jaxrl_llm.agents.sessions import Answer, Run, Setup
from jaxrl_llm.agents.setup import gives_rewards
from jaxrl_llm.agents.styles import ChatStyle
from jaxrl_llm.agents.trajectory import Row, StopReason, Trajectory
from jaxrl_llm.agents.workers import Job, Tools, open_tools
from jaxrl_llm.generation.engine_group import EngineGroup
from jaxrl_llm.generation.sequence import Sampling
from jaxrl_llm.rewards.calling import CallError
from jaxrl_llm.rewards.graders import worker_limits, worker_reference
from jaxrl_llm.server.listening import Listener
from jaxrl_llm.server.sessions import Branch, Session, SessionApplication, SessionWorker
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.tokenizer import Tokenizer

if TYPE_CHECKING:  # types.py imports jax
    from jaxrl_llm.types import Prompt

PATIENCE = 0.02  # seconds of waiting for a request while the engine has nothing to do


@dataclass(frozen=True, kw_only=True)
class ProgramRules:
    """What the samples of a run have in common."""

    budgets: Budgets
    max_prompt_length: int
    max_rows: int = 1  # branches of a sample that are trained
    forks: bool = False  # a branch begins where the chat template drops thinking
    sampling: Sampling  # sampling of training; requests may repeat it
    seed: int = 0  # seed of the run
    timeout_s: float = 1800.0  # time limit of a program
    most: int = 256  # programs at once
    max_retries: int = 1  # further tries with a new session
    needs_reward: bool = False  # no reward function grades what the program leaves out


@dataclass(eq=False)
class _Live:
    """A sample that has not ended."""

    sample: Sample
    place: Any  # where the engine puts its sequences
    session: Session | None = None
    retries: int = 0


class Programs:
    """Takes samples, and gives their trajectories, as `Driver` does."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools, rules: ProgramRules) -> None:
        """Raises: ValueError where turns cannot be added to the chat template."""
        self._tokenizer, self._tools, self._rules = tokenizer, tools, rules
        try:
            ChatStyle(tokenizer)
        except ValueError as error:
            raise ValueError(f"config.rollout.program: {error}") from None

    def stop_ids(self, *, plain: bool) -> tuple[int, ...]:
        """Ids that end a turn, for the engine. Requests are chats, whatever the rows are."""
        return tuple(self._tokenizer.stop_ids)

    def check(self, prompts: "Iterable[Prompt]") -> None:
        """Rows may have any form: the program reads them."""

    def drop_before(self, step: int) -> None:
        """Nothing is kept for a resume."""

    def close(self) -> None:
        """End the processes of the program."""
        self._tools.close()

    def run(self, engines: EngineGroup, samples: Sequence[Sample]) -> list[Trajectory]:
        """The trajectories of all samples, in their order."""
        rules = self._rules
        worker = SessionWorker(engines)
        settings = ServerSettings(port=0, answer_s=rules.timeout_s)
        # A prompt of several rows may be longer: its end is then a part of the response.
        several = rules.max_rows > 1
        most_prompt = rules.budgets.max_context - 1 if several else rules.max_prompt_length
        application = SessionApplication(
            worker, self._tokenizer, rules.budgets, most_prompt, rules.sampling,
            settings, forks=rules.forks,
        )  # fmt: skip
        done: dict[str, Trajectory] = {}
        # In the order of the samples, so that no clock says which engine has which.
        queued = deque(_Live(s, engines.beginning(s.prompt.token_ids)) for s in samples)
        running = 0
        with Listener(application, settings) as server:
            worker.started.wait()
            while queued or running:
                while queued and running < rules.most:
                    self._begin(application, server.url, queued.popleft())
                    running += 1
                worker.work(PATIENCE)
                for job, answer in self._tools.done():
                    live: _Live = job.owner
                    assert live.session is not None
                    session = live.session
                    worker.run(application.end, session)
                    worker.release(session)
                    error = self._error(session, answer)
                    if error is not None and (error.shared or live.retries < rules.max_retries):
                        live.retries += not error.shared
                        self._begin(application, server.url, live, alone=error.shared)
                        continue
                    running -= 1
                    kept = session.kept(rules.max_rows)
                    done[id_of(live.sample)] = _trajectory(live, session, kept, answer, error)
        return joined(
            [done[id_of(sample)] for sample in samples],
            most_prompt=rules.max_prompt_length,
            most=rules.budgets.max_response_length,
        )

    def _begin(
        self, application: SessionApplication, url: str, live: _Live, *, alone: bool = False
    ) -> None:
        """Run the program of a sample, in a new session."""
        live.session = application.open(live.sample, live.place)
        name = live.session.name
        row = columns_of(live.sample, self._rules.seed)
        action = Run(row, url.replace("/v1", f"/s/{name}/v1"), name)
        limit = self._rules.timeout_s
        self._tools.submit(Job(owner=live, action=action, limit=limit, is_async=True, alone=alone))

    def _error(self, session: Session, answer: Answer) -> CallError | None:
        """Why a sample failed. An error that a limit of the run brought is none."""
        error = answer.error
        if session.ended is not None:
            return error if error is not None and error.kind != "exception" else None
        if error is not None:
            return error
        if not session.num_recorded:
            return CallError(kind="no_answer", message="the program got no answer of the model")
        if self._rules.needs_reward and answer.value is None:
            why = "the program returned no number, and config.reward.functions is empty"
            return CallError(kind="no_reward", message=why)
        return None


def _trajectory(
    live: _Live,
    session: Session,
    kept: Sequence[Branch],
    answer: Answer,
    error: CallError | None,
) -> Trajectory:
    """The trajectory of a sample. The branches that are kept are its rows."""
    sample, last = live.sample, kept[-1] if kept else None
    reason: StopReason = session.ended or (last and last.cut) or "completed"
    if error is not None:
        reason = "timeout" if error.kind == "timeout" else "failed"
    drift = None
    if last and last.style and sample.sample < MEASURED and error is None:
        drift = drift_of(last.style, last.messages, last.prompt, last.response, last.turns)
    return Trajectory(
        id=id_of(sample),
        sample=sample.sample,
        group=sample.group,
        prompt_ids=sample.prompt.token_ids,
        final_reward=answer.value if error is None else None,
        stop_reason=reason,
        failure=f"{error.kind}: {error.message}" if error is not None else "",
        num_retries=live.retries,
        num_branches=len(session.branches),
        text=last.text if last else "",
        has_tools=any(branch.has_tools for branch in kept),
        drift=drift,
        rows=tuple(
            Row(
                prompt=branch.prompt,
                response=branch.response,
                mask=branch.mask,
                logprobs=branch.logprobs,
                turns=branch.turns,
                messages=branch.messages,
                sequence=branch.sequence,
            )
            for branch in kept
        ),
    )


def open_programs(config: c.Config, tokenizer: Tokenizer) -> Programs:
    """The program of a run. Close it at the end.

    Raises: ValueError, with the remedy, for a program that cannot be loaded.
    """
    rollout, data, rewards = config.rollout, config.data, config.reward
    program = rollout.program
    assert program is not None
    is_line = isinstance(program, c.Command)
    tools = open_tools(
        Setup(program=program.line if is_line else worker_reference(program)),
        local=False,
        num_workers=0,
        limits=worker_limits(rewards),
    )
    rules = ProgramRules(
        budgets=Budgets(
            max_response_length=data.max_response_length,
            max_context=data.max_row_length,
            max_turns=rollout.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
        ),
        max_prompt_length=data.max_prompt_length,
        max_rows=rollout.max_rows,
        forks=rollout.earlier_thinking == "fork",
        sampling=Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p),
        seed=config.seed,
        timeout_s=rollout.program_timeout_s,
        most=rollout.num_programs,
        max_retries=rewards.max_retries,
        needs_reward=gives_rewards(config) and not rewards.functions and rewards.model is None,
    )
    return Programs(tokenizer, tools, rules)
