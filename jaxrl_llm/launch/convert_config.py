"""The command convert-config: a command line of verl or TRL becomes a config file of ours."""

import os
import re
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.flags import CONVERT_CONFIG
from jaxrl_llm.references import is_file, nearest_file


def convert_config(argv: list[str]) -> int:
    """Write the config of a verl or TRL run."""
    flags = CONVERT_CONFIG.read(argv)
    script, arguments = _script(flags.file, flags.words)
    from jaxrl_llm.convert.account import lines
    from jaxrl_llm.convert.trl_command import convert_trl
    from jaxrl_llm.convert.verl_command import convert_verl
    from jaxrl_llm.convert.writing import file_of

    convert = {"verl": convert_verl, "trl": convert_trl}[flags.library]
    try:
        found = convert(
            script,
            dict(os.environ),
            arguments=arguments,
            rows=flags.rows,
            devices=flags.devices,
        )
    except RecursionError:
        raise ConfigError("brackets of the command are nested too deep to be read") from None
    stem = re.sub(r"[^\w.-]+", "_", found.config.name).strip("._-") or "converted"
    output = flags.output or Path(f"{stem}.py")
    _check_new(output)
    output.write_text(file_of(found, flags.library), encoding="utf-8")
    print("\n".join(lines(found)))
    before = "get what is not on this machine, then " if found.missing else ""
    print(f"wrote {output}; {before}try it: jaxrl train --config={output} --dry_run")
    return 0


def _script(file: Path | None, words: list[str]) -> tuple[str, list[str]]:
    """The text with the command, and the arguments of a script."""
    if file is None:
        if not words:
            raise ConfigError("the command line is missing: give it in quotes, or --file=FILE")
        if is_file(words[0]):
            raise ConfigError(f"{words[0]} is a file, not a command line: give --file={words[0]}")
        return words[0] if len(words) == 1 else " ".join(words), []
    if not file.is_file():
        raise ConfigError(f"there is no file {file}{nearest_file(file)}")
    try:
        return file.read_text(encoding="utf-8"), words
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no text file") from None


def _check_new(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} exists; give a new file: --output=FILE")
    if not file.parent.is_dir():
        raise ConfigError(f"--output={file}: there is no folder {file.parent}")
