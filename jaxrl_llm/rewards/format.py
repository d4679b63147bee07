"""Reward for a completion that has a given form."""

import re

# A pattern of the user's over text of the model's can take for ever (catastrophic backtracking),
# so this grader runs in the process pool under the time limit.
RUNS_IN_POOL = True


def format_match(
    solution_str: str,
    *,
    pattern: str,
    whole: bool = True,
    reward: float = 1.0,
    otherwise: float = 0.0,
) -> float:
    """`reward` when the regular expression matches the completion, else `otherwise`.

    whole=True: the pattern must match from the first character to the last, spaces at the ends
    aside; False: anywhere. "." matches a line break too. A think-then-answer form is
    r"<think>.*?</think>.*".
    """
    compiled = re.compile(pattern, re.DOTALL)
    matched = compiled.fullmatch(solution_str.strip()) if whole else compiled.search(solution_str)
    return reward if matched else otherwise
