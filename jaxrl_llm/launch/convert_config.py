"""The command convert-config: a command line of verl or TRL becomes a config file of ours."""

import os
import re
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.command_line import Parser, count
from jaxrl_llm.references import is_file, nearest_file

LIBRARIES = ("verl", "trl")


def convert_config(argv: list[str]) -> int:
    """Write the config of a verl or TRL run: jaxrl convert-config --from=verl "python3 -m verl..."

    Prints what became of each key: translated, not needed, or without counterpart and what to do.
    Quote the command line, or give a script that holds it. A script is read and never run: its
    variables, defaults, arrays, `if` and `case` are worked out. A variable that it does not set is
    taken from the environment: NNODES=2 jaxrl convert-config ... docs/from-verl.md and
    docs/from-trl.md compare the keys.

    Flags:
      --from=verl           whose command line it is: verl | trl
      --file=FILE           a script that holds it; words behind are the script's arguments
      --output=FILE         the config to write, a new file; NAME.py without it
      --rows=N              rows of the training data, if its files are not here: they turn epochs
                            into steps
      --devices=N           devices of the run, if the command line does not say so
    """
    parser = Parser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--from", dest="library", choices=LIBRARIES, required=True)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=count, default=0)
    parser.add_argument("--devices", type=count, default=0)
    flags = parser.read(argv)
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
