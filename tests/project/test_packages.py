"""The explicit package list equals the folders: a forgotten one would be missing in a wheel."""

import ast
import inspect
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_package_list_equals_folders():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapped = setuptools["package-dir"]
    folders = {file.parent for top in mapped.values() for file in (ROOT / top).rglob("*.py")}
    found = set()
    for folder in folders:
        parts = folder.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "jaxrl_llm" else ("jaxrl_llm", *parts)))
    assert sorted(found) == sorted(setuptools["packages"])
    missing = [folder for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, "packages without __init__.py"


def test_constraints_pin_exact_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all("==" in pin and "://" not in pin and "@" not in pin for pin in pins)


def test_transformers_has_what_pyright_reads_of_it():
    """Pyright takes these names from our short files, so it cannot see that one is gone."""
    import transformers
    from transformers.utils.hub import cached_file

    stubs = ROOT / ".pyright/transformers"
    lines = ast.parse((stubs / "__init__.pyi").read_text()).body
    names = {line.target.id for line in lines if isinstance(line, ast.AnnAssign)}
    assert names and names <= set(dir(transformers))
    (function,) = ast.parse((stubs / "utils/hub.pyi").read_text()).body[1:]
    arguments = list(inspect.signature(cached_file).parameters)
    assert [x.arg for x in function.args.args] == arguments[:2]
