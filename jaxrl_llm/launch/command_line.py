"""The flags of a command, and the config that they name, with its overrides. Imports no jax."""

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

from jaxrl_llm.config import (
    Config,
    ConfigError,
    UnknownKeyError,
    load_config,
    packaged_configs,
)
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.overrides import apply_override
from jaxrl_llm.typed_records.tree import key_that_ends_in


class Parser(argparse.ArgumentParser):
    """The flags of a command, none abbreviated. Mistakes are ConfigErrors."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command that takes no config."""
        self._check_names(argv, takes_config=False)
        return self.parse_args(argv)

    def read_with_config(
        self, argv: Sequence[str]
    ) -> tuple[argparse.Namespace, str, list[tuple[str, str]]]:
        """The flags, --config, and the overrides as (key without "config.", text) in order."""
        self.add_argument("--config")
        self._check_names(argv, takes_config=True)
        flags, words = self.parse_known_args(argv)
        overrides: list[tuple[str, str]] = []
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not name.startswith("--config."):
                errors = [_no_flag(other) for other in (word, *words) if other[:2] != "--"]
                raise next((x for x in errors if isinstance(x, UnknownKeyError)), errors[0])
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} has no value; write {name}=VALUE")
                value = words.pop(0)
            overrides.append((name.removeprefix("--config."), value))
        if not flags.config:
            known = f"a run's folder, or one of {', '.join(packaged_configs())}"
            raise ConfigError(f"--config=FILE is missing: a file with get_config(), {known}")
        return flags, flags.config, overrides

    def _check_names(self, argv: Sequence[str], *, takes_config: bool) -> None:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for name in (word.partition("=")[0] for word in argv if word.startswith("--")):
            if name not in known and not (takes_config and name.startswith("--config.")):
                key = key_that_ends_in(name[2:], Config()) if takes_config else ""
                hint = f"; did you mean --config.{key}?" if key else nearest(name, known)
                shown = [*known, "--config.KEY=VALUE"] if takes_config else known
                text = f"unknown flag {name}{hint}\nflags: {', '.join(shown)}"
                if takes_config and "." in name:  # Hydra's words may begin so
                    word = next(word for word in argv if word.partition("=")[0] == name)
                    raise UnknownKeyError(text, name[2:], word.partition("=")[2])
                raise ConfigError(text)


def _no_flag(word: str) -> ConfigError:
    """The error for a word that is no flag: a key of ours or of verl without --config., or else."""
    text = f"{word!r} is no flag; write --config.key=value or --flag=value"
    name, equals, value = word.lstrip("+~-").removeprefix("config.").partition("=")
    if not equals or not all(part.isidentifier() for part in name.split(".")):
        return ConfigError(text)
    try:
        apply_override(Config(), name, value)
    except UnknownKeyError:
        return UnknownKeyError(text, name, value)
    except ConfigError:
        pass  # the key is known
    return ConfigError(
        f"{word!r} is no flag; did you mean {shlex.quote(f'--config.{name}={value}')}?"
    )


def read_config(argv: Sequence[str], parser: Parser) -> tuple[Config, argparse.Namespace]:
    """The checked config of a command line, and the command's other flags."""
    flags, path, overrides = parser.read_with_config(argv)
    return load_config(path, overrides), flags


def count(text: str) -> int:
    """The type of a flag that takes a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)
