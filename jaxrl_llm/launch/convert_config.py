"""The command convert-config: a command line of verl or TRL becomes a config file of ours."""

import os
import re
import sys
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.flags import CONVERT_CONFIG

LEARNS_ELSE = 4  # the exit code: a key that changes what is learned has no counterpart


def convert_config(argv: list[str]) -> int:
    """Write the config of a verl or TRL run."""
    flags = CONVERT_CONFIG.read(argv)
    from jaxrl_llm.convert.account import lines
    from jaxrl_llm.convert.trl_command import convert_trl
    from jaxrl_llm.convert.verl_command import convert_verl
    from jaxrl_llm.convert.writing import file_of

    convert = {"verl": convert_verl, "trl": convert_trl}[flags.library]
    conversion = convert(_words(flags.file, flags.words), rows=flags.rows, devices=flags.devices)
    stem = re.sub(r"[^\w.-]+", "_", conversion.config.name).strip("._-") or "converted"
    output = flags.output or Path(f"{stem}.py")
    if output.exists():
        raise ConfigError(f"{output} exists; give a new file: --output=FILE")
    output.write_text(file_of(conversion, flags.library), encoding="utf-8")
    print("\n".join(lines(conversion)))
    before = "get what is not on this machine, then " if conversion.missing else ""
    print(f"wrote {output}; {before}try it: jaxrl train --config={output} --dry_run")
    lost = conversion.not_learned(flags.allow.split(","))
    if lost:
        print(
            f"error: this run learns something else than the one of {flags.library}: "
            f"{', '.join(lost)} has no counterpart. If that is meant: --allow={','.join(lost)}",
            file=sys.stderr,
        )
    return LEARNS_ELSE if lost else 0


def _words(file: Path | None, words: list[str]) -> list[str]:
    """The words of the command line, which is quoted or in a file."""
    if file is None and not words:
        raise ConfigError("the command line is missing: give it in quotes, or --file=FILE")
    from jaxrl_llm.convert.command_words import command_words, hydra_words

    if file is not None and file.name == "overrides.yaml":
        return hydra_words(file)
    return command_words(" ".join(words) if file is None else file.read_text(), os.environ)
