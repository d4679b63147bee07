"""Reward for a completion that matches a regular expression."""

import re

# A regular expression may never end on some text (catastrophic backtracking), so this grader runs
# in the process pool under the time limit.
RUNS_IN_POOL = True


def format_match(
    solution_str: str,
    *,
    pattern: str,
    whole: bool = True,
    reward: float = 1.0,
    otherwise: float = 0.0,
) -> float:
    """`reward` if the regular expression matches the completion, else `otherwise`.

    With whole=True the pattern must match the whole stripped completion, else any part of it. "."
    also matches a line break. A pattern for think-then-answer is r"<think>.*?</think>.*".
    """
    compiled = re.compile(pattern, re.DOTALL)
    matched = compiled.fullmatch(solution_str.strip()) if whole else compiled.search(solution_str)
    return reward if matched else otherwise
