"""What requests and answers of a reward worker hold, as plain values.

The worker may have run code of a model. So the trainer checks every part of an answer before use.
"""

import math
from dataclasses import asdict, fields
from typing import Any

from jaxrl_llm.rewards.calling import (
    BatchCall,
    CallError,
    Graded,
    Reply,
    SampleCall,
    TrainerState,
    plain,
    printable,
)
from jaxrl_llm.rewards.loading import FunctionInfo
from jaxrl_llm.rewards.steps import ENDS, SCORES, Steps, read_steps
from jaxrl_llm.rewards.workers.wire import Malformed, pack_answer, pack_request

LONGEST = 8000  # characters of an error, which the worker has shortened already
KINDS = ("exception", "crash", "timeout", "bad return", "not run")


# ------------------------------------------------------------------------- requests


def pack_calls(head: list[Any], info: FunctionInfo, calls: Any) -> bytes:
    """A request with calls, of which the function's own fields are sent.

    Raises ValueError, which names the field, for a value that cannot be sent.
    """
    requests = [_of_call(info, call) for call in calls]
    try:
        return pack_request([*head, requests])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The reward function {info.path} cannot get {_culprit(requests)}: {error}. "
            "Let the data hold numbers, text, bytes, dates, lists or maps, or do not take it as a "
            "parameter."
        ) from None


def _of_call(info: FunctionInfo, call: BatchCall | SampleCall) -> list[Any]:
    own = info.arguments(call.fields)
    if isinstance(call, BatchCall):
        return [own, call.size, call.state.global_step, call.state.max_steps]
    return [own]


def _culprit(requests: list[list[Any]]) -> str:
    for request in requests:
        for name, value in request[0].items():
            try:
                pack_request(value)
            except (TypeError, ValueError, RecursionError):
                return f"{name!r}"
    return "its arguments"


def call_of(message: list[Any]) -> BatchCall | SampleCall:
    """The call of a request, in the worker."""
    if len(message) == 1:
        return SampleCall(fields=message[0])
    own, size, step, max_steps = message
    state = TrainerState(global_step=step, max_steps=max_steps)
    return BatchCall(fields=own, state=state, size=size)


# ------------------------------------------------------------------------- answers


def pack_replies(number: int, replies: list[Reply], maximum: int) -> bytes:
    """The answer to a request; errors in place of replies that are too long together."""
    message = pack_answer([number, [_of_reply(reply) for reply in replies]])
    if len(message) <= maximum:
        return message
    what = f"the answer has {len(message)} bytes; at most {maximum} are taken"
    error = Reply(error=CallError(kind="bad return", message=what, shared=len(replies) > 1))
    return pack_answer([number, [_of_reply(error)] * len(replies)])


def _of_reply(reply: Reply) -> list[Any]:
    graded = [[g.value, _of_error(g.error), g.extras, _of_steps(g.steps)] for g in reply.graded]
    return [graded, reply.metrics, _of_error(reply.error)]


def _of_steps(steps: Steps | None) -> dict[str, Any] | None:
    if steps is None:
        return None
    ends = next(name for name, unit in ENDS.items() if unit == steps.unit)
    return {SCORES: list(steps.scores), ends: list(steps.ends)}


def _of_error(error: CallError | None) -> list[Any] | None:
    return error and [error.kind, error.message, error.shared]


def replies_of(answer: Any, number: int, sizes: list[int]) -> list[Reply]:
    """The replies of an answer to request `number`, one a call of `sizes[i]` samples.

    Raises Malformed for anything else.
    """
    body = body_of(answer, number)
    rows = _list(body, len(sizes))
    return [_reply(row, size) for row, size in zip(rows, sizes, strict=True)]


def body_of(answer: Any, number: int) -> Any:
    """What an answer to request `number` holds. Raises Malformed for another request's."""
    given, body = _list(answer, 2)
    if type(given) is not int or given != number:
        raise Malformed("an answer that belongs to no request")
    return body


def _reply(row: Any, size: int) -> Reply:
    graded, metrics, error = _list(row, 3)
    if error is not None:
        return Reply(error=_error(error))
    pairs = [_list(pair, 2) for pair in _list(metrics)]
    return Reply(
        graded=tuple(_graded(one) for one in _list(graded, size)),
        metrics=tuple((_text(name), _number(value)) for name, value in pairs),
    )


def _graded(row: Any) -> Graded:
    value, error, extras, given = _list(row, 4)
    if value is not None:
        value = _number(value)
        if not math.isfinite(value):
            raise Malformed("a reward that is not finite")
    if not isinstance(extras, dict):
        raise Malformed("extras that are no map")
    error = None if error is None else _error(error)
    try:
        steps = None if given is None else read_steps(given)
    except (ValueError, TypeError):
        raise Malformed("rewards of steps that are none") from None
    return Graded(value=value, error=error, extras=plain(extras), steps=steps)


def _error(row: Any) -> CallError:
    kind, message, shared = _list(row, 3)
    if kind not in KINDS or not isinstance(shared, bool):
        raise Malformed("an error of no kind")
    return CallError(kind=kind, message=printable(_text(message), LONGEST), shared=shared)


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise Malformed("a list that is missing or has another length")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed("a number where text belongs")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise Malformed("text where a number belongs")
    return float(value)


# ------------------------------------------------------------------------- loading


def pack_info(number: int, info: FunctionInfo | str) -> bytes:
    """The answer to a request to load a function: what it takes, or why that failed."""
    return pack_answer([number, info if isinstance(info, str) else asdict(info)])


def info_of(answer: Any, number: int) -> FunctionInfo:
    """What a function takes. Raises ValueError with the worker's reason, and Malformed."""
    body = body_of(answer, number)
    if isinstance(body, str):
        raise ValueError(printable(body, LONGEST))
    if not isinstance(body, dict) or set(body) != {f.name for f in fields(FunctionInfo)}:
        raise Malformed("a description of a function with other keys")
    for name in ("parameters", "required", "settings"):
        body[name] = tuple(_text(entry) for entry in _list(body[name]))
    for name in ("is_async", "takes_columns", "isolated"):
        if not isinstance(body[name], bool):
            raise Malformed("a description of a function with wrong types")
    if body["kind"] not in ("batch", "sample"):
        raise Malformed("a function of no kind")
    return FunctionInfo(**{**body, "path": _text(body["path"]), "name": _text(body["name"])})
