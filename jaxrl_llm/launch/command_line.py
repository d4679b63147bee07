"""Reads command lines: flags, and a config with overrides. Imports no jax."""

import argparse
import inspect
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.config import (
    Config,
    ConfigError,
    UnknownKeyError,
    load_config,
    packaged_configs,
)
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.other_words import answer
from jaxrl_llm.typed_records.overrides import apply_override
from jaxrl_llm.typed_records.tree import key_that_ends_in

WIDTH = 100  # characters of a line of --help


class Parser(argparse.ArgumentParser):
    """The flags of a command, none abbreviated. Mistakes are ConfigErrors.

    `about` begins with a line that says what the command does, with an example. With `takes_config`
    the flags have `config`, the path, and `overrides`: (key without "config.", text) in order.
    """

    def __init__(self, about: str, *, takes_config: bool = False) -> None:
        super().__init__(
            usage=argparse.SUPPRESS,
            description=inspect.cleandoc(about),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.takes_config = takes_config
        if takes_config:
            self.flag(
                "--config=FILE",
                "a file with get_config(), the name of a packaged config such as ppo, or the "
                "folder or config.json of a run; --config.a.b=VALUE overrides any key of it, e.g. "
                "--config.total_steps=10",
                type=str,
            )

    def flag(
        self, flag: str, about: str, group: argparse._ArgumentGroup | None = None, **settings: Any
    ) -> None:
        """Add the switch `--name`, or `--name=VALUE`, where VALUE is what --help shows.

        N takes a number from 1 on, and is 0 without the flag. FILE and DIR take paths. Another
        VALUE in capitals takes a text. One that is not in capitals is the default.
        """
        name, equals, shown = flag.partition("=")
        if not equals:
            settings["action"] = "store_true"
        elif shown == "N":
            settings |= {"metavar": shown, "type": count, "default": 0}
        elif shown.isupper():
            kind = Path if shown in ("FILE", "DIR") else str
            settings = {"metavar": shown, "type": kind} | settings
        else:
            kind = int if shown.isdecimal() else float if "." in shown else str
            settings |= {"metavar": shown, "type": kind, "default": kind(shown)}
        (group or self).add_argument(name, help=about, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def format_help(self) -> str:
        """The flags, and the keys of a config where one is taken."""
        text = super().format_help()
        if not self.takes_config:
            return text
        from jaxrl_llm.launch.config_keys import help_text

        return f"{text}\n{help_text()}\n"

    def _help(self, argv: Sequence[str]) -> str | None:
        """The help that is asked for: all of it, or the keys below the word behind --help."""
        for i, word in enumerate(argv):
            name, _, part = word.partition("=")
            if name not in ("--help", "-h"):
                continue
            following = argv[i + 1 : i + 2]
            part = part or next((w for w in following if "=" not in w or w[:2] != "--"), "")
            if not (self.takes_config and part):
                return self.format_help()
            from jaxrl_llm.launch.config_keys import help_of

            return help_of(part.lstrip("-").removeprefix("config.")) + "\n"
        return None

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command line."""
        if (text := self._help(argv)) is not None:
            print(text, end="", flush=True)
            raise SystemExit(0)
        self._check_names(argv)
        if not self.takes_config:
            return self.parse_args(argv)
        flags, words = self.parse_known_args(argv)
        flags.overrides = _overrides(words)
        if not flags.config:
            known = f"a run's folder, or one of {', '.join(packaged_configs())}"
            raise ConfigError(f"--config=FILE is missing: a file with get_config(), {known}")
        return flags

    def _check_names(self, argv: Sequence[str]) -> None:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in argv:
            name, _, value = word.partition("=")
            is_key = self.takes_config and name.startswith("--config.")
            if not name.startswith("--") or name in known or is_key:
                continue
            key = key_that_ends_in(name[2:], Config()) if self.takes_config else ""
            hint = f"; did you mean --config.{key}?" if key else nearest(name, known)
            if self.takes_config and (ours := answer(name[2:])):
                raise ConfigError(f"unknown flag {name}: here it is {ours}")
            shown = [*known, "--config.KEY=VALUE"] if self.takes_config else known
            text = f"unknown flag {name}{hint}\nflags: {', '.join(shown)}"
            if self.takes_config and "." in name:  # Hydra's words may begin so
                raise UnknownKeyError(text, name[2:], value)
            raise ConfigError(text)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows flags as they are typed: `--devices=N`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        name = action.option_strings[-1]
        return f"{name}={action.metavar}"


def _overrides(words: list[str]) -> list[tuple[str, str]]:
    """(key without "config.", text) of `--config.key=VALUE` and `--config.key VALUE`."""
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
    return overrides


def _no_flag(word: str) -> ConfigError:
    """The error for a word that is not a flag, such as a key of ours or of verl."""
    text = f"{word!r} is no flag; write --config.key=value or --flag=value"
    name, equals, value = word.lstrip("+~-").removeprefix("config.").partition("=")
    if not equals or not all(part.isidentifier() for part in name.split(".")):
        return ConfigError(text)
    if ours := answer(name):
        return ConfigError(f"{word!r} is no flag: here it is {ours}; write --config.key=value")
    try:
        apply_override(Config(), name, value)
    except UnknownKeyError:
        return UnknownKeyError(text, name, value)
    except ConfigError:
        pass  # the key is known
    return ConfigError(
        f"{word!r} is no flag; did you mean {shlex.quote(f'--config.{name}={value}')}?"
    )


def count(text: str) -> int:
    """The type of a flag that takes a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)


def read_config(argv: Sequence[str], parser: Parser) -> tuple[Config, argparse.Namespace]:
    """The checked config of a command line, and the command's other flags."""
    flags = parser.read(argv)
    return load_config(flags.config, flags.overrides), flags
