"""A sample of several turns as the conversation that the page shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Keys that only samples of several turns have, among what the reward logged.
KEYS = ("trajectory", "stop_reason", "turns", "messages", "tool_s", "row_starts")
MOST_MESSAGES = 200


def conversation(extras: Mapping[str, Any], cut: Callable[[str], str]) -> dict[str, Any] | None:
    """The messages of a sample, each with its turn or its tokens; None for a single answer.

    `extras` comes from the trace, and `cut` shortens a text. The result's `spans` are the places of
    sampled tokens in the response. All its other tokens are observed: the loss leaves them out.
    """
    turns = extras.get("turns")
    if not isinstance(turns, list) or not isinstance(extras.get("messages"), list):
        return None
    by_message = {turn["message"]: number for number, turn in enumerate(turns)}
    first = min(by_message, default=None)
    messages: list[dict[str, Any]] = []
    number = -1  # turn before the message
    for index, message in enumerate(extras["messages"]):
        shown = _message(message, cut)
        if index in by_message:
            number = by_message[index]
            shown |= _turn(number, turns, shown["calls"])
            if starts := extras.get("row_starts"):
                place = turns[number]["start"]
                shown["row"] = 1 + sum(start <= place for start in starts)
        elif first is None or index < first:
            shown["kind"] = "prompt"
        else:
            shown |= {"kind": "observed"} | _observed(number, turns, messages[-1])
        messages.append(shown)
    return {
        "stop_reason": extras.get("stop_reason", ""),
        "tool_s": extras.get("tool_s", 0.0),
        "rewards": [turn["reward"] for turn in turns if turn["reward"] is not None],
        "spans": [[turn["start"], turn["end"]] for turn in turns],
        "messages": messages[:MOST_MESSAGES],
        "num_left_out": max(0, len(messages) - MOST_MESSAGES),
    }


def _message(message: Mapping[str, Any], cut: Callable[[str], str]) -> dict[str, Any]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return {
        "role": str(message.get("role", "")),
        "name": str(message.get("name") or ""),
        "text": cut(_text(message.get("content"))),
        "thinking": cut(_text(message.get("reasoning_content"))),
        "calls": [
            {"name": str(call.get("name", "")), "arguments": cut(_text(call.get("arguments")))}
            for call in calls
        ],
    }


def _text(content: Any) -> str:
    """A content as text; parts that are no text by their type."""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
        return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    return "" if content is None else str(content)


def _turn(
    number: int, turns: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the page says of a turn. A call has its status where it could not be run."""
    turn = turns[number]
    statuses = [*turn["calls"], *[""] * len(calls)]
    return {
        "kind": "sampled",
        "turn": number + 1,
        "tokens": turn["end"] - turn["start"],
        "reward": turn["reward"],
        "failed": turn["failed"],
        "calls": [
            {**call, "status": status} for call, status in zip(calls, statuses, strict=False)
        ],
    }


def _observed(
    number: int, turns: Sequence[Mapping[str, Any]], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Tokens and seconds of an observation, at its first message."""
    if before["kind"] == "observed" or number + 1 >= len(turns):
        return {}
    tokens = turns[number + 1]["start"] - turns[number]["end"]
    return {"tokens": tokens, "tool_s": turns[number]["tool_s"]}
