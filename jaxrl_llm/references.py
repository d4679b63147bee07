"""Functions and files that a user names by path, the nearest name, and values in messages. No jax.

A path is `file.py:name` or `package.module:name`. This is the only place that imports by path.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from os.path import exists
from os.path import isdir as is_folder
from os.path import isfile as is_file
from pathlib import Path
from types import ModuleType
from typing import Any

HOW = "write 'my_file.py:name' or 'package.module:name'"


def split_path(path: str) -> tuple[str, str]:
    """'my_file.py:fn' or 'package.module:fn' as (module part, name); ValueError otherwise."""
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise ValueError(f"{path!r} does not name a function or class: {HOW}")
    return module, name


def check_path(path: str) -> None:
    """Check, without running any code, that the file or the package of `path` exists.

    Raises ValueError with the nearest file.
    """
    module, _ = split_path(path)
    if module.endswith(".py"):
        file = Path(module).expanduser()
        if not is_file(file):
            raise ValueError(f"there is no file {module}{nearest_file(file)}")
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"there is no module {module.partition('.')[0]!r}: {HOW}")


def file_of(path: str) -> Path | None:
    """The file of the function that `path` names; None where that is not known. Runs no code."""
    module, _ = split_path(path)
    if module.endswith(".py"):
        file = Path(module).expanduser()
        return file if is_file(file) else None
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    places = [Path(place, *parts) for place in spec.submodule_search_locations or ()]
    files = [file for p in places for file in (p.with_suffix(".py"), p / "__init__.py")]
    files += [] if parts else [Path(spec.origin or "")]
    return next(filter(is_file, files), None)


def git_commit(folder: Path) -> str:
    """The commit that is checked out in `folder`; empty outside of a repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed
        return ""
    return result.stdout.strip()


def load(path: str) -> Any:
    """Import what `path` names. ValueError, with the nearest name, when that fails."""
    module_name, name = split_path(path)
    check_path(path)
    if module_name.endswith(".py"):
        module = load_file(Path(module_name).expanduser())
    else:
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ValueError(
                f"importing the module {module_name!r} failed: {type(error).__name__}: {error}; "
                f"install its package, start from the folder that holds it, or {HOW}"
            ) from error
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"{module_name} has no {name!r}{nearest(name, public)}\nit has: "
            f"{', '.join(public) or 'no function'}"
        )
    return getattr(module, name)


def load_file(file: Path, *, again: bool = False) -> ModuleType:
    """Import a Python file, once a process unless `again` or changed since.

    The folder of the file joins the end of sys.path, so that it can import its neighbours.

    Raises: ValueError, with the line, if it fails.
    """
    file = file.resolve()
    # The checksums keep files of one name apart, and a file that was edited, as in a notebook.
    # Dataclasses look themselves up under this name.
    path, text = zlib.crc32(os.fsencode(file)), zlib.crc32(file.read_bytes())
    module_name = f"jaxrl_llm_user_{file.stem}_{path:x}_{text:x}"
    if module_name in sys.modules and not again:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: it must not hide an installed package
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code may raise anything
        del sys.modules[module_name]
        raise ValueError(f"importing {where(file, error)}: {reason(error)}") from error
    return module


def where(file: Path, error: BaseException) -> str:
    """`file`, and the last line of it that led to `error`."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}" if error.lineno else str(file)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
    return f"{file}, line {lines[-1]}" if lines else str(file)


def reason(error: BaseException) -> str:
    """The kind and message of an error."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"


def check_settings(
    path: str,
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    takes_fields: bool = False,
) -> None:
    """Settings must be keyword-only parameters; those without a default must be given.

    Others must have a default, unless the function `takes_fields` by position.

    Raises ValueError with the nearest name, and for what is no function or class.
    """
    if not callable(function):
        raise ValueError(f"{path} is of type {type(function).__name__}, not a function or class")
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{path} has no setting {name!r}{nearest(name, known)}\nits settings are its "
                f"keyword-only parameters: {', '.join(known) or 'none'}"
            )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in () if takes_fields else parameters:
        if parameter.kind in positional and parameter.default is parameter.empty:
            raise ValueError(
                f"{path} asks for {parameter.name!r}, which is no setting: make it keyword-only, "
                f"after a *, and give it in settings={{…}}"
            )
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in settings:
            raise ValueError(f"{path} needs the setting {name!r}: give it in settings={{…}}")


def call(path: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call the user's function at `path`. ValueError, with its line, if it fails."""
    try:
        return function(*arguments, **settings)
    except (Exception, SystemExit) as error:  # user code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        raise ValueError(
            f"{path} failed in {last.filename}, line {last.lineno}: {reason(error)}"
        ) from error


def is_hub_name(path: str) -> bool:
    """True if `path` can only be a model on a hub: owner/name, and there is no folder owner."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)) and not is_folder(Path(path).parent)


def shown(value: Any, most: int = 80) -> str:
    """A value in a message, of at most `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "an integer of many digits"
    except RecursionError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def nearest(word: str, choices: Iterable[str], *, prefix: str = "") -> str:
    """ "; did you mean …?" when one of `choices` is close to `word`, else nothing.

    `prefix` stands before the choice, as the record of a key does.
    """
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f"; did you mean {prefix + lowered[near[0]]!r}?" if near else ""


def nearest_file(path: Path) -> str:
    """The hint for a missing `path`: the nearest name in the deepest folder that exists."""
    if exists(path):
        return f"; {str(path)!r} is a {'folder' if path.is_dir() else 'file'}"
    folder, missing = path.parent, path.name
    while not is_folder(folder) and folder != folder.parent:
        folder, missing = folder.parent, folder.name
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:  # it may not be read
        names = []
    near = difflib.get_close_matches(missing, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {str(folder / near[0])!r}?"
    shown = [name for name in names if not name.startswith((".", "__"))][:12]
    return f"; {str(folder)!r} holds: {', '.join(shown) or 'nothing'}"
