"""Rows to records. The format of a row, verl's or one of TRL's, follows from its filled columns.

| format | columns | serves |
|---|---|---|
| verl | prompt, reward_model {ground_truth} | prompts |
| prompt | prompt | prompts |
| prompt_completion | prompt, completion | prompts, examples |
| unpaired_preference | prompt, completion, label (true or false) | prompts, unpaired |
| rated | prompt, completion, rating (a number) | prompts, ratings |
| stepwise | prompt, completions (steps), labels (true or false each) | prompts, ratings, unpaired |
| preference | prompt, chosen, rejected | prompts, preferences, unpaired |
| implicit_preference | chosen, rejected, with a common beginning | preferences, unpaired |
| messages | messages | examples |
| text | text | examples |

prompt, completion, chosen and rejected are strings or lists of messages. Every function here raises
ValueError with the reason why a row is set aside.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.sources import parse_json
from jaxrl_llm.tokenizer import Message, Tokenizer
from jaxrl_llm.types import Prompt

SERVES = {
    "verl": ("prompts",),
    "prompt": ("prompts",),
    "prompt_completion": ("prompts", "examples"),
    "unpaired_preference": ("prompts", "unpaired"),
    "rated": ("prompts", "ratings"),
    "stepwise": ("prompts", "ratings", "unpaired"),
    "preference": ("prompts", "preferences", "unpaired"),
    "implicit_preference": ("preferences", "unpaired"),
    "messages": ("examples",),
    "text": ("examples",),
}
COLUMNS = {
    "verl": ("prompt", "reward_model"),
    "prompt": ("prompt",),
    "prompt_completion": ("prompt", "completion"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "rated": ("prompt", "completion", "rating"),
    "stepwise": ("prompt", "completions", "labels"),
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "text": ("text",),
}
# The columns of all formats that a model sees or learns from.
CONTENT = tuple(dict.fromkeys(name for names in COLUMNS.values() for name in names))
# All that a row of supervised or preference training is made of. Prompts keep every column.
TRAINED_COLUMNS = (*CONTENT, "tools", "data_source", "margin")
TRUNCATIONS = ("error", "left", "right", "middle")
STEP_SEPARATOR = "\n"  # between the steps of a stepwise row, as in TRL
# What limits the length of a row. Completions count only in supervised and preference training.
LENGTH_KEYS = "config.data.max_prompt_length (or max_response_length, of rows with completions)"


@dataclass(frozen=True, kw_only=True)
class TokenExample:
    """A row for supervised training. `loss_mask[i]` is 1 where the loss counts token i."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    data_source: str = "default"
    row: int = 0

    @property
    def answer(self) -> Any:
        """Which tokens are learned."""
        return self.loss_mask


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two answers to one prompt. `chosen` was preferred, by `margin` (0 where it is not known)."""

    chosen: TokenExample
    rejected: TokenExample
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LabelledExample:
    """A completion with a label: 1 is good and 0 is bad, or a rating, which is any number."""

    completion: TokenExample
    label: float


class Overlong(ValueError):
    """A row is longer than its limit and must not be truncated. The row itself is not bad."""


def detect_format(row: Mapping[str, Any]) -> str | None:
    """The format whose columns this row fills, or None. A null column is not filled."""
    filled = {name for name, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= filled:
        return "preference" if "prompt" in filled else "implicit_preference"
    if {"prompt", "completions", "labels"} <= filled:
        return "stepwise"
    if {"prompt", "completion"} <= filled:
        if isinstance(row.get("label"), bool):
            return "unpaired_preference"
        return "rated" if _is_number(row.get("rating")) else "prompt_completion"
    if "prompt" in filled:
        return "verl" if _looks_like_object(row.get("reward_model")) else "prompt"
    return next((name for name in ("messages", "text") if name in filled), None)


def prompt_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> Prompt:
    """A prompt for RL. `data_source` is the default for rows that name none."""
    _require(row, kind)
    row = _with_parsed_reward_model(row)
    value = _text_or_messages(row["prompt"], "prompt")
    text, ids = _render_prompt(value, tokenizer, _tools(row))
    if not ids:
        raise ValueError("the prompt has no tokens")
    return Prompt(
        token_ids=tuple(ids),
        text=text,
        messages=None if isinstance(value, str) else tuple(value),
        data_source=_data_source(row, data_source),
        ground_truth=_ground_truth(row, kind),
        columns={name: column for name, column in row.items() if name != "prompt"},
        row=index,
    )


def example_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> TokenExample:
    """A row for supervised training. The loss is on the completion and its end token.

    For `messages` it is on the assistant's turns. For `text` it is on all but the first token.
    """
    _require(row, kind)
    if kind == "text":
        start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = start + _ended(tokenizer.encode(_text(row["text"], "text")), tokenizer)
        parts = [(ids[:1], 0), (ids[1:], 1)]
    elif kind == "messages":
        parts = _turns(_messages(row["messages"], "messages"), tokenizer, _tools(row))
    else:
        prompt = _text_or_messages(row["prompt"], "prompt")
        completion = _text_or_messages(row["completion"], "completion")
        parts = _prompt_and_completion(prompt, completion, tokenizer, _tools(row))
    return _example(parts, _data_source(row, data_source), index)


def pair_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> PreferencePair:
    """A preference pair. The loss masks cover the answers.

    The rejected answer may be empty: a model that ends at once gives such an answer.
    """
    _require(row, kind)
    chosen = _text_or_messages(row["chosen"], "chosen")
    rejected = _text_or_messages(row["rejected"], "rejected", answer_may_be_empty=True)
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    if kind == "preference":
        prompt = _text_or_messages(row["prompt"], "prompt")
    else:
        prompt, chosen, rejected = _split_common(chosen, rejected)
    name = _data_source(row, data_source)
    examples = [
        _example(_prompt_and_completion(prompt, answer, tokenizer, _tools(row)), name, index)
        for answer in (chosen, rejected)
    ]
    return PreferencePair(chosen=examples[0], rejected=examples[1], margin=_margin(row))


def unpaired_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> list[LabelledExample]:
    """Completions labelled 1 or 0: two for a pair, one for each step of a stepwise row."""
    named: dict[str, Any] = {"data_source": data_source, "index": index}
    if kind == "stepwise":
        return _steps(row, tokenizer, **named)
    if kind != "unpaired_preference":
        pair = pair_of(row, kind, tokenizer, **named)
        return [
            LabelledExample(completion=pair.chosen, label=1.0),
            LabelledExample(completion=pair.rejected, label=0.0),
        ]
    _require(row, kind)
    if not isinstance(row["label"], bool):
        raise ValueError(f"column 'label' holds {row['label']!r}, not true or false")
    # As in a pair, a bad completion may be empty: a model that ends at once gives such an answer.
    completion = _answer(row, tokenizer, **named, may_be_empty=not row["label"])
    return [LabelledExample(completion=completion, label=float(row["label"]))]


def rated_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> list[LabelledExample]:
    """Completions with their rating. The steps of a stepwise row are rated 1 or 0."""
    named: dict[str, Any] = {"data_source": data_source, "index": index}
    if kind == "stepwise":
        return _steps(row, tokenizer, **named)
    _require(row, kind)
    rating = _number(row["rating"], "rating")
    completion = _answer(row, tokenizer, **named, may_be_empty=True)
    return [LabelledExample(completion=completion, label=rating)]


def _answer(
    row: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    data_source: str,
    index: int,
    may_be_empty: bool,
) -> TokenExample:
    prompt = _text_or_messages(row["prompt"], "prompt")
    completion = _text_or_messages(
        row["completion"], "completion", answer_may_be_empty=may_be_empty
    )
    parts = _prompt_and_completion(prompt, completion, tokenizer, _tools(row))
    return _example(parts, _data_source(row, data_source), index)


def _steps(
    row: Mapping[str, Any], tokenizer: Tokenizer, *, data_source: str, index: int
) -> list[LabelledExample]:
    """Each step as a completion of the prompt and of the earlier steps, without an end token."""
    _require(row, "stepwise")
    prompt = _text(row["prompt"], "prompt")
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise ValueError("columns 'completions' and 'labels' are not two lists of one length")
    if not steps:
        raise ValueError("column 'completions' is empty")
    _, before = _render_prompt(prompt, tokenizer, None)
    examples = []
    for i, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if not isinstance(label, bool):
            raise ValueError(f"labels[{i}] holds {label!r}, not true or false")
        ids = tokenizer.encode(_text(step, f"completions[{i}]") + STEP_SEPARATOR)
        example = _example([(before, 0), (ids, 1)], _data_source(row, data_source), index)
        examples.append(LabelledExample(completion=example, label=float(label)))
        before = [*before, *ids]
    return examples


def kept_positions(length: int, limit: int, truncation: str) -> range | list[int]:
    """The positions of a row of `length` tokens that are kept: verl's four truncation modes.

    "left" drops the beginning, "right" the end, "middle" keeps both ends; "error" raises Overlong.
    """
    if length <= limit:
        return range(length)
    if truncation == "left":
        return range(length - limit, length)
    if truncation == "right":
        return range(limit)
    if truncation == "middle":
        head = limit // 2
        return [*range(head), *range(length - (limit - head), length)]
    raise Overlong(
        f"{length} tokens are more than the limit of {limit}: raise {LENGTH_KEYS}, set "
        "config.data.truncation to left, right or middle, or set "
        "config.data.filter_overlong_prompts=true"
    )


def _require(row: Mapping[str, Any], kind: str) -> None:
    for column in COLUMNS[kind]:
        if row.get(column) is None:
            state = "is null" if column in row else "is missing"
            raise ValueError(f"column {column!r} {state}")


def _text(value: Any, column: str, *, may_be_empty: bool = False) -> str:
    if isinstance(value, bytes):  # parquet files of older writers keep strings as binary
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"column {column!r} is not UTF-8: {error.reason}") from None
    if not isinstance(value, str):
        raise ValueError(
            f"column {column!r} holds {type(value).__name__}, not a string or a list of messages"
        )
    if not value.strip() and not may_be_empty:
        raise ValueError(f"column {column!r} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"column {column!r} holds half of a surrogate pair, not valid Unicode")
    return value


def _text_or_messages(
    value: Any, column: str, *, answer_may_be_empty: bool = False
) -> str | list[dict[str, Any]]:
    if isinstance(value, list | tuple):
        return _messages(value, column, answer_may_be_empty=answer_may_be_empty)
    return _text(value, column, may_be_empty=answer_may_be_empty)


def _messages(
    value: Any, column: str, *, answer_may_be_empty: bool = False
) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise ValueError(f"column {column!r} is empty")
    messages = []
    for i, message in enumerate(value):
        where = f"{column}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} holds {type(message).__name__}, not a message")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where} has no role")
        # Arrow adds a null for each key that only other messages have. Templates test for keys.
        message = {key: part for key, part in message.items() if part is not None}
        if "content" in message or "tool_calls" not in message:
            # An empty system message switches the template's default system message off.
            may_be_empty = message["role"] == "system" or "tool_calls" in message
            may_be_empty |= answer_may_be_empty and message["role"] == "assistant"
            message["content"] = _text(
                message.get("content"), f"{where}.content", may_be_empty=may_be_empty
            )
        messages.append(message)
    return messages


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The column `tools`: a list of JSON schemas, or that list as JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"column 'tools' holds {type(tools).__name__}, not a list")
    return tools


def _render_prompt(
    value: str | list[dict[str, Any]], tokenizer: Tokenizer, tools: Sequence[Any] | None
) -> tuple[str, list[int]]:
    """The text that the model continues, and its token ids."""
    if isinstance(value, str):
        start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return value, start + tokenizer.encode(value)
    unfinished = value[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        value,
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        tools=tools,
    )
    return text, tokenizer.encode(text)


def _prompt_and_completion(
    prompt: str | list[dict[str, Any]],
    completion: str | list[dict[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Any] | None,
) -> list[tuple[list[int], int]]:
    """(ids, loss mask) of the prompt, tokenised as for RL, then of the completion."""
    text, ids = _render_prompt(prompt, tokenizer, tools)
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ValueError("the prompt is a string and its completion a list of messages")
        return [(ids, 0), (_ended(tokenizer.encode(completion), tokenizer), 1)]
    answer: list[Message] = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else list(completion)
    )
    whole = tokenizer.apply_chat_template(
        [*prompt, *answer], add_generation_prompt=False, tools=tools
    )
    rest = _after(whole, text)
    return [(ids, 0), (_cut_at_end(tokenizer.encode(rest), tokenizer), 1)]


def _turns(
    messages: list[dict[str, Any]], tokenizer: Tokenizer, tools: Sequence[Any] | None
) -> list[tuple[list[int], int]]:
    """(ids, loss mask) of each part of a conversation. The mask is 1 on the assistant's turns."""
    parts: list[tuple[list[int], int]] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], tools=tools)
        after = tokenizer.apply_chat_template(
            messages[: i + 1], add_generation_prompt=False, tools=tools
        )
        parts.append((tokenizer.encode(_after(before, done)), 0))
        turn = tokenizer.encode(_after(after, before))
        ended = _cut_at_end(turn, tokenizer)
        parts.extend([(ended, 1), (turn[len(ended) :], 0)])
        done = after
    if not parts:
        raise ValueError("column 'messages' has no assistant turn to learn from")
    return parts


