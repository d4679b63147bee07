"""A conversation with a model in a terminal."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TextIO

from jaxrl_llm.evaluation.answer_settings import StreamSettings
from jaxrl_llm.evaluation.answering import OpenModel
from jaxrl_llm.observability.console import printable

HELP = "/reset begins a new conversation, /exit ends; Ctrl-C ends an answer"


def chat(
    model: OpenModel,
    lines: Iterable[str],
    out: TextIO,
    settings: StreamSettings,
    *,
    system: str = "",
) -> None:
    """Answer each line, and show the answer while it is made. All turns stay in the conversation.

    A conversation that is too long for the model is said so, and goes on without the last line.
    So does one whose answer is empty, as chat templates and data take no empty turns.
    """
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(first)
            print("a new conversation", file=out, flush=True)
        elif text.startswith("/"):
            print(f"there is no {text.split()[0]}: {HELP}", file=out, flush=True)
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = _show(model.stream(asked, **vars(settings)), out)
            except ValueError as error:
                print(f"{error}, or begin again with /reset", file=out, flush=True)
                continue
            if answer.strip():
                messages = [*asked, {"role": "assistant", "content": answer}]
            else:
                print("(no answer; the conversation goes on without it)", file=out, flush=True)
            settings = replace(settings, seed=settings.seed + 1)


def _show(pieces: Iterator[str], out: TextIO) -> str:
    """Print the pieces of an answer; the answer, or what there is of it when Ctrl-C ends it."""
    answer: list[str] = []
    try:
        for piece in pieces:
            answer.append(piece)
            # A model must not control the terminal; code has tabs.
            text = "".join(c if c in "\n\t" else printable(c) for c in piece)
            print(text, end="", file=out, flush=True)
    except KeyboardInterrupt:
        pass
    print(file=out, flush=True)
    return "".join(answer)


def typed_lines() -> Iterator[str]:
    """Lines of a terminal behind a prompt, or of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    print(HELP)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
