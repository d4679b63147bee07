"""Chances and intervals of held-out answers: unbiased pass@k, and 95 % bootstrap intervals."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 1000  # resamples of the prompts of a source
AT_ONCE = 100  # resamples that are in memory together
SEED = 42
ENDS = {"low": 2.5, "high": 97.5}  # percentiles


def pass_at_k(num_right: int, n: int, k: int) -> float:
    """The chance that one of k samples is right, from n samples of which `num_right` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al., 2021 (arXiv:2107.03374).
    Requires: k <= n.
    """
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def interval_metrics(sources: Sequence[str], right: np.ndarray, n: int) -> dict[str, float]:
    """Metrics under `val-aux/<source>/acc/`; `right` has n samples of each prompt, in order.

    `pass@k` for k = 2, 4, ... below n; `low` and `high` of it, of `mean@n` and of `best@n`: the
    ends of a 95 % percentile bootstrap interval over prompts. About 95 of 100 such intervals, each
    of other prompts of the kind, hold the mean over all of them. It is too narrow with few prompts,
    and has no width where all samples are right or wrong. It says nothing of another seed of the
    run.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, source in enumerate(sources):
        rows[source].append(i)
    metrics: dict[str, float] = {}
    for source, chosen in rows.items():
        counts = np.asarray(right)[chosen].reshape(-1, n).sum(axis=1).astype(int)
        columns = _of_prompts(counts, n)
        for name, ends in zip(columns, _intervals(np.stack([*columns.values()], 1)), strict=True):
            prefix = f"val-aux/{source}/acc/{name}"
            metrics |= {f"{prefix}/{end}": x for end, x in ends.items()}
            if name.startswith("pass@"):
                metrics[prefix] = float(columns[name].mean())
    return metrics


def _of_prompts(counts: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """The columns to average, by name: one number a prompt, from its right samples."""
    columns = {f"mean@{n}": counts / n}
    k = 2
    while k < n:
        by_count = np.array([pass_at_k(c, n, k) for c in range(n + 1)])
        columns[f"pass@{k}"] = by_count[counts]
        k *= 2
    return columns | ({f"best@{n}": (counts > 0).astype(float)} if n > 1 else {})


def _intervals(values: np.ndarray) -> list[dict[str, float]]:
    """The ends for each column of `values` [prompts, columns]."""
    draw, size = np.random.default_rng(SEED), len(values)
    means = np.concatenate(
        [
            values[draw.integers(size, size=(AT_ONCE, size))].mean(axis=1)
            for _ in range(NUM_RESAMPLES // AT_ONCE)
        ]
    )
    ends = {end: np.percentile(means, at, axis=0) for end, at in ENDS.items()}
    return [{end: float(x[i]) for end, x in ends.items()} for i in range(values.shape[1])]