def _after(whole: str, start: str) -> str:
    if not whole.startswith(start):
        raise ValueError(
            "the chat template rewrites earlier turns when a turn is added, so the completion's "
            "tokens cannot be separated: give prompt and completion, with one assistant turn"
        )
    return whole[len(start) :]


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids followed by an end token."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.eos_id]


def _cut_at_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a rendered turn up to its last end token, which is added if it is missing.

    Templates write a newline after the end token, where generation has already stopped.
    """
    ends = [i for i, token in enumerate(ids) if token in tokenizer.stop_ids]
    return ids[: ends[-1] + 1] if ends else [*ids, tokenizer.eos_id]


def _example(parts: list[tuple[list[int], int]], data_source: str, index: int) -> TokenExample:
    return TokenExample(
        token_ids=tuple(i for ids, _ in parts for i in ids),
        loss_mask=tuple(mask for ids, mask in parts for _ in ids),
        data_source=data_source,
        row=index,
    )


def _split_common(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The common beginning of two texts or conversations, and the rest of each."""
    if type(chosen) is not type(rejected):
        raise ValueError("chosen and rejected are not both strings or both lists of messages")
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1  # a space belongs to the word after it, as in TRL
    parts = chosen[:shared], chosen[shared:], rejected[shared:]
    for name, part in zip(("common beginning", "chosen", "rejected"), parts, strict=True):
        if not part:
            raise ValueError(f"no prompt can be split off: {name} is empty")
    return parts


