"""What can be checked of the house's prose: lengths, plain words, and pages equal to their data."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])  # docs/history is the archive
MOST_LINE, MOST_CELL, MOST_CHANGES = 200, 12, 25
MOST_LINES = {"README.md": 120, "docs/benchmarks.md": 150}

# Words that say less than plainer ones.
FORBIDDEN = re.compile(r"\b(told|kin|beside|anew|of then|by chance|mends)\b", re.IGNORECASE)
GENITIVE = re.compile(r"\b(that|those)\s+of\b")  # the name of the thing is read once
CODE = ("jaxrl_llm", "models", "configs", "scripts", "tests")


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def words(cell: str) -> int:
    """Words of a table cell: runs with two letters or more. A code span or a link is one word."""
    cell = re.sub(r"`[^`]*`", " code ", cell)
    cell = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    return sum(bool(re.search(r"[^\W\d_]{2}", word)) for word in cell.split())


def prose(source: str) -> str:
    """The docstrings and comments of a Python file."""
    found = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*found, *(t.string for t in tokens if t.type == tokenize.COMMENT)])


def test_words_of_a_cell():
    assert words(" at most `a b c` x 3 [two words](http://x y) ") == 5
    assert words("L = -A (4 / τ) sigmoid(τ (ρ - 1))") == 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_are_short_and_plain(page):
    lines = page.read_text().splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > MOST_LINE]
    assert not long, f"lines over {MOST_LINE} characters: {long}"
    assert len(lines) <= MOST_LINES.get(name(page), len(lines))
    matches = [
        f"{number}: {match[0]}"
        for number, line in enumerate(lines, 1)
        for pattern in (FORBIDDEN, GENITIVE)
        for match in pattern.finditer(line)
    ]
    assert not matches, matches


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_table_cells_are_short(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if words(cell) > MOST_CELL] == []


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    found = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "docs/history").glob("*.md")], ids=name)
def test_links_lead_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", without_code(page))
    for file, heading in links:
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"no file {file}"
        assert not heading or heading in anchors(target), f"no heading {file}#{heading}"


@pytest.mark.parametrize("folder", CODE)
def test_code_is_plain(folder):
    found = [
        f"{name(file)}: {match[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for text in [prose(file.read_text())]
        for pattern in (FORBIDDEN, GENITIVE)
        for match in pattern.finditer(text)
    ]
    assert not found, found


def test_the_page_of_results_and_its_figures_are_generated():
    """The committed page and figures are what ledger.py makes of the stored results."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'scripts')\n"
        "from benchmarks import ledger\n"
        "made = ledger.pages(ledger.read_results())\n"
        "print([str(file) for file, text in made.items() if file.read_text() != text])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", f"run scripts/benchmarks/ledger.py: {done.stdout}{done.stderr}"


def test_files_made_of_others_are_up_to_date():
    """scripts/write_pages.py makes them."""
    code = (
        "import sys; sys.path.insert(0, 'scripts')\nfrom write_pages import FILES, ROOT\n"
        "print([name for name, make in FILES.items() if (ROOT / name).read_text() != make()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", f"run scripts/write_pages.py: {done.stdout}{done.stderr}"


def test_the_figures_of_readme_are_the_current_ones():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = (ROOT / "README.md").read_text().split("## Results")[1].split("| Learning")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in table.splitlines()]
    compared = [row for row in rows if len(row) == 3 and re.fullmatch(r"\d\.\d\d", row[2])]
    assert len(compared) >= 5
    for ours, baseline, ratio in compared:
        theirs = re.search(r": ([\d,]+)", baseline)
        assert theirs is not None
        shown = (f"| {ours.split()[0]} ", f": {theirs[1]} |", f"| {ratio} |")
        assert any(all(part in line for part in shown) for line in page.splitlines()), shown


def test_the_figures_of_the_changelog_are_the_current_ones():
    code = (
        "import json, sys; sys.path.insert(0, 'scripts')\n"
        "from benchmarks.ledger import ratio, read_results\n"
        "print(json.dumps({n: ratio(r[-1]) for n, r in read_results().items() if r[-1]['ratio']}))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    ratios = json.loads(done.stdout)

    def of(begin: str) -> list[float]:
        return [ratio for name, ratio in ratios.items() if name.startswith(begin)]

    whole, grouped = of("attention-d"), of("grouped-")
    text = (ROOT / "CHANGELOG.md").read_text()
    for shown in (
        f"{ratios['gen-1.5b-mix']:.2f} times vLLM's",
        f"{min(whole):.2f} to {max(whole):.2f} of cuDNN's speed on whole rows",
        f"up to {max(of('packed-')):.2f} on packed rows",
        f"{min(grouped):.2f} to {max(grouped):.2f} times the speed of jax's own kernels",
        f"updates run at {ratios['update-1.5b']:.2f} (1.5B) and {ratios['update-7b']:.2f} (7B)",
    ):
        assert shown in text
    assert text.count("\n- ") <= MOST_CHANGES


def test_the_page_of_the_tests_lists_every_folder_and_file():
    tests = ROOT / "tests"
    listed = re.findall(r"`([\w/.]+)`(?=[^|]*\|[^|]*\|$)", (tests / "README.md").read_text(), re.M)
    folders = {file.parent.name + "/" for file in tests.glob("*/*.py")}
    assert sorted(listed) == sorted(folders | {file.name for file in tests.glob("*.py")})


def test_the_index_of_the_pages_lists_each():
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index]
    assert missing == ["README.md"]


def test_a_comment_of_a_field_stands_alone():
    """`seed: int  # seed of weights`, not `# of weights`: --help prints it without the name."""
    field = re.compile(r"^    \w+: .*  # ((?:of|that|those)\b.*)", re.MULTILINE | re.IGNORECASE)
    files = [file for folder in CODE[:-1] for file in (ROOT / folder).rglob("*.py")]
    found = {name(file): field.findall(file.read_text()) for file in files}
    assert not any(found.values()), {file: lines for file, lines in found.items() if lines}


def test_the_readme_gives_the_two_commands_that_every_change_runs():
    """`.ci/run` takes them from there."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("pip install")] == [
        "pip install -e . && python scripts/train.py --config=configs/ppo.py",
        "pip install -e '.[test]' && pytest",
    ]
