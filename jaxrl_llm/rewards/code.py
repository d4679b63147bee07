"""Reward for a Python program or function that passes the tests of its row.

The code of the model runs in a sandbox (`sandbox/box.py`). It never has the expected values: a
program's output is compared here, and asserts run in a second sandbox that calls the first.
"""

import json
import math
import re
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxrl_llm.sandbox.box import Limits, Outcome, Sandbox
from jaxrl_llm.sandbox.values import comparable, decode, no_object

RUNS_IN_POOL = True  # a call takes seconds
OUTPUT_KB = 8192  # what a program may print, and a judge may write
MODULE = "jaxrl_llm.sandbox."
ROUNDING = 1e-6  # relative; floats of a right answer
OVER = "not run: the time of the row was over"

# A fence opens a block; the same marks, or more, alone on a line close it.
OPENING = re.compile(r"^([ \t>]*)(`{3,}|~{3,})([^`\n]*)\n", re.MULTILINE)
PYTHON = re.compile(r"(?:python|py)[ \t]*(?:[23](?:\.\d+)?)?(?![\w+#-])|\{\.python", re.IGNORECASE)
# Strings and comments of Python, in which a line of marks closes nothing.
STRINGS = (
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'(?:\\.|[^\\])*?(?:\'\'\'|\Z)|'
    r'"(?:\\.|[^"\\\n])*+"?|\'(?:\\.|[^\'\\\n])*+\'?|#[^\n]*'
)
STATEMENT = re.compile(
    r"^\s*(?:def|class|import|from|for|while|if|print)\b|^[^\n=]*\w[ \t]*=[^=]", re.MULTILINE
)
FORMS = (
    'Give {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function, '
    '{"assert_case": [...]}, a list of asserts, or LiveCodeBench\'s list of {"input", "output", '
    '"testtype"}.'
)


@dataclass(frozen=True)
class Program:
    """The program gets `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Call:
    """The function gets `arguments` and must return `expected`."""

    name: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class Assert:
    """Statements, with asserts, that must not raise."""

    source: str


Case = Program | Call | Assert


def code(
    solution_str: str,
    ground_truth: Any,
    *,
    scoring: Literal["all", "share"] = "all",
    case_s: float = 10.0,
    total_s: float = 25.0,
    memory_mb: int = 1024,
    limits_only: bool = False,
) -> dict[str, Any]:
    """1 if the code passes all tests of its row; "share": the part of the tests that it passes.

    Limits: `case_s` seconds for a test, `memory_mb`, and `total_s` seconds for all tests of a row;
    later tests count as failed. `limits_only` runs the code without namespaces: see SECURITY.md.
    Raises ValueError for a row without tests, and where code cannot be isolated; RuntimeError when
    the sandbox was lost.
    """
    cases = read_truth(ground_truth)
    source = extract_code(solution_str)
    if source is None:
        return {"score": 0.0, "reason": "no ```python block in the completion"}
    limits = Limits(seconds=case_s, memory_mb=memory_mb, output_kb=OUTPUT_KB)
    failures: list[str] = []
    until = time.monotonic() + total_s
    for index, why in enumerate(_run_all(source, cases, limits, until, limits_only)):
        if why:
            failures.append(f"test {index + 1} of {len(cases)}: {why}")
            if scoring == "all":
                return {"score": 0.0, "reason": failures[0]}
    share = 1.0 - len(failures) / len(cases)
    result = {"score": share if scoring == "share" else 1.0}
    return result | ({"reason": failures[0]} if failures else {})


def prepare(*, limits_only: bool = False, scoring: str = "all", **_: Any) -> None:
    """Before a run: whether code can be isolated here. Raises ValueError."""
    if scoring not in ("all", "share"):
        raise ValueError(f"scoring={scoring!r}: choose 'all' or 'share'")
    with Sandbox(limits_only=limits_only) as sandbox:
        outcome = sandbox.run_source("print(1)")
    if not outcome.succeeded:
        raise ValueError(f"a program cannot run in the sandbox: {outcome.describe()}")


def extract_code(completion: str) -> str | None:
    """The last block of Python: tagged so, else without a tag, else indented by four spaces.

    A block that the length limit has cut counts.
    """
    blocks = list(_fenced_blocks(completion))
    tagged = [source for tag, source in blocks if PYTHON.match(tag)]
    untagged = [source for tag, source in blocks if not tag]
    statements = [source for source in untagged if STATEMENT.search(source)]  # unlike an output
    found = tagged or statements or untagged
    if not blocks:
        found = _indented_blocks(completion)
    return found[-1] if found else None


def _fenced_blocks(completion: str) -> Iterator[tuple[str, str]]:
    """Tag and text of each fenced block."""
    position = 0
    while opening := OPENING.search(completion, position):
        indent, marks, tag = opening.groups()
        tag = tag.strip()
        closing = rf"(?P<end>^[ \t>]*{marks[0]}{{{len(marks)},}}[ \t]*$)"
        if not tag or PYTHON.match(tag):
            closing += f"|{STRINGS}"
        matches = re.compile(closing, re.MULTILINE | re.DOTALL).finditer(completion, opening.end())
        end = next((match for match in matches if match["end"] is not None), None)
        source = completion[opening.end() : end.start() if end else len(completion)]
        lines = [line.removeprefix(indent) for line in source.splitlines(keepends=True)]
        yield tag, "".join(lines)
        if end is None:
            return
        position = end.end()


def _indented_blocks(completion: str) -> list[str]:
    """Markdown's blocks of lines with four spaces, behind an empty line, that have statements."""
    blocks: list[list[str]] = [[]]
    after_empty = True
    for line in completion.splitlines(keepends=True):
        if line.startswith(("    ", "\t")) and (blocks[-1] or after_empty):
            blocks[-1].append(line)
        elif blocks[-1] and line.strip():
            blocks.append([])
        elif blocks[-1]:
            blocks[-1].append(line)
        after_empty = not line.strip()
    sources = [textwrap.dedent("".join(block)) for block in blocks]
    return [source for source in sources if STATEMENT.search(source)]


