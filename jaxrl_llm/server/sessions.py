"""Conversations that a user's program leads over HTTP, as the token ids of a training sample.

Each sample has a session. Its requests are turns of branches: a request whose messages begin with
what the session recorded goes on behind the ids that were sampled. Any other one begins a branch.

Guarantees: ids that were sampled are never encoded again. A request that comes again adds no turn.

The event loop owns sessions and branches. The trainer's thread owns the sequences of the engine.
"""

# Packages of the extra `serve`.
# pyright: reportMissingImports=false

import asyncio
import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.routing import Route

from jaxrl_llm.agents.call_formats import Call
from jaxrl_llm.agents.conversation import Budgets
from jaxrl_llm.agents.driver import Sample
from jaxrl_llm.agents.rows import draws_of
from jaxrl_llm.agents.styles import ChatStyle, Message
from jaxrl_llm.agents.tools import Result, checked
from jaxrl_llm.agents.trajectory import StopReason, Turn
from jaxrl_llm.generation.sequence import Sampling
from jaxrl_llm.generation.sequence import Sequence as Sampled
from jaxrl_llm.server.app import Application, GiveBack, is_retry
from jaxrl_llm.server.jobs import Choice, Job
from jaxrl_llm.server.protocol import ApiError, Asked, Row, encoded, read_chat, values_of
from jaxrl_llm.server.responses import ResponseAnswer, read_response
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.server.worker import Receiver, Running, Wanted, Worker
from jaxrl_llm.tokenizer import Tokenizer

MODEL = "policy"  # name of the model; requests may give any
# Parameters that the run sets: a request may repeat them.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
REFUSED = ("stop_token_ids", "seed")  # parameters of which the trainer knows nothing


@dataclass(eq=False)
class Branch:
    """A sequence of turns, each behind the one before."""

    prompt: tuple[int, ...]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    text: str = ""  # last turn
    last: int = 0  # number of its last own turn in the session; 0: none yet
    style: ChatStyle | None = None  # style of its turns
    thoughts: dict[int, str] = field(default_factory=dict)  # thinking by the place of its message
    has_tools: bool = False
    cut: StopReason | None = None  # limit that cut the last turn
    is_open: bool = False  # a request waits for its next turn
    sequence: Sampled | None = None  # its ids in the engine; set by the trainer's thread
    source: Sampled | None = None  # sequence of the branch in which it begins

    @property
    def ids(self) -> list[int]:
        """All ids."""
        return [*self.prompt, *self.response]


@dataclass(frozen=True)
class _Place:
    """A place behind a turn, from which a request may go on."""

    branch: Branch
    number: int  # turns up to here
    calls: Mapping[str, Call]  # calls of the turn by the ids that the client has
    cut: StopReason | None
    ends: bool  # the cut is a limit of the run


