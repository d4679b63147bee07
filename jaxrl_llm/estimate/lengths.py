"""Lengths of samples in a file. No jax."""

from pathlib import Path

from jaxrl_llm.config import ConfigError


def lengths_in(file: Path) -> tuple[tuple[int, int], ...]:
    """(prompt, response) tokens of each sample: a line "PROMPT,RESPONSE" each.

    The first line may be a header.

    Raises: ConfigError that names the line.
    """
    lengths = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = [word.strip() for word in line.split(",")]
        if words == [""] or (number == 1 and not any(word.isdecimal() for word in words)):
            continue  # an empty line, or the header
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(
                f"{file}:{number}: {line!r} is not PROMPT,RESPONSE in tokens, e.g. 512,300"
            )
        lengths.append((int(words[0]), int(words[1])))
    if not lengths:
        raise ConfigError(f"--lengths={file} has no line PROMPT,RESPONSE, such as 512,300")
    return tuple(lengths)