# ------------------------------------------------------------------------- tests of a row


def read_truth(ground_truth: Any) -> list[Case]:
    """The tests of a row, as verl, LiveCodeBench or MBPP write them. Raises ValueError."""
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            raise ValueError(f"the ground truth of a code row is not JSON. {FORMS}") from None
    try:
        cases = list(_cases(tests))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"the ground truth has no tests ({error!r}). {FORMS}") from None
    if not cases:
        raise ValueError(f"the ground truth has no tests. {FORMS}")
    return cases


def _cases(tests: Any) -> Iterator[Case]:
    if isinstance(tests, list):
        for test in tests:
            yield Assert(test) if isinstance(test, str) else _live_code_bench(test)
        return
    yield from (Assert(_text(source)) for source in tests.get("assert_case") or ())
    if tests.get("assert_case"):
        return
    name = tests.get("fn_name")
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        yield _call(name, given, expected) if name else _program(given, expected)


def _live_code_bench(test: Mapping[str, Any]) -> Case:
    if test.get("testtype", "stdin") == "stdin":
        return _program(test["input"], test["output"])
    metadata = test.get("metadata") or {}
    name = test.get("fn_name") or metadata.get("func_name") or metadata["fn_name"]
    return _call(name, test["input"], test["output"])


def _program(given: Any, expected: Any) -> Program:
    return Program(_joined(given), _joined(expected))


