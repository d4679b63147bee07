"""A verl command line as keys and values."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxrl_llm.config import Config, ConfigError, apply_override
from jaxrl_llm.convert.conversion import Conversion, answer, convert, rows_of, rule_of
from jaxrl_llm.convert.rules import NotNeeded, Ours, Source, many
from jaxrl_llm.convert.values import value_of
from jaxrl_llm.convert.verl import DEFAULTS, VERL
from jaxrl_llm.convert.verl_sft import SFT_DEFAULTS, VERL_SFT
from jaxrl_llm.typed_records.bounds import Text

RL = re.compile(r"(^|[./])(main_ppo\w*|main_dapo)(\.py)?$")
SFT = re.compile(r"(^|[./])(fsdp_)?sft_trainer\w*(\.py)?$")
CONVERTS = (
    '`jaxrl convert-config --from=verl "COMMAND"` translates a whole command: docs/from-verl.md'
)


def convert_verl(words: Sequence[str], *, rows: int = 0, devices: int = 0) -> Conversion:
    """The run of a verl command line.

    `rows` of the training data and `devices` of the run count where the words do not say them.
    Raises: ConfigError.
    """
    entry = next((i for i, word in enumerate(words) if RL.search(word) or SFT.search(word)), None)
    if entry is None:
        raise ConfigError("it has no trainer of verl, such as verl.trainer.main_ppo")
    settings = settings_of(words[entry + 1 :])
    is_supervised = bool(SFT.search(words[entry]))
    defaults = SFT_DEFAULTS if is_supervised else DEFAULTS
    files = map(str, many(settings.get("data.train_files")))
    source = Source(
        settings=settings,
        defaults=defaults,
        devices=devices or _devices(words[:entry], settings, defaults),
        rows=rows or rows_of(files),
    )
    return convert(source, VERL_SFT if is_supervised else VERL)


def counterpart(key: str, text: str) -> str:
    """Name the key of ours that a key of verl is, in a sentence; empty for an unknown key."""
    if rule_of(key, VERL.table) is None:
        return ""
    with suppress(ConfigError):  # the value may be wrong
        value = value_of(text)
        source = Source(settings={key: value}, defaults=DEFAULTS, devices=1)
        reply = answer(key, value, source, VERL)
        if isinstance(reply, NotNeeded):
            return f"verl's {key} is not needed here: {reply.why}"
        # Without values, or without a counterpart, it may depend on other keys.
        if isinstance(reply, Ours) and reply.values and text:
            flags = [_flag_of(name, ours) for name, ours in reply.values.items()]
            return f"verl's {key}={text} is {' '.join(flags)} here"
    return f"{key} is a key of verl; {CONVERTS}"


def _flag_of(key: str, value: Any) -> str:
    """The flag as a shell takes it. Raises: ConfigError for a value that does not fit the key."""
    shown = "null" if value is None else json.dumps(value) if isinstance(value, list) else value
    apply_override(Config(), key, Text(shown))
    return shlex.quote(f"--config.{key}={shown}")


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """The key=value words of Hydra, the last one of a key. Raises: ConfigError for another word."""
    settings: dict[str, Any] = {}
    words = [word for word in words if word.strip()]
    while words:
        word = words.pop(0)
        key, equals, text = word.partition("=")
        if key.startswith("--") and not equals and words:
            text = words.pop(0)
        elif key.startswith("~"):
            settings.pop(key[1:], None)
            continue
        elif not equals:
            raise ConfigError(f"{word!r} is no key=value of verl")
        settings[key.lstrip("+")] = value_of(text)
    return settings


def _devices(
    launcher: Sequence[str], settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> int:
    """Devices of the run, by the trainer's keys, or by torchrun's flags."""

    def number(key: str, flag: str) -> int:
        value = settings.get(key, _flag(launcher, flag))
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
            return value_of(text)
    return None
