"""Write the files that are made of others: python scripts/write_pages.py

| file | made of |
|---|---|
| jaxrl_llm/report/page/metrics.json | the tables of docs/metrics.md |
| docs/api.md | the docstrings of what `import jaxrl_llm` offers |
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxrl_llm

ROOT = Path(__file__).resolve().parents[1]
SAME = "as for the actor"  # the text of a metric that the actor has too


def metric_texts() -> str:
    """The names of docs/metrics.md with their texts, as JSON for the report."""
    texts: dict[str, str] = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            names, text = (cell.strip() for cell in line.strip("|").split("|"))
            texts |= dict.fromkeys(re.findall("`([^`]+)`", names), plain(text))
    for name in [name for name, text in texts.items() if text == SAME]:
        del texts[name]
        for one in expanded(name):
            own = one.split("/")[-1].replace("learning_rate", "lr")
            texts[one] = texts[f"actor/{own}"]
    return json.dumps(texts, ensure_ascii=False, indent=0) + "\n"


def expanded(name: str) -> list[str]:
    """The names that a choice stands for: a/{b,c} is a/b and a/c."""
    before, _, rest = name.partition("{")
    if not rest:
        return [name]
    inside, _, after = rest.partition("}")
    return [f"{before}{one}{after}" for one in inside.split(",")]


def plain(text: str) -> str:
    """A cell of a table without links, code marks and footnotes."""
    text = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", text)  # a link in brackets is only a pointer
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    return re.sub(r"\s*[¹²³⁴-⁹]+", "", text)


# ------------------------------------------------------------------------- docs/api.md

API_TOP = """# API reference

The public names of `import jaxrl_llm as rl`. [library.md](library.md) has a complete program.

Written by `python scripts/write_pages.py` from the docstrings; do not edit this page by hand.
What is not on this page may change in any version: [CHANGELOG.md](../CHANGELOG.md#versions).
"""
BLOCK = re.compile(r"^(Args|Returns|Raises|Requires|Guarantees):", re.MULTILINE)
RESULTS = ("OpenModel", "AsyncModel", "Answer", "Completion", "Summary", "StepReport", "Sample")
RECORDS = {  # lists of jaxrl_llm.config, and the headings of their records
    "ALGORITHMS": "Algorithms",
    "GRADERS": "Rewards",
    "TOOLS": "Tools",
    "ENVIRONMENTS": "Environments",
    "TASKS": "Tasks",
    "PRIORITIES": "Priorities of prompts",
}


def api_page() -> str:
    """The functions, what they return, and the records of a config."""
    public = {name: getattr(jaxrl_llm, name) for name in dir(jaxrl_llm)}
    functions = [name for name, value in public.items() if inspect.isfunction(value)]
    lines = [API_TOP, "## Functions", ""]
    for name in functions:
        lines += function_lines(f"rl.{name}", tree_of(public[name]), "###")
    lines += ["## What they return, and what callbacks get", ""]
    for name in RESULTS:
        lines += class_lines(name, public[name])
    lines += ["## Records of a config", "", "[config.md](config.md) has the fields of each.", ""]
    parts = [v for name, v in public.items() if name.endswith("Config") and inspect.isclass(v)]
    groups = {"Parts": parts} | {heading: public[name] for name, heading in RECORDS.items()}
    for heading, records in groups.items():
        lines += [f"### {heading}", "", *map(record_line, records), ""]
    return "\n".join(lines).rstrip() + "\n"


def record_line(record: type) -> str:
    """A record with the first sentence of its docstring."""
    text = inspect.getdoc(record) or ""
    return f"- `{record.__name__}`: {text.splitlines()[0]}"


def tree_of(value: Any) -> Any:
    """The syntax tree of a function or a class, with the types as they are written."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def function_lines(name: str, tree: Any, heading: str) -> list[str]:
    """A heading, the signature, and the docstring."""
    arguments = [*signature(tree)]
    returned = f" -> {ast.unparse(tree.returns)}".replace("'", "") if tree.returns else ""
    one = f"{name}({', '.join(arguments)}){returned}"
    several = [f"{name}(", *(f"    {argument}," for argument in arguments), f"){returned}"]
    shown = [one] if len(one) <= 100 else several
    docstring = ast.get_docstring(tree) or ""
    return [f"{heading} {name}", "", "```python", *shown, "```", "", *paragraphs(docstring), ""]


def signature(tree: Any) -> Iterator[str]:
    """The arguments of a function without `self`, each with its type and default."""
    given = [argument for argument in tree.args.args if argument.arg != "self"]
    defaults = [None] * (len(given) - len(tree.args.defaults)) + tree.args.defaults
    for argument, default in zip(given, defaults, strict=True):
        yield argument_text(argument, default)
    if tree.args.kwonlyargs:
        yield "*"
    for argument, default in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True):
        yield argument_text(argument, default)
    if tree.args.kwarg:
        yield "**settings"


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    """An argument as in a signature."""
    kind = f": {ast.unparse(argument.annotation)}".replace("'", "") if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


def class_lines(name: str, value: type) -> list[str]:
    """A class with its fields and public methods."""
    tree = tree_of(value)
    lines = [f"### rl.{name}", "", *paragraphs(ast.get_docstring(tree) or ""), ""]
    source = textwrap.dedent(inspect.getsource(value)).splitlines()
    fields = [
        f"- `{node.target.id}`: `{ast.unparse(node.annotation)}`{comment(source[node.lineno - 1])}"
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    ]
    lines += [*fields, ""] if fields else []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            if node.decorator_list:  # a property
                kind = f": `{ast.unparse(node.returns)}`" if node.returns else ""
                lines += [f"- `{node.name}`{kind}, {ast.get_docstring(node)}", ""]
            else:
                lines += function_lines(f"{name}.{node.name}", node, "####")
    return lines


def comment(line: str) -> str:
    """The comment of a field."""
    text = line.partition("  # ")[2]
    return f", {text}" if text else ""


def paragraphs(docstring: str) -> list[str]:
    """A docstring as Markdown: arguments are a list, and code stays code."""
    lines = []
    inside = ""  # the block of a line, such as Args
    for line in docstring.splitlines():
        block = BLOCK.match(line)
        if block:
            inside = block[1]
            rest = line[block.end() :].strip()
            lines += ["", f"**{inside}**{': ' + rest if rest else ''}"]
            lines += [""] if inside == "Args" else []
        elif inside == "Args" and (argument := re.match(r"    (\w[\w, ]*): (.*)", line)):
            names = ", ".join(f"`{name}`" for name in argument[1].split(", "))
            lines.append(f"- {names}: {argument[2]}")
        elif inside:
            lines.append(("  " if inside == "Args" and line else "") + line.strip())
        else:
            lines.append(line)
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).splitlines()


FILES: dict[str, Callable[[], str]] = {
    "jaxrl_llm/report/page/metrics.json": metric_texts,
    "docs/api.md": api_page,
}


def main() -> None:
    """Write every file that has changed."""
    for name, make in FILES.items():
        file, text = ROOT / name, make()
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
