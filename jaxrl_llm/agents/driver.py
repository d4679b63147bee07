"""Drives many samples against an engine: turns go to tools, and results go back as they come.

Guarantees: a trajectory depends on its sample alone, never on the order in which results arrive.
Nothing waits for the slowest tool.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakValueDictionary

from jaxrl_llm.agents.conversation import Append, Budgets, Conversation, End
from jaxrl_llm.agents.drift import MEASURED
from jaxrl_llm.agents.environments import EnvironmentInfo
from jaxrl_llm.agents.observations import Observations, digest_of
from jaxrl_llm.agents.rows import draws_of, joined
from jaxrl_llm.agents.sessions import Action, Answer, Calls, Grade, Reset, Say, Value
from jaxrl_llm.agents.styles import ChatStyle, PlainStyle, Style
from jaxrl_llm.agents.tools import Schema
from jaxrl_llm.agents.trajectory import UNGRADED, Row, StopReason, Trajectory
from jaxrl_llm.agents.workers import Job, Tools
from jaxrl_llm.references import nearest
from jaxrl_llm.rewards.calling import CallError
from jaxrl_llm.tokenizer import Tokenizer

if TYPE_CHECKING:  # types.py imports jax
    from jaxrl_llm.types import Prompt

PATIENCE = 0.05  # seconds of waiting for a tool while the engine has nothing to do


class EngineSequence(Protocol):
    """The part of an engine's sequence that this file uses."""

    tokens: list[int]
    logprobs: list[float]  # as long as `tokens`
    num_prompt: int
    status: Literal["queued", "running", "waiting", "ended"]
    stop_reason: Literal["stop", "length", "context", "aborted"] | None


class Engine(Protocol):
    """The part of an engine that this file uses."""

    @property
    def has_work(self) -> bool:
        """Whether something is queued or runs."""
        ...

    def beginning(self, tokens: Sequence[int]) -> Any:
        """A prompt that several sequences share."""
        ...

    def add(self, prompt: Sequence[int], *, limit: int, beginning: Any, **options: Any) -> Any:
        """Begin a sequence."""
        ...

    def append(self, sequence: Any, tokens: Sequence[int], *, limit: int) -> None:
        """Let a sequence that waits go on behind these ids."""
        ...

    def step(self) -> Sequence[Any]:
        """Advance. Returns the sequences that got tokens or ended a turn."""
        ...

    def finish(self, sequence: Any) -> None:
        """Free what a sequence that waits holds."""
        ...

    def abort(self, sequence: Any) -> None:
        """End a sequence at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A request for one trajectory."""

    prompt: "Prompt"
    step: int  # below 0: its observations are not kept for a resume
    sample: int  # its number in the step
    group: int = 0  # number of its prompt in the step
    # Further arguments of `engine.add`: the keys of its draws, and how it is sampled.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """What the samples of a run have in common."""

    budgets: Budgets
    seed: int = 0  # seed of the run
    max_prompt_length: int = 0  # tokens of a prompt with its tools; 0: no limit
    tool_timeout_s: float = 30.0  # seconds of a call
    max_retries: int = 1  # further tries with a new environment
    max_rows: int = 1  # rows of a sample that are kept
    forks: bool = False  # a row begins where the chat template drops thinking
    origin: str = ""  # stands for the code and settings of tools and environments


@dataclass(eq=False)
class _Live:
    """A sample that has not ended."""

    sample: Sample
    info: EnvironmentInfo | None
    environment: int = 0
    session: int = 0
    conversation: Conversation | None = None
    beginning: Any = None
    sequence: Any = None
    rows: list[Row] = field(default_factory=list)  # rows before the last
    history: list[tuple[Action, Value]] = field(default_factory=list)
    num_answers: int = 0
    digest: str = ""  # stands for the actions so far, and for what they depend on
    retries: int = 0
    differs: bool = False
    # After a crash nobody knows which of several async calls is to blame.
    alone: bool = False
    since: float = 0.0
    tool_s: float = 0.0
    ending: StopReason | None = None  # while its reward is asked for
    reward: float | None = None