def _looks_like_object(value: Any) -> bool:
    """Whether a column holds an object, or text that begins like a JSON object."""
    if isinstance(value, bytes):
        return value.lstrip().startswith(b"{")
    return isinstance(value, dict) or isinstance(value, str) and value.lstrip().startswith("{")


def _with_parsed_reward_model(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its `reward_model` as an object: some writers store it as JSON text."""
    value = row.get("reward_model")
    if isinstance(value, dict) or not _looks_like_object(value):
        return row
    return {**row, "reward_model": _json_text(_text(value, "reward_model"), "reward_model")}


def _json_text(text: str, column: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {column!r} is not JSON: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def _ground_truth(row: Mapping[str, Any], kind: str) -> Any:
    """verl's reward_model.ground_truth, else the column ground_truth, answer or solution."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return _finite(reward_model["ground_truth"], "reward_model.ground_truth")
    if kind == "verl":
        raise ValueError("column 'reward_model' has no ground_truth")
    names = ("ground_truth", "answer", "solution")
    return next((_finite(row[name], name) for name in names if row.get(name) is not None), None)


def _finite(value: Any, column: str) -> Any:
    """`value`, if no number in it is NaN or infinite: no answer is equal to such a number.

    Text of older parquet files, which is stored as binary, becomes text.
    """
    if isinstance(value, bytes):
        return _text(value, column, may_be_empty=True)
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for part in parts:
            _finite(part, column)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"column {column!r} holds {value}, which is not a right answer")
    return value


def _data_source(row: Mapping[str, Any], default: str) -> str:
    value = row.get("data_source")
    return default if value is None else _text(value, "data_source")


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get("margin")
    return 0.0 if value is None else _number(value, "margin")


def _number(value: Any, column: str) -> float:
    if not _is_number(value):
        raise ValueError(f"column {column!r} holds {value!r}, not a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    """Whether `value` is a finite number. True and false do not count as numbers."""
    return not isinstance(value, bool) and isinstance(value, int | float) and value - value == 0