@dataclass(eq=False)
class Session:
    """The requests of one sample."""

    name: str  # also its API key
    sample: Sample
    place: Any  # where the engine puts its sequences
    branches: list[Branch] = field(default_factory=list)
    places: dict[Any, _Place] = field(default_factory=dict)
    jobs: dict[bytes, list[Job]] = field(default_factory=dict)  # by request
    begun: Counter[tuple[int, ...]] = field(default_factory=Counter)  # branches by their first ids
    num_turns: int = 0
    num_recorded: int = 0  # turns among them that have ended
    ended: StopReason | None = None  # limit that a request met
    closed: bool = False
    running: set[Branch] = field(
        default_factory=set
    )  # branches that are sampled; kept by the trainer's thread

    def kept(self, most: int) -> list[Branch]:
        """The branches that are trained, in the order of their last turns.

        These are the last ones that got a turn, among branches of several turns where there are
        enough.
        """
        begun = [branch for branch in self.branches if branch.last]
        chosen = sorted(begun, key=lambda branch: (len(branch.turns) > 1, branch.last))[-most:]
        return sorted(chosen, key=lambda branch: branch.last)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A turn that is asked for."""

    branch: Branch
    style: ChatStyle
    suffix: tuple[int, ...]  # ids before the sampled ones, the prompt of a new branch left out
    limit: int  # most tokens that the run allows
    cut: StopReason  # reason if that limit cuts it
    key: Any  # stands for tools and variables
    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class _WantedTurn(Wanted):
    session: Session
    branch: Branch


class SessionWorker(Worker):
    """Lets the trainer's thread drive the engine: it calls `work`."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.started = threading.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over to this loop."""
        self._loop = loop
        self.started.set()

    def close(self) -> None:
        """Nothing runs here."""

    def work(self, wait_s: float) -> None:
        """Carry out the orders and one step; wait for an order where there is nothing to do."""
        self._work(wait_s)

    def run(self, call: Callable[..., Any], *values: Any) -> Any:
        """Call a function in the event loop, and wait for its result."""

        async def work() -> Any:
            return call(*values)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def release(self, session: Session) -> None:
        """Free the sequences of a session that is closed."""
        for branch in session.branches:
            sequence = branch.sequence
            running = None if sequence is None else self._by_sequence.pop(sequence, None)
            if running is not None:
                del self._running[running.receiver]
            if sequence is not None and sequence.status != "ended":
                end = self._engine.finish if sequence.status == "waiting" else self._engine.abort
                end(sequence)

    def _step(self) -> Sequence[Sampled]:
        return self._engine.step()

    def _begin(self, wanted: Wanted) -> Sampled:
        """Go on behind a turn where the engine holds it, else begin with all ids.

        A session whose sequence waits has no open request. So no sequence that holds memory waits
        for another one of its session.
        """
        assert isinstance(wanted, _WantedTurn)
        session, branch, before = wanted.session, wanted.branch, wanted.branch.sequence
        if session.closed:
            raise ValueError("the sample has ended")
        for other in [*session.branches]:
            if other is not branch and other.sequence and other.sequence.status == "waiting":
                self._engine.finish(other.sequence)
        session.running.add(branch)
        if before is not None and before.status == "waiting":
            held = len(before.tokens)
            if before.tokens == [*wanted.prompt[:held]]:
                self._engine.append(before, wanted.prompt[held:], limit=wanted.limit)
                return before
            self._engine.finish(before)  # it has ids behind a stop text
        engine: Any = self._engine
        branch.sequence = sequence = engine.add(
            wanted.prompt,
            beginning=session.place,
            limit=wanted.limit,
            seed_key=wanted.seed_key,
            sample_id=wanted.sample_id,
        )
        before = before or branch.source
        if before is not None:
            held = len(branch.prompt) + len(branch.response)
            sequence.kept |= {place: ids for place, ids in before.kept.items() if place < held}
        return sequence

    def _abort(self, receiver: Receiver) -> None:
        running = self._running.get(receiver)
        if running is not None:
            wanted = running.wanted
            assert isinstance(wanted, _WantedTurn)
            wanted.session.running.discard(wanted.branch)
        super()._abort(receiver)

    def _ended(self, running: Running) -> None:
        wanted = running.wanted
        assert isinstance(wanted, _WantedTurn)
        wanted.session.running.discard(wanted.branch)
        if wanted.session.running:
            self._engine.finish(running.sequence)


