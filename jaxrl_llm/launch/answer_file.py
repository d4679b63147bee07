"""Answers to a file of prompts, written while they are made."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.shaping import messages_in
from jaxrl_llm.data.sources import BadRow, RawRow, read_rows
from jaxrl_llm.data_files import resolve_files
from jaxrl_llm.evaluation.answer_settings import AnswerSettings
from jaxrl_llm.evaluation.answering import Answer, OpenModel, check_lengths, complete, read_prompts

PROMPT_COLUMNS = ("prompt", "messages", "question")


def answer_file(
    model: OpenModel,
    prompts: str,
    output: Path,
    settings: AnswerSettings,
    *,
    logprobs: bool = False,
) -> int:
    """Answer every row of a data file, `settings.n` times, as JSON lines. Returns their number.

    A row has the column prompt, messages or question. Its line has all of its columns, and
    `responses` and `finished`; with `logprobs` also the tokens and log-probs of each response.
    They replace columns of these names. Each batch is written when it is done.

    Raises: ConfigError for a row without a prompt, or with one that is too long, before `output`
        is made.
    """
    pairs = list(prompt_rows(prompts))
    if not pairs:
        raise ConfigError(f"--prompts={prompts} has no row; give a file with prompts")
    rows, prompt_texts = [row for row, _ in pairs], [prompt for _, prompt in pairs]
    names = [f"{row.source} row {row.row}" for row in rows]
    read = read_prompts(prompt_texts, model.tokenizer, chat=settings.chat, names=names)
    check_lengths(model, read, names)
    done = 0
    with open(output, "x", encoding="utf-8") as file:
        for batch in complete(model, read, settings):
            for row, answer in zip(rows[done:], batch, strict=False):
                _write(file, row.data, answer, logprobs)
            file.flush()
            done += len(batch)
            print(f"{done}/{len(rows)} prompts answered", file=sys.stderr, flush=True)
    return done


def prompt_rows(prompts: str) -> Iterator[tuple[RawRow, str | Sequence[Any]]]:
    """Each row of the files that a pattern names, and its prompt."""
    for file in resolve_files(prompts):
        for row in read_rows(file):
            if isinstance(row, BadRow):
                raise ConfigError(f"{row.source} row {row.row}: {row.reason}")
            name = next((name for name in PROMPT_COLUMNS if row.data.get(name)), "")
            prompt = row.data.get(name)
            if isinstance(prompt, str):
                try:
                    prompt = messages_in(prompt, name)
                except ValueError as error:
                    raise ConfigError(f"{row.source} row {row.row}: {error}") from None
            if not isinstance(prompt, str | list):
                have = ", ".join(row.data) or "none"
                raise ConfigError(
                    f"{row.source} row {row.row} has no column {', '.join(PROMPT_COLUMNS[:-1])} or "
                    f"{PROMPT_COLUMNS[-1]} with text or messages; its columns: {have}"
                )
            yield row, prompt


def _write(file: IO[str], row: dict[str, Any], answer: Answer, logprobs: bool) -> None:
    completions = answer.completions
    line = row | {
        "responses": [completion.text for completion in completions],
        "finished": [completion.finished for completion in completions],
    }
    if logprobs:
        line["tokens"] = [[int(token) for token in completion.tokens] for completion in completions]
        line["logprobs"] = [[float(x) for x in completion.logprobs] for completion in completions]
    file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
