"""A verl command line as keys and values."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jaxrl_llm.config import Config, ConfigError, apply_override
from jaxrl_llm.convert.conversion import Conversion, answer, convert, rows_of, rule_of
from jaxrl_llm.convert.rules import NotNeeded, Ours, Source, many
from jaxrl_llm.convert.shell import read_command, remedy, unknown_in, without_unknown
from jaxrl_llm.convert.values import value_of
from jaxrl_llm.convert.verl import DEFAULTS, VERL
from jaxrl_llm.convert.verl_sft import SFT_DEFAULTS, VERL_SFT
from jaxrl_llm.typed_records.bounds import Text

RL = re.compile(r"(^|[./])(main_ppo\w*|main_dapo)(\.py)?$")
SFT = re.compile(r"(^|[./])(fsdp_)?sft_trainer\w*(\.py)?$")
CONVERTS = (
    "`jaxrl convert-config --from=verl --file=SCRIPT` translates a whole command: docs/from-verl.md"
)
NAMES = ("trainer.experiment_name", "trainer.project_name")  # may have unknown parts


def convert_verl(
    script: str,
    environment: Mapping[str, str],
    *,
    arguments: Sequence[str] = (),
    rows: int = 0,
    devices: int = 0,
) -> Conversion:
    """The run of a verl command line, or of a script that holds one.

    `rows` are those of the training data, and `devices` those of the run, where the text does not
    say so. Raises: ConfigError.
    """
    words = read_command(script, lambda found: any(map(_is_entry, found)), environment, arguments)
    entry = next(i for i, word in enumerate(words) if _is_entry(word))
    given, cut = settings(words[entry + 1 :])
    supervised = bool(SFT.search(words[entry]))
    defaults = SFT_DEFAULTS if supervised else DEFAULTS
    source = Source(
        given=given,
        defaults=defaults,
        devices=devices or _devices(words[:entry], given, defaults),
        rows=rows or _rows(given),
    )
    found = convert(source, VERL_SFT if supervised else VERL)
    unused = {each.key for each in found.of_kind(NotNeeded)}
    notes = [note for key, note in cut.items() if key not in unused]
    return replace(found, notes=(*found.notes, *notes))


def counterpart(key: str, text: str) -> str:
    """What a key of verl is here, as a sentence; empty where verl has no such key."""
    if rule_of(key, VERL.table) is None:
        return ""
    with suppress(ConfigError):  # of a value that cannot be
        value = value_of(text)
        found = answer(key, value, Source(given={key: value}, defaults=DEFAULTS, devices=1), VERL)
        if isinstance(found, NotNeeded):
            return f"verl's {key} is not needed here: {found.why}"
        # Without values, or without a counterpart, it may depend on other keys.
        if isinstance(found, Ours) and found.values and text:
            flags = [_flag_of(name, ours) for name, ours in found.values.items()]
            return f"verl's {key}={text} is {' '.join(flags)} here"
    return f"{key} is a key of verl; {CONVERTS}"


def _flag_of(key: str, value: Any) -> str:
    """The flag as a shell takes it. Raises: ConfigError for a value that does not fit the key."""
    shown = "null" if value is None else json.dumps(value) if isinstance(value, list) else value
    apply_override(Config(), key, Text(shown))
    return shlex.quote(f"--config.{key}={shown}")


def _is_entry(word: str) -> bool:
    return bool(RL.search(word) or SFT.search(word))


def settings(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The key=value words of Hydra, the last one of a key; and notes on values that were cut.

    Raises: ConfigError for a word that is neither, and for a value that is not known.
    """
    found: dict[str, Any] = {}
    cut: dict[str, str] = {}
    words = [word for word in words if word.strip()]
    while words:
        word = words.pop(0)
        key, equals, text = word.partition("=")
        if key.startswith("--") and not equals and words:
            text = words.pop(0)
        elif not equals:
            if key.startswith("~"):
                found.pop(key[1:], None)
                continue
            raise ConfigError(f"{word!r} is no key=value of verl")
        key = key.lstrip("+") if not key.startswith("--") else key
        cut.pop(key, None)
        if unknown := unknown_in(key + text):
            text = _known(key, text, unknown[0])
            cut[key] = (
                f"{key}: the value depends on {', '.join(unknown)}, not known here; "
                f"{repr(text) if text else 'nothing'} is left of it. {remedy(unknown[0])}"
            )
        found[key] = value_of(text)
    return found, cut


def _known(key: str, text: str, unknown: str) -> str:
    if key in NAMES or key.startswith("--"):
        return without_unknown(text)
    raise ConfigError(
        f"{key}: the value depends on {unknown}, which is not known. {remedy(unknown)}"
    )


def _devices(before: Sequence[str], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> int:
    """Devices of the run: of the trainer's keys, or of torchrun's."""

    def number(key: str, flag: str) -> int:
        value = given.get(key, _flag(before, flag))
        if value is None:
            value = defaults.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{key}={value}: the number of devices is not known; give --devices=N"
            )
        return value

    per_node = number("trainer.n_gpus_per_node", "--nproc_per_node")
    return number("trainer.nnodes", "--nnodes") * per_node


def _flag(words: Sequence[str], name: str) -> Any:
    """The value of a flag of the launcher, with - or _ in its name."""
    for i, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag.replace("-", "_").lstrip("_") == name.lstrip("-"):
            text = text if equals else "".join(words[i + 1 : i + 2])
            return None if unknown_in(text) else value_of(text)
    return None


def _rows(given: Mapping[str, Any]) -> int:
    return rows_of(str(file) for file in many(given.get("data.train_files")))