class SessionApplication(Application):
    """The endpoints of the sessions of a batch: by path, /s/SESSION/v1, or by the API key."""

    def __init__(
        self, worker: SessionWorker, tokenizer: Tokenizer, budgets: Budgets, most_prompt: int,
        sampling: Sampling, settings: ServerSettings, *, forks: bool = False,
    ) -> None:  # fmt: skip
        """`forks`: a branch begins where the chat template drops thinking."""
        super().__init__(worker, tokenizer, MODEL, budgets.max_context, settings)
        self._budgets, self._most_prompt, self._sampling = budgets, most_prompt, sampling
        self._forks = forks
        self._sessions: dict[str, Session] = {}
        self._styles: dict[str, ChatStyle] = {}

    def open(self, sample: Sample, place: Any) -> Session:
        """A new session."""
        session = Session(secrets.token_hex(16), sample, place)
        self._sessions[session.name] = session
        return session

    def end(self, session: Session) -> None:
        """Close a session: no turn is added any more. Call it in the event loop."""
        session.closed = True
        del self._sessions[session.name]
        for jobs in session.jobs.values():
            for choice in (choice for job in jobs for choice in job.choices if not choice.ended):
                self._worker.abort(choice)
                choice.fail(RuntimeError("the sample has ended"))

    def _routes(self) -> list[Route]:
        return [
            route
            for begin in ("", "/s/{session}")
            for route in (
                self._route(
                    f"{begin}/v1/chat/completions", partial(self._answer, read_chat), "POST"
                ),
                self._route(
                    f"{begin}/v1/responses",
                    partial(self._answer, read_response, form=ResponseAnswer),
                    "POST",
                ),
                self._route(f"{begin}/v1/models", self._models),
            )
        ]

    def _check_key(self, request: Request) -> None:
        self._session(request)

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(request.path_params.get("session", key))
        if session is None:
            raise ApiError(401, "there is no such session, or its sample has ended")
        return session

    async def _job(
        self, read: Callable[..., Asked], request: Request, raw: bytes
    ) -> tuple[Job, GiveBack]:
        """The job of a request, in its session; the same one if the request comes again."""
        session = self._session(request)
        known = session.jobs.setdefault(raw, [])
        lost = [job for job in known if not job.delivered and not job.users]
        job = (lost or known)[-1] if lost or known and is_retry(request) else None
        if job is not None and any(choice.error for choice in job.choices):
            job = None
        if job is None:
            job = self._begin(session, read, raw)
            known.append(job)
        job.users += 1

        def give_back(delivered: bool) -> None:
            job.users -= 1
            job.delivered |= delivered

        return job, give_back

    # --------------------------------------------------------------------- a turn

    def _begin(self, session: Session, read: Callable[..., Asked], raw: bytes) -> Job:
        """Begin a turn. ApiError 400 for what the run does not allow."""
        values = values_of(raw)
        self._check(values)
        turns: list[_Turn] = []

        def encode(row: Row) -> list[int]:
            turns.append(self._turn(session, row))
            return [*turns[-1].branch.ids, *turns[-1].suffix]

        asked = read(raw, self._tokenizer, name=None, context=self._context, encode=encode)
        if asked.n != 1:
            raise ApiError(400, "body.n: a training sample has one answer a request")
        (turn,) = turns
        branch, ids = turn.branch, asked.prompts[0]
        asked = replace(asked, limit=min(asked.limit, turn.limit))
        if branch not in session.branches:
            session.branches.append(branch)
        branch.is_open = True
        session.num_turns += 1
        key, number = self._key(session, ids)
        job = Job(asked, 0)
        job.id, job.parser = number, turn.style.parser
        choice = Choice(asked, self._tokenizer, partial(self._note, session, job, turn))
        job.choices = [choice]
        options = session.sample.options
        wanted = _WantedTurn(
            prompt=ids,
            limit=asked.limit,
            seed_key=key,
            sample_id=options["sample_id"],
            sampling=self._sampling,
            session=session,
            branch=branch,
        )
        self._worker.add(wanted, choice)
        return job

    def _check(self, values: Mapping[str, Any]) -> None:
        """ApiError for sampling that is not the run's: its log-probs would not be the trainer's."""
        for name in SAMPLING:
            own, asked = getattr(self._sampling, name), values.get(name)
            if asked is not None and asked != own:
                raise ApiError(
                    400, f"body.{name}={asked!r}: the run samples with {own}; leave it out"
                )
        for name in REFUSED:
            if values.get(name) not in (None, [], ""):
                raise ApiError(400, f"body.{name} is not supported in training: leave it out")

    def _key(self, session: Session, ids: tuple[int, ...]) -> tuple[np.ndarray, str]:
        """The key of the draws behind these ids, and a name for the turn; see `draws_of`.

        The row's own prompt has the key that it has without a program.
        """
        count, sample = session.begun[ids], session.sample
        session.begun[ids] += 1
        own = np.asarray(sample.options["seed_key"], np.uint32)
        key, name = draws_of(own, sample.options["sample_id"], count, ids)
        return (own if not count and ids == tuple(sample.prompt.token_ids) else key), name

    def _turn(self, session: Session, row: Row) -> _Turn:
        """Where a request goes on, and the limit of its turn."""
        messages = list(row["prompt"])
        tools, variables = row["tools"] or [], row["chat_template_kwargs"]
        key = json.dumps([tools, variables], sort_keys=True)
        try:
            if key not in self._styles:
                self._styles[key] = ChatStyle(self._tokenizer, tools, variables)
            style = self._styles[key]
            keys = _keys(messages)
            said = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            last = said[-1] + 1 if said else 0
            place = session.places.get((key, keys[:last])) if last < len(messages) else None
            if place is None:
                branch, suffix = self._new_branch(session, style, row), ()
            else:
                self._end_at(session, place.cut if place.ends else None)
                prompt = self._without_thinking(style, place.branch, messages)
                branch = _branch_at(place) if prompt is None else Branch(tuple(prompt))
                suffix = ()
                if prompt is None:
                    new, stop = messages[last:], branch.response[-1]
                    suffix = tuple(_suffix(style, place.calls, new, stop))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else repr(error)
            raise ApiError(400, f"body.messages: {reason}") from None
        budgets, response = self._budgets, len(branch.response) + len(suffix)
        if budgets.max_turns and session.num_turns >= budgets.max_turns:
            self._end_at(session, "max_turns")
        limits: list[tuple[int, StopReason]] = [
            (budgets.max_response_length - response, "max_tokens"),
            (budgets.max_context - len(branch.prompt) - response, "context_overflow"),
        ]
        if budgets.max_turn_tokens:
            limits.append((budgets.max_turn_tokens, "max_turn_tokens"))
        limit, cut = min(limits, key=lambda x: x[0])
        if limit < 1:
            self._end_at(session, "context_overflow")
        self._end_at(session, session.ended)
        return _Turn(
            branch=branch, style=style, suffix=suffix, limit=limit, cut=cut,
            key=(key, {tool["function"]["name"]: tool for tool in tools}), messages=messages,
        )  # fmt: skip

    def _new_branch(self, session: Session, style: ChatStyle, row: Row) -> Branch:
        messages = list(row["prompt"])
        if row["tools"]:
            ids = tuple(style.prompt(messages, (), None)[0])
        else:
            ids = encoded(row, self._tokenizer, "messages")
        if len(ids) > self._most_prompt:
            if session.num_recorded:
                self._end_at(session, "context_overflow")
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and the run takes {self._most_prompt}: see "
                "config.data.max_prompt_length",
                code="context_length_exceeded",
            )
        return Branch(ids)

    def _without_thinking(
        self, style: ChatStyle, branch: Branch, messages: Sequence[Message]
    ) -> list[int] | None:
        """The prompt of a branch that begins where the template drops thinking, else None."""
        if not self._forks:
            return None
        thoughts = {i: {"reasoning_content": thought} for i, thought in branch.thoughts.items()}
        said = [message | thoughts.get(i, {}) for i, message in enumerate(messages)]
        return style.without_thinking(said, branch.turns[0].message)

    def _end_at(self, session: Session, reason: StopReason | None) -> None:
        """End a sample at a limit of the run."""
        if reason is not None:
            session.ended = reason
            raise ApiError(400, f"the sample ends: {reason}", code="context_length_exceeded")

    def _note(self, session: Session, job: Job, turn: _Turn, choice: Choice) -> None:
        """A choice got tokens, or ended. Then it is recorded before the client has it."""
        if choice.ended and choice.error is None and not session.closed:
            self._record(session, job, turn, choice)
        if choice.ended:
            self._worker.abort(choice)  # a stop string ends it here, and not in the engine
            turn.branch.is_open = False
        job.note_change()

    def _record(self, session: Session, job: Job, turn: _Turn, choice: Choice) -> None:
        branch, number = turn.branch, len(choice.tokens)
        key, tools = turn.key
        parser, ids = turn.style.parser, job.asked.prompts[0]
        parsed = parser.parse(choice.tokens, thinking=parser.opens_thinking(ids))
        message = self._answer_of(job).whole()["choices"][0]["message"]
        branch.response += [*turn.suffix, *choice.tokens]
        branch.mask += [0] * len(turn.suffix) + [1] * number
        branch.logprobs += [0.0] * len(turn.suffix) + choice.logprobs
        end = len(branch.response)
        calls = tuple(checked(call, tools) for call in parsed.calls) if tools else ()
        place = len(turn.messages)
        branch.turns.append(Turn(start=end - number, end=end, message=place, calls=calls))
        branch.text = parsed.content if calls else parsed.text
        branch.thoughts[place] = parsed.thinking
        branch.messages, branch.style = [*turn.messages, message], turn.style
        branch.has_tools |= bool(tools)
        ends = False
        branch.cut = None
        if choice.finish_reason == "length":
            ends = number >= turn.limit
            branch.cut = turn.cut if ends else "max_turn_tokens"
        given = [call["id"] for call in message.get("tool_calls") or ()]
        session.places[key, _keys(branch.messages)] = _Place(
            branch,
            len(branch.turns),
            dict(zip(given, parsed.calls, strict=True)) if given else {},
            branch.cut,
            ends,
        )
        session.num_recorded += 1
        branch.last = session.num_recorded