def _call(name: str, given: Any, expected: Any) -> Call:
    """Arguments are a list, or text with one JSON value a line; then the result is JSON too."""
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        return Call(name, arguments, json.loads(expected))
    return Call(_text(name), list(given), expected)


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(_text(line) for line in text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where text belongs")
    return value


# ------------------------------------------------------------------------- running


def _run_all(
    source: str, cases: list[Case], limits: Limits, until: float, limits_only: bool
) -> Iterator[str]:
    """Why each test failed, in order; nothing for one that passed."""
    if isinstance(cases[0], Program):
        yield from _run_programs(source, cases, limits, until, limits_only)
        return
    rest = cases
    while rest:
        left = until - time.monotonic()
        if left <= 0:
            yield from [OVER] * len(rest)
            return
        answers = _judge(source, rest, limits, left, limits_only)
        yield from (_failure(*pair) for pair in zip(rest, answers, strict=False))
        rest = rest[len(answers) :]  # a lost candidate is started again for those after it


def _run_programs(
    source: str, cases: list[Case], limits: Limits, until: float, limits_only: bool
) -> Iterator[str]:
    with Sandbox(limits, limits_only=limits_only) as sandbox:
        for case in cases:
            assert isinstance(case, Program)
            left = until - time.monotonic()
            if left <= 0:
                yield OVER
                continue
            sandbox.start(
                ["-m", MODULE + "program"],
                files={"main.py": source},
                stdin=case.stdin,
                seconds=left,
            )
            outcome = sandbox.outcome()
            _check(outcome)
            if not outcome.succeeded:
                yield outcome.describe()
            else:
                yield "" if same_output(outcome.stdout, case.expected) else "another output"


def _judge(
    source: str, cases: list[Case], limits: Limits, left: float, limits_only: bool
) -> list[list[Any]]:
    """The judge's answers for the first cases: for all of them unless the code was lost."""
    request = {
        "code": source,
        "seconds": limits.seconds,
        "items": [["call", c.name, c.arguments] if isinstance(c, Call) else
                  ["test", c.source] for c in cases if not isinstance(c, Program)],
    }  # fmt: skip
    ours, theirs = socket.socketpair()
    own = Limits(seconds=left, memory_mb=limits.memory_mb)
    judging = Limits(seconds=left, memory_mb=limits.memory_mb, output_kb=OUTPUT_KB)
    with (
        Sandbox(own, limits_only=limits_only, channel=ours) as candidate,
        Sandbox(judging, limits_only=limits_only, channel=theirs) as judge,
    ):
        candidate.start(["-m", MODULE + "candidate"])
        judge.start(["-m", MODULE + "judge"], stdin=json.dumps(request))
        ours.close()
        theirs.close()
        outcome = judge.outcome()
    _check(outcome)
    answers = [json.loads(line) for line in outcome.result.split("\n")[:-1]]
    if answers and answers[-1][0] == "broken":
        return [["failed", answers[-1][1]]] * len(cases)
    if len(answers) < len(cases) and not (answers and answers[-1][0] == "lost"):
        answers.append(["failed", outcome.describe()])
    return answers


def _check(outcome: Outcome) -> None:
    """RuntimeError for a sandbox that was lost: that says nothing about the code."""
    if outcome.why == "lost":
        raise RuntimeError(outcome.describe())


def _failure(case: Case, answer: list[Any]) -> str:
    """Why a test failed, from what the judge says."""
    kind, *rest = answer
    if kind != "value":
        return "" if kind == "passed" else str(rest[0])
    assert isinstance(case, Call)
    try:
        value = comparable(decode(rest[0], no_object))
        expected = comparable(case.expected)
        # APPS wraps the result in a list.
        wrapped = isinstance(expected, list) and len(expected) == 1
        same = same_result(value, expected) or wrapped and same_result(value, expected[0])
        return "" if same else "another result"
    except (TypeError, ValueError, LookupError, RecursionError):
        return "a result that is no data"


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line: as text without outer spaces, then as numbers."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(ours: list[str], theirs: list[str]) -> bool:
    if len(ours) != len(theirs):
        return False
    try:
        return all(_same_number(Decimal(a), Decimal(b)) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:
        return False


def _same_number(ours: Decimal, theirs: Decimal) -> bool:
    """Integers compare exactly; the right answer of a fraction allows for rounding."""
    if ours == theirs or theirs == theirs.to_integral_value():
        return ours == theirs
    return math.isclose(ours, theirs, rel_tol=ROUNDING, abs_tol=ROUNDING**2)


def same_result(result: Any, expected: Any) -> bool:
    """Compare plain data: floats up to rounding, all else exactly."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(same_result, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(
            same_result(value, expected[key]) for key, value in result.items()
        )
    if isinstance(expected, float) and isinstance(result, int | float):
        return result == expected or math.isclose(
            result, expected, rel_tol=ROUNDING, abs_tol=ROUNDING**2
        )
    return result == expected