class Driver:
    """Takes samples, and gives their trajectories. One thread uses it, with one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Tools,
        settings: DriverSettings,
        observations: Observations | None = None,
    ) -> None:
        self._tokenizer, self._tools, self._settings = tokenizer, tools, settings
        self._observations = observations
        self._known: list[tuple[Job, Answer]] = []  # jobs with a recorded answer
        self._schemas = {info.name: info.schema for info in tools.description.tools}
        for info in tools.description.environments:
            if twice := [tool.name for tool in info.tools if tool.name in self._schemas]:
                raise ValueError(f"a tool and a method of {info.name} have the name {twice[0]!r}")
        self._async = {info.name for info in tools.description.tools if info.is_async}
        self._environments = {info.name: i for i, info in enumerate(tools.description.environments)}
        self._styles: dict[str, Style] = {}
        self._beginnings: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self._live: dict[int, _Live] = {}  # by the identity of the sequence
        self._open: set[_Live] = set()  # samples that have not ended
        self._finished: list[Trajectory] = []
        self._sessions = 0

    @property
    def has_work(self) -> bool:
        """Whether a sample has not ended."""
        return bool(self._open or self._finished)

    def stop_ids(self, *, plain: bool) -> tuple[int, ...]:
        """Ids that end a turn, for the engine. `plain`: prompts are texts, not messages."""
        ids = dict.fromkeys(self._tokenizer.stop_ids)
        for info in self._tools.description.environments if plain else ():
            ids |= dict.fromkeys(PlainStyle(self._tokenizer, info.stop).stop_ids)
        return tuple(ids)

    def check(self, prompts: "Iterable[Prompt]") -> None:
        """Check that rows name tools and environments that there are, and take turns.

        Raises: ValueError, with the remedy.
        """
        for prompt in prompts:
            index = self._environment_of(prompt.columns)
            info = None if index is None else self._tools.description.environments[index]
            self._style(prompt, self._all_tools(prompt, info), info)

    def close(self) -> None:
        """End the processes of tools and environments."""
        self._tools.close()
        if self._observations is not None:
            self._observations.close()

    def drop_before(self, step: int) -> None:
        """Forget the observations of earlier steps, which no resume begins again."""
        if self._observations is not None:
            self._observations.drop_before(step)

    def run(self, engine: Engine, samples: Sequence[Sample]) -> list[Trajectory]:
        """The trajectories of all samples, in their order."""
        for sample in samples:
            self.add(engine, sample)
        done: dict[str, Trajectory] = {}
        while self.has_work:
            done.update({trajectory.id: trajectory for trajectory in self.advance(engine)})
        trajectories = [done[id_of(sample)] for sample in samples]
        if not self._settings.forks:
            return trajectories
        return joined(
            trajectories,
            most_prompt=self._settings.max_prompt_length or self._settings.budgets.max_context,
            most=self._settings.budgets.max_response_length,
        )

    def add(self, engine: Engine, sample: Sample) -> None:
        """Begin a sample. Raises ValueError for a row that names no environment or tool here."""
        index = self._environment_of(sample.prompt.columns)
        info = None if index is None else self._tools.description.environments[index]
        live = _Live(sample, info, digest=f"{self._settings.origin} {sample.prompt.token_ids}")
        self._open.add(live)
        if info is None or index is None:
            self._begin(engine, live, None)
            return
        live.environment, live.session = index, self._new_session()
        self._submit(live, Reset(index, columns_of(sample, self._settings.seed)))

    def advance(self, engine: Engine) -> list[Trajectory]:
        """Take results of tools, advance the engine once, and give the samples that ended."""
        known, self._known = self._known, []
        busy = engine.has_work or self._finished or known
        for job, answer in [*known, *self._tools.done(0.0 if busy else PATIENCE)]:
            self._answered(engine, job, answer)
        if engine.has_work:
            for sequence in engine.step():
                self._advanced(engine, self._live[id(sequence)])
        finished, self._finished = self._finished, []
        return finished

    def abort(self, engine: Engine) -> list[Trajectory]:
        """End all samples as they are. What their tools still answer is dropped."""
        for live in sorted(self._open, key=lambda live: live.sample.sample):
            self._finish(engine, live, "aborted")
        finished, self._finished = self._finished, []
        return finished

    # --------------------------------------------------------------------- the beginning

    def _environment_of(self, columns: Mapping[str, Any]) -> int | None:
        """The environment of a row: the only one, or the one that its column names."""
        named = columns.get("environment")
        if named is None:
            if len(self._environments) > 1:
                raise ValueError(
                    "config.rollout.environment has several: each row needs a column 'environment'"
                )
            return next(iter(self._environments.values()), None)
        if named not in self._environments:
            near = nearest(str(named), self._environments)
            raise ValueError(
                f"a row has the environment {named!r}{near}; config.rollout.environment has: "
                f"{', '.join(self._environments) or 'none'}"
            )
        return self._environments[named]

    def _begin(self, engine: Engine, live: _Live, opening: Any) -> None:
        prompt, info = live.sample.prompt, live.info
        tools = self._all_tools(prompt, info)
        live.conversation = Conversation(
            self._tokenizer,
            self._style(prompt, tools, info),
            self._settings.budgets,
            tools,
            steps=info is not None and info.steps,
            stateful=info is not None,
            forks=self._settings.forks,
        )
        try:
            begun = live.conversation.start(prompt.messages or (), prompt.token_ids, opening)
        except ValueError as error:  # for example messages that the template refuses
            self._finish(engine, live, "failed", f"template: {error}")
            return
        most = self._settings.max_prompt_length
        if most and len(live.conversation.prompt) > most:
            why = f"prompt: it has {len(live.conversation.prompt)} tokens with tools and opening"
            self._finish(engine, live, "failed", f"{why}, more than {most}")
        elif isinstance(begun, End):
            self._finish(engine, live, begun.reason)
        else:
            key = (live.sample.step, live.sample.group, tuple(begun.ids))
            beginning = self._beginnings.get(key) or engine.beginning(begun.ids)
            live.beginning = beginning
            live.sequence = engine.add(
                begun.ids, limit=begun.limit, beginning=beginning, **live.sample.options
            )
            self._beginnings[key] = beginning
            self._live[id(live.sequence)] = live

    def _all_tools(self, prompt: "Prompt", info: EnvironmentInfo | None) -> dict[str, Schema]:
        """The tools of a row and of its environment."""
        own = {tool.name: tool.schema for tool in info.tools} if info else {}
        return self._tools_of(prompt.columns) | own

    def _tools_of(self, columns: Mapping[str, Any]) -> dict[str, Schema]:
        """The tools of a row: all, or those that its column names."""
        named = columns.get("tools")
        if named is None or not self._schemas:
            return dict(self._schemas)
        named = json.loads(named) if isinstance(named, str) else named
        names = [tool if isinstance(tool, str) else tool["function"]["name"] for tool in named]
        if unknown := [name for name in names if name not in self._schemas]:
            raise ValueError(
                f"a row has the tool {unknown[0]!r}{nearest(unknown[0], self._schemas)}; "
                f"config.rollout.tools has: {', '.join(self._schemas)}"
            )
        return {name: self._schemas[name] for name in names}

    def _style(
        self, prompt: "Prompt", tools: Mapping[str, Schema], info: EnvironmentInfo | None
    ) -> Style:
        """The style of a prompt: messages are a chat, a text is plain."""
        variables = prompt.columns.get("chat_template_kwargs")
        variables = json.loads(variables) if isinstance(variables, str) else variables
        is_text, stop = prompt.messages is None, info.stop if info else ()
        key = json.dumps([is_text, stop, list(tools), variables], sort_keys=True, default=str)
        if key not in self._styles:
            self._styles[key] = (
                PlainStyle(self._tokenizer, stop)
                if is_text
                else ChatStyle(self._tokenizer, list(tools.values()), variables)
            )
        return self._styles[key]

    # --------------------------------------------------------------------- turns

    def _advanced(self, engine: Engine, live: _Live) -> None:
        """A sequence got tokens, or ended its turn."""
        if live.sequence.status in ("queued", "running"):
            return
        assert live.conversation is not None
        held = len(live.conversation.prompt) + len(live.conversation.response)
        ids = live.sequence.tokens[held:]
        act = live.conversation.turn(ids, live.sequence.stop_reason)
        if isinstance(act, End):
            self._end(engine, live, act.reason)
        elif act.text is not None:
            self._submit(live, Say(act.text))
        elif act.calls:
            self._submit(live, Calls(act.calls))
        else:  # none of the calls can be run
            self._observe(engine, live, live.conversation.observe, ())

    def _observe(
        self, engine: Engine, live: _Live, observe: Callable[..., Append | End], value: Any
    ) -> None:
        """Let the conversation take an observation, and the sequence go on."""
        try:
            next_ = observe(value)
        except ValueError as error:  # for example a role that the template does not have
            self._finish(engine, live, "failed", f"template: {error}")
            return
        if isinstance(next_, End):
            self._end(engine, live, next_.reason)
        elif next_.ended is not None:
            self._fork(engine, live, next_, next_.ended)
        else:
            engine.append(live.sequence, next_.ids, limit=next_.limit)

    def _fork(self, engine: Engine, live: _Live, begun: Append, ended: Row) -> None:
        """Let a sample go on in a new row, with draws of its own."""
        engine.finish(live.sequence)
        del self._live[id(live.sequence)]
        live.rows.append(_recorded(ended, live.sequence))
        options = dict(live.sample.options)
        if "seed_key" in options:
            own = options["seed_key"], options["sample_id"]
            options["seed_key"], _ = draws_of(*own, len(live.rows), tuple(begun.ids))
        live.sequence = engine.add(
            begun.ids, limit=begun.limit, beginning=live.beginning, **options
        )
        self._live[id(live.sequence)] = live

    def _end(self, engine: Engine, live: _Live, reason: StopReason) -> None:
        """The sample has ended. An environment may still have its reward to give."""
        if live.info is not None and live.info.grades and reason not in UNGRADED:
            live.ending = reason
            self._submit(live, Grade())
        else:
            self._finish(engine, live, reason)

    # --------------------------------------------------------------------- tools

    def _submit(self, live: _Live, action: Action) -> None:
        number = len(action.calls) if isinstance(action, Calls) else 1
        is_async = live.info is not None and live.info.is_async
        if isinstance(action, Calls):
            is_async = is_async or any(name in self._async for name, _ in action.calls)
        live.since = live.since or time.perf_counter()
        job = Job(
            owner=live,
            action=action,
            limit=self._settings.tool_timeout_s * number,
            session=live.session,
            history=live.history,
            is_async=is_async,
            alone=live.alone,
        )
        # Tools alone have no state, so they need not be called for what is known.
        known = None if live.session else self._recorded(live, action)
        if known is not None:
            self._known.append((job, Answer(*known)))
        else:
            self._tools.submit(job)

    def _recorded(self, live: _Live, action: Action) -> tuple[Value] | None:
        sample = live.sample
        if self._observations is None or sample.step < 0:
            return None
        digest = digest_of(live.digest, action)
        return self._observations.get(sample.step, sample.sample, live.num_answers, digest)

    def _take(self, live: _Live, action: Action, value: Value) -> Value:
        """The answer that counts: the recorded one, else this one, which is recorded."""
        known = self._recorded(live, action)
        live.digest = digest_of(live.digest, action)
        if known is not None:
            live.differs |= known[0] != value
            value = known[0]
        elif self._observations is not None and (sample := live.sample).step >= 0:
            key = sample.step, sample.sample, live.num_answers
            self._observations.put(*key, live.digest, value)
        live.num_answers += 1
        return value

    def _new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def _answered(self, engine: Engine, job: Job, answer: Answer) -> None:
        live: _Live = job.owner
        assert job.action is not None
        if live not in self._open:
            return
        if answer.error is not None:
            self._failed(engine, live, job.action, answer.error)
            return
        seconds, live.since = time.perf_counter() - live.since, 0.0
        live.tool_s += seconds
        if live.conversation is not None and live.conversation.turns:
            live.conversation.waited(seconds)
        live.differs |= answer.differs
        value: Any = self._take(live, job.action, answer.value)
        if live.session:
            live.history.append((job.action, value))
        if isinstance(job.action, Reset):
            self._begin(engine, live, value)
            return
        if isinstance(job.action, Grade):
            assert live.ending is not None
            live.reward = value
            self._finish(engine, live, live.ending)
            return
        assert live.conversation is not None
        is_step = isinstance(job.action, Say)
        observe = live.conversation.observe_step if is_step else live.conversation.observe
        self._observe(engine, live, observe, value)

    def _failed(self, engine: Engine, live: _Live, action: Action, error: CallError) -> None:
        """Try again in a new environment, which repeats what was done; then the sample fails."""
        if not error.shared:
            if live.retries >= self._settings.max_retries:
                reason = "timeout" if error.kind == "timeout" else "failed"
                self._finish(engine, live, reason, f"{error.kind}: {error.message}")
                return
            live.retries += 1
            if live.session:
                self._end_session(live)
                live.session = self._new_session()
        live.alone |= error.kind == "crash"
        self._submit(live, action)

    def _end_session(self, live: _Live) -> None:
        if live.session:
            self._tools.submit(Job(owner=live, action=None, limit=0.0, session=live.session))

    # --------------------------------------------------------------------- the end

    def _finish(self, engine: Engine, live: _Live, reason: StopReason, failure: str = "") -> None:
        sequence, conversation, sample = live.sequence, live.conversation, live.sample
        self._end_session(live)
        self._open.remove(live)
        if sequence is not None:
            del self._live[id(sequence)]
            if sequence.status == "waiting":
                engine.finish(sequence)
            elif sequence.status != "ended":
                engine.abort(sequence)
        prompt = conversation.prompt if conversation else sample.prompt.token_ids
        last = Row(prompt=tuple(prompt), response=(), mask=(), turns=())
        if conversation is not None and sequence is not None:
            last = _last_row(conversation, sequence, reason)
        rows = [*live.rows, last] if last.turns else []
        is_measured = sample.sample < MEASURED and reason not in UNGRADED
        self._finished.append(
            Trajectory(
                id=id_of(sample),
                sample=sample.sample,
                group=sample.group,
                prompt_ids=tuple(last.prompt),
                response_ids=tuple(last.response),
                mask=tuple(last.mask),
                logprobs=tuple(last.logprobs),
                turns=tuple(last.turns),
                final_reward=live.reward,
                stop_reason=reason,
                failure=failure,
                num_retries=live.retries,
                differs=live.differs,
                messages=tuple(conversation.messages if conversation else ()),
                text=conversation.text if conversation else "",
                has_tools=bool(conversation and conversation.has_tools),
                num_branches=1 + len(live.rows) if self._settings.forks else 0,
                drift=conversation.drift() if conversation and is_measured else None,
                tool_s=live.tool_s,
                rows=tuple(rows[-self._settings.max_rows :]),
            )
        )


def _last_row(conversation: Conversation, sequence: Any, reason: StopReason) -> Row:
    """The row that ended last. A turn that was aborted counts as far as it was sampled."""
    cut = sequence.tokens[sequence.num_prompt + len(conversation.response) :]
    if reason != "aborted":
        assert not cut, "the engine has ids that the conversation has not"
    row = Row(
        prompt=tuple(conversation.prompt),
        response=conversation.response + cut,
        mask=conversation.mask + [1] * len(cut),
        turns=conversation.own_turns,
    )
    return _recorded(row, sequence)


def _recorded(row: Row, sequence: Any) -> Row:
    """The row with what the engine recorded of it."""
    return replace(row, logprobs=sequence.logprobs[sequence.num_prompt :], sequence=sequence)


def columns_of(sample: Sample, seed: int) -> dict[str, Any]:
    """What an environment or a program gets of a row. `seed` is the run's."""
    prompt = sample.prompt
    text: Any = prompt.text if prompt.messages is None else [*prompt.messages]
    return {
        "seed": _seed(seed, sample.step, "sample", sample.sample),
        "group_seed": _seed(seed, sample.step, "group", sample.group),
        **{name: value for name, value in prompt.columns.items() if name != "environment"},
        "prompt": text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
    }


def id_of(sample: Sample) -> str:
    """The name of a trajectory: step and sample."""
    return f"{sample.step}-{sample.sample}"


def _seed(seed: int, step: int, kind: str, number: int) -> int:
    """A seed below 2^31 that follows from the run's, the step and the number."""
    text = f"{seed}/{step}/{kind}/{number}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