def _branch_at(place: _Place) -> Branch:
    """The branch that goes on from here: the same one at its end, else a new one."""
    branch = place.branch
    if place.number == len(branch.turns) and not branch.is_open:
        return branch
    end = branch.turns[place.number - 1].end
    return Branch(
        prompt=branch.prompt,
        response=branch.response[:end],
        mask=branch.mask[:end],
        logprobs=branch.logprobs[:end],
        turns=branch.turns[: place.number],
        thoughts=dict(branch.thoughts),
        source=branch.sequence or branch.source,
    )


def _suffix(
    style: ChatStyle, calls: Mapping[str, Call], new: Sequence[Message], stop: int
) -> list[int]:
    """Ids between a turn and the next. ValueError for a result of an unknown call."""
    results = [message for message in new if message["role"] == "tool"]
    others = [{"role": m["role"], "content": _text(m)} for m in new[len(results) :]]
    if not results:
        return style.observation(others, stop)[0]
    if any(message["role"] != "tool" for message in new[: len(results)]):
        raise ValueError("results of calls must follow the calls")
    for message in results:
        if message.get("tool_call_id") not in calls:
            raise ValueError("tool_call_id is none of the calls of the answer before")
    asked = [calls[message["tool_call_id"]] for message in results]
    return style.results(asked, [Result(_text(m)) for m in results], stop, others)[0]


def _keys(messages: Sequence[Message]) -> tuple[Any, ...]:
    """What must be equal in a request that goes on: roles, texts, calls, and ids of calls."""
    return tuple(map(_key_of, messages))


def _key_of(message: Message) -> Any:
    role, text = message["role"], _text(message)
    calls = tuple(
        (call["function"]["name"], str(call["function"]["arguments"]), call.get("id"))
        for call in message.get("tool_calls") or ()
    )
    # Clients strip answers.
    return role, text.strip() if role == "assistant" else text, calls, message.get("tool_call_id")


def _text(message: Message) -> str:
    """The text of a message. ValueError for an image or the like."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type", "text") != "text" for part in content):
        raise ValueError("only texts are supported")
    return "".join(part["text"] for part in content)
