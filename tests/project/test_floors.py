"""The house: a file imports only from floors below it, or from its own room."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms of each floor. A room is a package, or the files named together.
FLOORS: list[list[tuple[str, ...]]] = [
    [
        *(("types",), ("numerics",), ("images",)),
        (
            *("references", "data_files", "whole_files", "chat_template", "token_bytes"),
            *("object_digests", "turns", "arguments"),
        ),
    ],
    [("typed_records",)],
    [("config",)],
    [
        *(("kernels",), ("distributed",), ("algorithms",), ("observability",)),
        *(("tokenizer",), ("convert",), ("sandbox",)),
    ],
    [("models",), ("report",)],
    [("data",), ("rewards",), ("generation",), ("checkpoint",)],
    [("learner",), ("agents",)],
    [("program",), ("server",)],
    [("plan",)],
    [("supervision",)],
    [("evaluation",)],
    [("trainer",)],
    [("estimate",)],
    [("launch",), ("benchmarks",)],
    [("configs",), ("scripts",), ("__main__",)],
]
NOT_LISTED = {"models", "configs", "scripts", "benchmarks", "__main__"}  # outside of the package
ROOM_OF = {
    name: (floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms for name in room
}


def sources() -> list[Path]:
    folders = ("jaxrl_llm", "models", "configs", "scripts")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    """The dotted name under which `file` is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("scripts", "benchmarks"):
        parts = parts[1:]
    if parts[0] in ("models", "configs"):
        parts = ("jaxrl_llm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


parsed = cache(ast.parse)


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also inside functions; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *([node.module] if node.module else [])])
            if base == "jaxrl_llm":
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def room_name(module: str) -> str | None:
    """The name in FLOORS that a module of ours belongs to; None for other people's modules."""
    first, *rest = module.split(".")
    if first in ("models", "configs", "scripts", "benchmarks"):
        return first
    return rest[0] if first == "jaxrl_llm" and rest else None


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the imports of a module do against the floors, in words."""
    own = room_name(module)
    if own is None:
        return []  # jaxrl_llm/__init__.py, which imports nothing of ours
    if own not in ROOM_OF:
        return [f"{module}: room {own!r} is on no floor; add it to FLOORS"]
    floor, room = ROOM_OF[own]
    found = []
    for line, target in imported_modules(parsed(source), module, is_package):
        name = room_name(target)
        if name is None:
            continue
        if target.split(".")[0] in ("models", "configs"):
            found.append(f"{module}:{line} imports {target}; write jaxrl_llm.{target}")
        elif name not in ROOM_OF:
            found.append(f"{module}:{line} imports {target}, which is on no floor")
        elif ROOM_OF[name][1] != room and ROOM_OF[name][0] >= floor:
            way = "upward" if ROOM_OF[name][0] > floor else "sideways"
            found.append(f"{module}:{line} imports {way}: {target}")
    return found


def test_the_floors_list_the_rooms_that_there_are():
    """Fault 20."""
    rooms = {room_name(module_name(file)) for file in sources()}
    assert rooms - {None} == set(ROOM_OF)


def test_imports_go_down():
    found = []
    for file in sources():
        found += offences(file.read_text(), module_name(file), file.name == "__init__.py")
    assert not found, "\n".join(found)


def test_the_list_of_the_readme_goes_up():
    """A package imports only from those that stand above it, and from models/."""
    tree = (ROOT / "README.md").read_text().split("jaxrl_llm/\n")[1].split("\nmodels/")[0]
    listed = [
        name.removesuffix(".py").rstrip("/")
        for line in tree.splitlines()
        for name in re.findall(r"\w+(?:/|\.py)(?=[\s,]|$)", line)
    ]
    assert sorted(listed) == sorted(ROOM_OF.keys() - NOT_LISTED)
    found = []
    for file in sources():
        module = module_name(file)
        if (own := room_name(module)) not in listed:
            continue
        imports = imported_modules(parsed(file.read_text()), module, file.name == "__init__.py")
        for line, target in imports:
            name = room_name(target)
            if name in listed and listed.index(name) > listed.index(own):
                found.append(f"{module}:{line} imports {target}")
    assert not found, "\n".join(found)


def circle(files: dict[str, set[str]]) -> list[str]:
    """A circle of files that import each other; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for target in sorted(files.get(name, ())):
            if found := walk(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(files))), [])


def test_files_import_in_no_circle():
    """Imports inside functions count too."""
    names = {module_name(file) for file in sources()}
    files: dict[str, set[str]] = {}
    for file in sources():
        module, is_package = module_name(file), file.name == "__init__.py"
        tree = parsed(file.read_text())
        files[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                files[module] |= {f"{node.module}.{alias.name}" for alias in node.names}
        files[module] |= {target for _, target in imported_modules(tree, module, is_package)}
        files[module] = (files[module] & names) - {module, "jaxrl_llm"}
    assert circle(files) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_bottom_needs_no_jax():
    """A bad config is answered before jax is imported: the files that do so never import it."""
    package = ROOT / "jaxrl_llm"
    bottom = ("references", "data_files", "whole_files", "object_digests")
    rooms = ("typed_records", "config")
    files = [package / f"{name}.py" for name in bottom]
    for file in (*files, *(file for room in rooms for file in (package / room).rglob("*.py"))):
        name = module_name(file)
        tree = parsed(file.read_text())
        for line, target in imported_modules(tree, name, file.name == "__init__.py"):
            room = room_name(target) in (None, *rooms, *bottom)
            assert room and target.split(".")[0] != "jax", f"{file}:{line} imports {target}"


def test_workers_of_rewards_and_tools_need_no_jax():
    """A worker neither pays for jax nor takes an accelerator from the trainer."""
    code = "import sys, {}; assert 'jax' not in sys.modules, 'jax'"
    for module in ("agents.worker", "agents.setup", "rewards.workers.worker"):
        subprocess.run([sys.executable, "-c", code.format(f"jaxrl_llm.{module}")], check=True)


@pytest.mark.parametrize(
    ("source", "module", "expected"),
    [
        ("import jaxrl_llm.trainer.loop", "jaxrl_llm.learner.x", "upward"),
        ("def f():\n    from jaxrl_llm.learner import x", "jaxrl_llm.models.y", "upward"),
        ("from jaxrl_llm import rewards", "jaxrl_llm.data.x", "sideways"),
        ("from ..data import x", "jaxrl_llm.generation.engine", "sideways"),
        ("from .. import trainer", "jaxrl_llm.learner.x", "upward"),
        ("import jaxrl_llm.trainer.output", "jaxrl_llm.evaluation.x", "upward"),
        ("from jaxrl_llm.evaluation import x", "jaxrl_llm.supervision.y", "upward"),
        ("import models.base", "jaxrl_llm.learner.x", "write jaxrl_llm.models"),
        ("import benchmarks.harness", "jaxrl_llm.learner.x", "upward"),
        ("import jaxrl_llm.attic", "jaxrl_llm.learner.x", "on no floor"),
        ("import jaxrl_llm.configs.ppo", "scripts.train", "sideways"),
        ("", "jaxrl_llm.attic.x", "on no floor"),
    ],
)
def test_offences_are_found(source, module, expected):
    (found,) = offences(source, module)
    assert expected in found


def test_legal_imports_pass():
    source = "import jax\nfrom . import other\nfrom jaxrl_llm import types\nimport jaxrl_llm.models"
    assert offences(source, "jaxrl_llm.learner.x") == []
