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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.data.sources import parse_json
from jaxrl_llm.images import MARK, Grid, ImageInput, images_of, with_image_parts
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.turns import Piece, Turns
from jaxrl_llm.types import Prompt

SERVES = {
    "preference": ("prompts", "preferences", "unpaired"),
    "implicit_preference": ("preferences", "unpaired"),
    "stepwise": ("prompts", "ratings", "unpaired"),
    "unpaired_preference": ("prompts", "unpaired"),
    "rated": ("prompts", "ratings"),
    "prompt_completion": ("prompts", "examples"),
    "verl": ("prompts",),
    "prompt": ("prompts",),
    "messages": ("examples",),
    "text": ("examples",),
}
COLUMNS = {
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_preference": ("chosen", "rejected"),
    "stepwise": ("prompt", "completions", "labels"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "rated": ("prompt", "completion", "rating"),
    "prompt_completion": ("prompt", "completion"),
    "verl": ("prompt", "reward_model"),
    "prompt": ("prompt",),
    "messages": ("messages",),
    "text": ("text",),
}
IMAGES = ("images", "image")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# All that a row of supervised or preference training is made of. Prompts keep every column.
TRAINED_COLUMNS = (
    *dict.fromkeys(name for names in COLUMNS.values() for name in names),
    *("tools", "chat_template_kwargs", "enable_thinking", "system", *MEDIA),
    *("data_source", "margin"),
)
PARTS = ("image", "image_url")  # types of content parts that hold an image
STEP_SEPARATOR = "\n"  # text between the steps of a stepwise row, as in TRL
# Keys of a message that leave its turn out of the loss where they are 0 or false.
LEARNED_KEYS = ("weight", "train", "loss_mask")
# Roles in ShareGPT's form of a message, {from, value}.
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# Keys that limit a row. Completions count only in supervised and preference training.
LENGTH_KEYS = "config.data.max_prompt_length (or max_response_length, of rows with completions)"


@dataclass(frozen=True, kw_only=True)
class TokenExample:
    """A row for supervised training. `loss_mask[i]` is 1 where the loss counts token i."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    data_source: str = "default"
    row: int = 0
    images: tuple[Any, ...] = ()  # as the row has them: see images.py

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


def detect_format(row: Mapping[str, Any], purpose: str) -> str | None:
    """The format whose columns this row fills, or None. A null column is not filled.

    Of several formats it is the first that serves the purpose: a row with a prompt and messages
    gives prompts by the one and examples by the other.
    """
    filled = {name for name, value in row.items() if value is not None}
    fitting = [
        kind
        for kind, columns in COLUMNS.items()
        if filled.issuperset(columns) and _has_types(row, kind, purpose)
    ]
    serving = [kind for kind in fitting if purpose in SERVES[kind]]
    return next(iter(serving or fitting), None)


def _has_types(row: Mapping[str, Any], kind: str, purpose: str) -> bool:
    """True if the values tell a format from another with the same columns."""
    label, rating = row.get("label"), row.get("rating")
    judged = isinstance(label, bool) or purpose == "unpaired" and label in (0, 1)
    if kind == "unpaired_preference":
        return judged
    if kind == "rated":
        return _is_number(rating) and not judged
    if kind == "prompt_completion":
        return not judged and not _is_number(rating)
    return kind != "verl" or _looks_like_object(row["reward_model"])


def prompt_of(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, data_source: str, index: int
) -> Prompt:
    """A prompt for RL. `data_source` is the default for rows that name none."""
    _require(row, kind, tokenizer)
    row = _with_parsed_reward_model(row)
    value, _ = _text_or_messages(row["prompt"], "prompt")
    seen, images = images_of(tokenizer), row_images(row)
    if isinstance(value, str):
        _refuse_tools(row)
        text, ids = value, _with_bos(tokenizer.encode(value), tokenizer)
    else:
        asked = value if seen is None else with_image_parts(value, len(images))
        text = _turns(row, tokenizer).prompt(asked)
        ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if seen is not None:
        seen.check(ids, grids := seen.grids(images))
        ids = seen.expanded(ids, iter(grids))
    return Prompt(
        images=images,
        token_ids=tuple(ids),
        text=text,
        messages=None if isinstance(value, str) else tuple(value),
        data_source=_data_source(row, data_source),
        ground_truth=_ground_truth(row, kind),
        columns={name: column for name, column in row.items() if name != "prompt"},
        row=index,
    )


def examples_of(
    row: Mapping[str, Any],
    kind: str,
    tokenizer: Tokenizer,
    *,
    data_source: str,
    index: int,
    keep_thinking: bool = False,
) -> list[TokenExample]:
    """Rows of tokens for training. The loss is on the completion and its end token.

    For `messages` it is on the assistant's turns, and a template that rewrites earlier turns gives
    several rows. For `text` it is on all but the first token. A pair gives its two answers, and a
    stepwise row its steps.
    """
    rows = seen_pieces(row, kind, tokenizer, keep_thinking=keep_thinking)
    source, images = _data_source(row, data_source), row_images(row)
    return [replace(_example(pieces, source, index), images=images) for pieces in rows]


def seen_pieces(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, keep_thinking: bool = False
) -> list[list[Piece]]:
    """`learned_pieces` with all tokens of the images of the row."""
    seen, images = images_of(tokenizer), row_images(row)
    rows = learned_pieces(row, kind, tokenizer, keep_thinking=keep_thinking)
    if seen is not None:
        grids = seen.grids(images)
        for pieces in rows:
            seen.check([i for piece in pieces for i in piece.ids], grids)
            if any(piece.learned and seen.token_id in piece.ids for piece in pieces):
                raise ValueError("an answer has an image, and models are trained to write text")
        rows = [_with_images(pieces, seen, iter(grids)) for pieces in rows]
    return rows


def _with_images(pieces: Sequence[Piece], seen: ImageInput, grids: Iterator[Grid]) -> list[Piece]:
    """The pieces of a row with all tokens of its images."""
    return [replace(piece, ids=seen.expanded(piece.ids, grids)) for piece in pieces]


def pairs_of(
    row: Mapping[str, Any], kind: str, examples: Sequence[TokenExample]
) -> list[PreferencePair]:
    """The preference pair of a row, from its `examples_of`.

    The rejected answer may be empty: a model that ends at once gives such an answer.
    """
    chosen, rejected = examples
    return [PreferencePair(chosen=chosen, rejected=rejected, margin=_margin(row))]


def unpaired_of(
    row: Mapping[str, Any], kind: str, examples: Sequence[TokenExample]
) -> list[LabelledExample]:
    """Completions labelled 1 or 0: two for a pair, one for each step of a stepwise row."""
    if kind == "stepwise":
        labels = [_label(label, f"labels[{i}]") for i, label in enumerate(row["labels"])]
    elif kind == "unpaired_preference":
        labels = [_label(row["label"], "column 'label'")]
    else:
        labels = [1.0, 0.0]
    return [
        LabelledExample(completion=completion, label=label)
        for completion, label in zip(examples, labels, strict=True)
    ]


def rated_of(
    row: Mapping[str, Any], kind: str, examples: Sequence[TokenExample]
) -> list[LabelledExample]:
    """Completions with their rating. The steps of a stepwise row are rated 1 or 0."""
    if kind == "stepwise":
        return unpaired_of(row, kind, examples)
    (completion,) = examples
    return [LabelledExample(completion=completion, label=_number(row["rating"], "rating"))]


def learned_pieces(
    row: Mapping[str, Any], kind: str, tokenizer: Tokenizer, *, keep_thinking: bool = False
) -> list[list[Piece]]:
    """The rows of tokens that a row gives to training, in pieces: a pair gives two.

    A row of the kind `prompt` or `verl` gives its prompt.
    """
    _require(row, kind, tokenizer)
    if kind == "text":
        text = _text(row["text"], "text")
        ids = [*_with_bos(tokenizer.encode(text), tokenizer)]
        pieces = [Piece(ids[:1], False, "text"), Piece(ids[1:], True, "text")]
        return [[*pieces, *_end(ids, tokenizer)]]
    if kind == "messages":
        messages, learned = _messages(row["messages"], "messages")
        if not learned:
            raise ValueError("column 'messages' has no assistant turn to learn from")
        turns = _turns(row, tokenizer)
        return turns.conversation(messages, learned, keep_thinking=keep_thinking)
    if kind == "stepwise":
        return _steps(row, tokenizer)
    if kind in ("preference", "implicit_preference"):
        prompt, answers = _pair(row, kind)
    else:
        prompt = row["prompt"]
        # As in a pair, a bad completion may be empty: a model may end at once.
        may_be_empty = kind == "rated" or kind == "unpaired_preference" and not row["label"]
        answers = [_text_or_messages(row["completion"], "completion", may_be_empty=may_be_empty)]
    prompt, _ = _text_or_messages(prompt, "prompt")
    return [_answered(row, prompt, answer, tokenizer, keep_thinking) for answer in answers]


_Content = tuple[str | list[dict[str, Any]], list[int]]  # a text or messages, and turns to learn


def _pair(row: Mapping[str, Any], kind: str) -> tuple[Any, list[_Content]]:
    """The prompt of a pair, and its two answers."""
    chosen = _text_or_messages(row["chosen"], "chosen")
    rejected = _text_or_messages(row["rejected"], "rejected", may_be_empty=True)
    if chosen[0] == rejected[0]:
        raise ValueError("chosen and rejected are the same")
    if kind == "implicit_preference":
        return _split_common(chosen, rejected)
    prompt, _ = _text_or_messages(row["prompt"], "prompt")
    if isinstance(prompt, str) and isinstance(chosen[0], list) and isinstance(rejected[0], list):
        if _asks(chosen[0], prompt) and _asks(rejected[0], prompt):
            return _split_common(chosen, rejected)
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str) or isinstance(chosen[0], str) or isinstance(rejected[0], str):
        return prompt, [chosen, rejected]
    if not all(_repeats(answer, prompt) for answer in (chosen[0], rejected[0])):
        return prompt, [chosen, rejected]
    system = prompt[:1] if prompt[0]["role"] == "system" != chosen[0][0]["role"] else []
    prompt, answers = _split_common(chosen, rejected)
    return [*system, *prompt], answers


def _repeats(answer: list[dict[str, Any]], prompt: list[dict[str, Any]]) -> bool:
    """True if an answer is a whole conversation that begins with the prompt."""
    asked = [message for message in prompt if message["role"] != "system"]
    start = int(answer[0]["role"] == "system")
    return bool(asked) and answer[start : start + len(asked)] == asked


def _asks(answer: list[dict[str, Any]], prompt: str) -> bool:
    """True if an answer is a whole conversation in which the user asks the prompt."""
    asked = (m.get("content", "").strip() for m in answer if m["role"] == "user")
    return prompt.strip() in asked


def _from(answer: _Content, start: int) -> _Content:
    """The messages of an answer from a place on."""
    messages, learned = answer
    return messages[start:], [i - start for i in learned if i >= start]


def _answered(
    row: Mapping[str, Any],
    prompt: str | list[dict[str, Any]],
    answer: _Content,
    tokenizer: Tokenizer,
    keep_thinking: bool,
) -> list[Piece]:
    """A prompt, tokenised as for RL, and its completion."""
    completion, learned = answer
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ValueError("the prompt is a string and its completion a list of messages")
        _refuse_tools(row)
        asked, ids = tokenizer.encode_parts(prompt + completion, [len(prompt)])
        pieces = [Piece(_with_bos(asked, tokenizer), False, "prompt")]
        return [*pieces, Piece(ids, True, "completion"), *_end(ids, tokenizer)]
    if isinstance(completion, str):
        completion, learned = [{"role": "assistant", "content": completion}], [0]
    if not learned:
        raise ValueError("the completion has no assistant turn to learn from")
    if prompt[-1]["role"] == completion[0]["role"] == "assistant":
        raise ValueError("the prompt ends in a message of the assistant, and so begins the answer")
    if prompt[-1]["role"] == "user" and completion[0]["role"] in ("system", "user"):
        raise ValueError("the answer is a whole conversation that does not begin with the prompt")
    turns = _turns(row, tokenizer)
    places = [len(prompt) + i for i in learned]
    return turns.completion([*prompt, *completion], places, keep_thinking=keep_thinking)


def _steps(row: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[Piece]]:
    """Each step as a completion of the prompt and of the earlier steps, without an end token."""
    prompt = _text(row["prompt"], "prompt")
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise ValueError("columns 'completions' and 'labels' are not two lists of one length")
    if not steps:
        raise ValueError("column 'completions' is empty")
    text, places = prompt, []
    for i, step in enumerate(steps):
        places.append(len(text))
        text += _text(step, f"completions[{i}]") + STEP_SEPARATOR
    before, *parts = tokenizer.encode_parts(text, places)
    before, rows = _with_bos(before, tokenizer), []
    for i, ids in enumerate(parts):
        rows.append([Piece(before, False, "prompt"), Piece(ids, True, f"completions[{i}]")])
        before = [*before, *ids]
    return rows


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


def _require(row: Mapping[str, Any], kind: str, tokenizer: Tokenizer) -> None:
    """ValueError for a row without a column of its format, or with what the model cannot see."""
    seen = () if images_of(tokenizer) is None else IMAGES
    if held := [name for name in MEDIA if name not in seen and _is_filled(row.get(name))]:
        raise ValueError(
            f"column {held[0]!r} is filled, and the model reads text alone here; for images of an "
            "image model set config.data.max_images (docs/vision.md)"
        )
    # An image in an answer is not read. Those of a prompt are, by a model that sees.
    unseen = COLUMNS[kind] if images_of(tokenizer) is None else ("chosen", "rejected", "completion")
    for column in unseen:
        for where, part in parts_of(row, column):
            raise ValueError(
                f"{where} is of type {part['type']}, and models are trained on text here"
            )
    for column in COLUMNS[kind]:
        if row.get(column) is None:
            state = "is null" if column in row else "is missing"
            raise ValueError(f"column {column!r} {state}")


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, list | tuple | str) and not value)


def row_images(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The images of a row: of its columns, or else of the content parts of its messages."""
    for name in IMAGES:
        if _is_filled(value := row.get(name)):
            return tuple(value) if isinstance(value, list | tuple) else (value,)
    parts = (part for column in ("prompt", "messages") for _, part in parts_of(row, column))
    # A part with its type alone is a mark.
    return tuple(
        {key: x for key, x in part.items() if key != "type"} for part in parts if len(part) > 1
    )


def parts_of(row: Mapping[str, Any], column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The content parts of a column that hold an image, and where they stand."""
    messages = row.get(column)
    for i, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in PARTS:
                yield f"{column}[{i}].content[{j}]", part


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


def _text_or_messages(value: Any, column: str, *, may_be_empty: bool = False) -> _Content:
    """A text, or messages with the places of the turns to learn."""
    if isinstance(value, list | tuple):
        return _messages(value, column, may_be_empty=may_be_empty)
    return _text(value, column, may_be_empty=may_be_empty), []


def _messages(
    value: Any, column: str, *, may_be_empty: bool = False
) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages, and the places of the assistant's turns that are learned."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise ValueError(f"column {column!r} is empty")
    messages, learned = [], []
    for i, message in enumerate(value):
        where = f"{column}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} holds {type(message).__name__}, not a message")
        if "from" in message and "value" in message:
            message = _from_sharegpt(message, where)
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where} has no role")
        # Templates test whether a key is there.
        message = {key: part for key, part in message.items() if part is not None}
        if message.get("function_call"):
            raise ValueError(f"{where} has a function_call: write it as tool_calls")
        if _counts(message, where) and message["role"] == "assistant":
            learned.append(i)
        if isinstance(message.get("content"), list):
            message["content"] = _joined_parts(message["content"], f"{where}.content")
        if "content" in message or "tool_calls" not in message:
            # An empty system message switches the template's default system message off. A tool may
            # have nothing to say.
            may_be = message["role"] in ("system", "tool") or "tool_calls" in message
            may_be |= may_be_empty and message["role"] == "assistant"
            message["content"] = _text(
                message.get("content"), f"{where}.content", may_be_empty=may_be
            )
        messages.append(message)
    return messages, learned


def _from_sharegpt(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """ShareGPT's message with our keys."""
    if message["from"] not in SHAREGPT:
        known = ", ".join(SHAREGPT)
        raise ValueError(f"{where}.from holds {message['from']!r}, which is none of {known}")
    rest = {key: part for key, part in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT[message["from"]], "content": message["value"]} | rest


def _counts(message: dict[str, Any], where: str) -> bool:
    """Take the keys out of a message that say whether its turn is learned."""
    counts = True
    for key in LEARNED_KEYS:
        value = message.pop(key, 1)
        if value not in (0, 1):
            raise ValueError(f"{where}.{key} holds {value!r}: a turn is learned (1) or not (0)")
        counts = counts and bool(value)
    return counts


def _joined_parts(parts: list[Any], where: str) -> str:
    """The text of content parts. ValueError for a part that is no text."""
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in PARTS:  # `row_images` has the image
            texts.append(MARK)
            continue
        if kind != "text":
            raise ValueError(f"{where}[{i}] is of type {kind}, and models are trained on text here")
        texts.append(_text(part.get("text"), f"{where}[{i}].text", may_be_empty=True))
    return "".join(texts)


def _turns(row: Mapping[str, Any], tokenizer: Tokenizer) -> Turns:
    """The template with the row's own tools and variables."""
    variables = row.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _json_text(variables, "chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        kind = type(variables).__name__
        raise ValueError(f"column 'chat_template_kwargs' holds {kind}, not an object")
    # verl has a column for this one. Templates compare it with false, which no text or 0 is.
    thinking = row.get("enable_thinking")
    if thinking is not None:
        thinking = bool(_label(thinking, "column 'enable_thinking'"))
    # Arrow adds a null for each variable of another row.
    named = {"enable_thinking": thinking, **(variables or {})}
    return tokenizer.turns(_tools(row), {k: v for k, v in named.items() if v is not None} or None)


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The column `tools`: a list of JSON schemas, or that list as JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"column 'tools' holds {type(tools).__name__}, not a list")
    return tools


def _refuse_tools(row: Mapping[str, Any]) -> None:
    """ValueError for tools of a row whose prompt is a text: no template writes them."""
    if _tools(row):
        raise ValueError(
            "column 'tools' needs a prompt of messages: set --config.data.prompt_style=chat"
        )


def _with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a plain text with one BOS token, where the tokenizer adds it."""
    if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]:
        return ids
    return [tokenizer.bos_id, *ids]


def _end(ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece]:
    """An end token, where the ids of a plain text do not end with one."""
    ended = bool(ids) and ids[-1] in tokenizer.stop_ids
    return [] if ended else [Piece([tokenizer.eos_id], True, "end token")]


def _example(pieces: Sequence[Piece], data_source: str, index: int) -> TokenExample:
    return TokenExample(
        token_ids=tuple(i for piece in pieces for i in piece.ids),
        loss_mask=tuple(int(piece.learned) for piece in pieces for _ in piece.ids),
        data_source=data_source,
        row=index,
    )


def _split_common(chosen: _Content, rejected: _Content) -> tuple[Any, list[_Content]]:
    """The common beginning of two texts or conversations, and the rest of each."""
    if type(chosen[0]) is not type(rejected[0]):
        raise ValueError("chosen and rejected are not both strings or both lists of messages")
    pairs = list(zip(chosen[0], rejected[0], strict=False))
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if isinstance(chosen[0], str) and shared and chosen[0][shared - 1] == " ":
        shared -= 1  # a space belongs to the word after it, as in TRL
    prompt, answers = chosen[0][:shared], [_from(x, shared) for x in (chosen, rejected)]
    parts = [prompt, *(answer[0] for answer in answers)]
    for name, part in zip(("common beginning", "chosen", "rejected"), parts, strict=True):
        if not part:
            raise ValueError(f"no prompt can be split off: {name} is empty")
    return prompt, answers


def _looks_like_object(value: Any) -> bool:
    """True if a column holds an object, or text that begins like a JSON object."""
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


def _label(value: Any, name: str) -> float:
    """A label: true or false, or 1 or 0."""
    if value not in (0, 1):
        raise ValueError(f"{name} holds {value!r}, not true or false")
    return float(value)


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get("margin")
    return 0.0 if value is None else _number(value, "margin")


def _number(value: Any, column: str) -> float:
    if not _is_number(value):
        raise ValueError(f"column {column!r} holds {value!r}, not a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    """True if `value` is a finite number. True and false do not count as numbers."""
    return not isinstance(value, bool) and isinstance(value, int | float) and value - value == 0
