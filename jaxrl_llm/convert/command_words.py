"""A command line as words. Nothing is run."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from jaxrl_llm.config import ConfigError

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_OF_A_SHELL = re.compile(r"\$[({@*]|`")  # what only a shell can work out


def command_words(text: str, environment: Mapping[str, str]) -> list[str]:
    """The words of one command line. A backslash at the end of a line continues it.

    `NAME=value` before the command sets a variable. $NAME is filled in from these variables, then
    from `environment`.

    Raises: ConfigError for an open quote, an unset variable, and what only a shell can work out.
    """
    try:
        words = shlex.split(_COMMENT.sub("", text).replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"the command line cannot be read: {error}") from None
    variables, command = dict(environment), []
    for word in words:
        name, equals, _ = word.partition("=")
        word = _filled(word, variables)
        if equals and name.isidentifier() and not command:
            variables[name] = word.partition("=")[2]
        else:
            command.append(word)
    return command


def _filled(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        if name not in variables:
            raise ConfigError(f"{word}: ${name} is not set; write {name}=VALUE before the command")
        return variables[name]

    if _OF_A_SHELL.search(_VARIABLE.sub("", word)):
        raise ConfigError(
            f"{word}: only a shell can work it out. Write the value, or give .hydra/overrides.yaml "
            "of a run: docs/from-verl.md"
        )
    return _VARIABLE.sub(value, word)


def hydra_words(file: Path) -> list[str]:
    """The words of a run from its `.hydra/overrides.yaml`: its program, and its key=value words."""
    import yaml

    hydra = yaml.safe_load(file.with_name("hydra.yaml").read_text(encoding="utf-8"))
    overrides = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [hydra["hydra"]["job"]["name"], *overrides]
