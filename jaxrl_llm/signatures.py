"""What a function that a config names accepts, read from its source without importing it.

Importing `jaxrl_llm.algorithms.alias` would import jax, which takes seconds; a typing mistake in
a setting must be answered at once.
"""

import ast
import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxrl_llm.config import ConfigError

REQUIRED = object()  # no default: the setting must be given
UNREADABLE = object()  # the default is not a literal: only the function itself knows it

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = {
    "Any": Any,
    "None": None,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
    "tuple": tuple,
}


@dataclass(frozen=True)
class Setting:
    """A keyword-only parameter: its type (Any when it cannot be told) and its default."""

    annotation: Any
    default: Any


def with_settings_of(shared: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator: `**settings` of the function stands for the settings of `shared`.

    Those that the function names itself keep its own annotation and default. So a default that
    many functions share is written once, and is still found without importing anything.
    """

    def decorate(fn: F) -> F:
        own = inspect.signature(fn)
        keyword = inspect.Parameter.KEYWORD_ONLY
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in kept}
        more = [p for p in inspect.signature(shared).parameters.values() if p.kind is keyword]
        added = [p for p in more if p.name not in names]
        fn.__signature__ = own.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[*kept, *added]
        )
        return fn

    return decorate


@functools.cache
def settings_of(path: str) -> dict[str, Setting]:
    """The settings of the function at `path` ("package.module:name" or "file.py:name")."""
    file, definition = find_definition(path)
    if isinstance(definition, ast.ClassDef):
        return {}
    own = _own_settings(file, definition)
    for decorator in definition.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name):
            shared = decorator.args[0] if decorator.func.id == with_settings_of.__name__ else None
            if isinstance(shared, ast.Name):
                own = own | {
                    name: setting
                    for name, setting in settings_of(f"{file}:{shared.id}").items()
                    if name not in own
                }
    return own


def _own_settings(
    file: Path, definition: ast.FunctionDef | ast.AsyncFunctionDef
) -> dict[str, Setting]:
    tree = _parse(file)
    arguments = definition.args
    settings = {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = REQUIRED if default is None else _literal(default, tree)
        if argument.annotation is not None:
            annotation = _annotation(argument.annotation)
        else:
            annotation = type(value) if isinstance(value, bool | int | float | str) else Any
        settings[argument.arg] = Setting(annotation, value)
    return settings


@functools.cache
def find_definition(
    path: str,
) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The file that defines `path`, and the definition there. ConfigError when there is none."""
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise ConfigError("expected the path of a function: package.module:name or file.py:name")
    file = find_source(module)
    definitions = {}
    for node in _parse(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find_definition(f"{node.module}:{alias.name}")
    if name not in definitions:
        public = sorted(n for n in definitions if not n.startswith("_"))
        raise ConfigError(
            f"{file} defines no {name!r}{nearest(name, public)}; it has: "
            f"{', '.join(public) or 'no function'}"
        )
    return file, definitions[name]


def dict_keys(module: str, name: str) -> list[str]:
    """The literal keys of the dict that `module` sets `name` to."""
    for node in _parse(find_source(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if named and isinstance(value, ast.Dict):
            return [str(ast.literal_eval(key)) for key in value.keys if key is not None]
    raise AssertionError(f"{module} sets no dict {name}")


def find_source(module: str) -> Path:
    """The source file of a dotted module name, or of a path that ends in .py; nothing is run."""
    if module.endswith(".py"):
        file = Path(module).expanduser()
        if not file.is_file():
            raise ConfigError(f"{module} does not exist{nearest_file(file)}")
        return file
    locations: Any = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:count]), locations)
        if spec is None:
            raise ConfigError(
                f"there is no module {'.'.join(parts[:count])!r}"
                f"{nearest(parts[count - 1], _modules_in(locations))}"
            )
        locations = spec.submodule_search_locations
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"the module {module!r} has no Python source")
    return Path(spec.origin)


def nearest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    """ "; did you mean …?" when one of `choices` is close to `word`, else nothing."""
    lowered = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[found[0]]!r}?" if found else ""


def nearest_file(path: Path) -> str:
    """What exists instead of a missing `path`: the closest name in its deepest existing folder."""
    folder, missing = path.parent, path.name
    while not folder.is_dir() and folder != folder.parent:
        folder, missing = folder.parent, folder.name
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    found = difflib.get_close_matches(missing, names, n=1, cutoff=0.5)
    if found:
        return f"; did you mean {str(folder / found[0])!r}?"
    shown = [name for name in names if not name.startswith((".", "__"))][:12]
    return f"; {str(folder)!r} holds: {', '.join(shown) or 'nothing'}"


def _find_spec(name: str, locations: Any) -> ModuleSpec | None:
    # importlib.util.find_spec would import the parent packages.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, locations) if find else None
        if spec is not None:
            return spec
    return None


def _modules_in(locations: Any) -> list[str]:
    folders = [Path(location) for location in locations or ()]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return sorted(e.stem for e in entries if e.suffix == ".py" or (e / "__init__.py").exists())


@functools.cache
def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text") from None


def _literal(node: ast.expr, tree: ast.Module) -> Any:
    """The value of a literal, or of a name that the module sets to a literal once."""
    if isinstance(node, ast.Name):
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == node.id
                for target in statement.targets
            ):
                return _literal(statement.value, tree)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNREADABLE


def _annotation(node: ast.expr) -> Any:
    """The type that an annotation spells, built from plain names; Any for everything else."""
    if isinstance(node, ast.Constant):
        if node.value is None or node.value is Ellipsis:
            return node.value
        quoted = ast.parse(str(node.value), mode="eval")
        return _annotation(quoted.body)
    if isinstance(node, ast.Name):
        return _NAMES.get(node.id, Any)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _annotation(node.left), _annotation(node.right)
        return Any if Any in (left, right) else left | right
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        outer = node.value.attr if isinstance(node.value, ast.Attribute) else None
        outer = node.value.id if isinstance(node.value, ast.Name) else outer
        if outer == "Literal":
            return Literal[tuple(ast.literal_eval(choice) for choice in inner)]
        if outer == "Optional":
            kind = _annotation(inner[0])
            return Any if kind is Any else kind | None
        if outer in ("tuple", "list", "dict"):
            kinds = tuple(_annotation(kind) for kind in inner)
            return types.GenericAlias(_NAMES[outer], kinds)
    return Any
