"""The thresholds of the rollout correction, as a config writes them. Imports no jax.

`algorithms/importance.py` and `rejection.py` compute with them.
"""

import math
from typing import NamedTuple

from jaxrl_llm.references import nearest

RULES = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_sum_k{i}" for i in (1, 2, 3)),
    *(f"seq_mean_k{i}" for i in (1, 2, 3)),
    *(f"seq_max_k{i}" for i in (2, 3)),  # k1 has a sign: its maximum means nothing
)


class Rule(NamedTuple):
    """A rejection rule: it keeps tokens or responses with lower <= distance <= upper."""

    name: str
    lower: float
    upper: float


def rule_names(text: str) -> list[str]:
    """The rules that text names, separated by commas, each once. ValueError for other names."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in RULES:
            raise ValueError(
                f"no rejection rule {name!r}{nearest(name, RULES)}\nThe rules are: "
                f"{', '.join(RULES)}"
            )
    return names


def parse_rules(names: str | None, thresholds: float | str | None) -> tuple[Rule, ...]:
    """The rules of verl's `rollout_rs` and `rollout_rs_threshold`.

    `names` are separated by commas; there is one threshold for all of them or one each. The
    threshold of a k1 rule is a band "0.5_2.0" of exp(k1), the ratio of sampler to trainer; a
    number u means "1/u_u". All others have the largest distance. Raises ValueError for other text.
    """
    chosen = rule_names(names or "")
    texts = [part.strip() for part in str(thresholds).split(",")] if thresholds is not None else []
    if not chosen or len(texts) not in (1, len(chosen)):
        raise ValueError(
            f"rollout_rs={names!r} with rollout_rs_threshold={thresholds!r}: give rules, and one "
            'threshold for all or one each, such as "token_k1,seq_mean_k3" with "0.5_2.0,0.01"'
        )
    texts = texts * len(chosen) if len(texts) == 1 else texts
    return tuple(_rule(name, text) for name, text in zip(chosen, texts, strict=True))


def _rule(name: str, text: str) -> Rule:
    lower_text, band, upper_text = text.rpartition("_")
    ratio = name.endswith("k1")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if band else 1.0 / upper
    except (ValueError, ZeroDivisionError):
        upper = lower = 0.0
    if not upper > 0 or (ratio and not 0 < lower <= upper) or (band and not ratio):
        wanted = 'a band of the ratio such as "0.5_2.0"' if ratio else "a number over 0"
        raise ValueError(f"the threshold {text!r} of the rejection rule {name}: expected {wanted}")
    if ratio:
        return Rule(name, math.log(lower), math.log(upper))
    return Rule(name, -math.inf, upper)


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of a threshold as in verl: a number has no lower bound, "0.5_2.0" is a band.

    Raises ValueError unless 0 < lower <= upper.
    """
    lower_text, _, upper_text = str(threshold).rpartition("_")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if lower_text else None
    except ValueError:
        upper, lower = 0.0, None
    if not upper > 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(
            f"an importance threshold of {threshold!r}: expected a positive number such as "
            '2.0, which truncates weights, or a band such as "0.5_2.0", outside of which they are 0'
        )
    return lower, upper
