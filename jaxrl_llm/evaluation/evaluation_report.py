"""The output of `jaxrl evaluate`: a table, and every answer."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.evaluation.evaluate import Validation
from jaxrl_llm.observability.trace import as_text


def table(metrics: Mapping[str, float], num_samples: Mapping[str, int], n: int) -> str:
    """A line for each data source: prompts, shares of right answers with intervals, mean grade."""
    rows = [_row(source, count, metrics, n) for source, count in num_samples.items()]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _row(source: str, num_samples: int, metrics: Mapping[str, float], n: int) -> dict[str, str]:
    row = {"source": source, "prompts": str(num_samples // n)}
    core, more = f"val-core/{source}/acc/", f"val-aux/{source}/acc/"
    row[f"mean@{n}"] = _with_interval(metrics[f"{core}mean@{n}"], metrics, f"{more}mean@{n}")
    k = 2
    while f"{more}pass@{k}" in metrics:
        row[f"pass@{k}"] = _with_interval(metrics[f"{more}pass@{k}"], metrics, f"{more}pass@{k}")
        k *= 2
    if n > 1:
        best = metrics[f"{core}best@{n}/mean"]
        row[f"best@{n}"] = _with_interval(best, metrics, f"{more}best@{n}")
        if f"{core}maj@{n}/mean" in metrics:
            row[f"maj@{n}"] = f"{metrics[f'{core}maj@{n}/mean']:.3f}"
    row["mean grade"] = f"{metrics[f'val-core/{source}/reward/mean@{n}']:.3f}"
    failures = metrics[f"val-aux/{source}/failures"]
    return row | ({"not graded": f"{failures:.0f}"} if failures else {})


def _with_interval(value: float, metrics: Mapping[str, float], name: str) -> str:
    return f"{value:.3f} ({metrics[f'{name}/low']:.3f} to {metrics[f'{name}/high']:.3f})"


def all_answers(validation: Validation) -> list[dict[str, Any]]:
    """Every answer with its grade, in the order of the rows. Every process must call it."""
    samples = zip(
        validation.indices,
        validation.prompts,
        validation.completions,
        validation.grades,
        strict=True,
    )
    rest = enumerate(validation.preds)
    own = [
        {
            "index": index,
            "data_source": prompt.data_source,
            "row": prompt.row,
            "prompt": prompt.text,
            "ground_truth": as_text(prompt.ground_truth),
            "response": completion.text,
            "pred": as_text(pred),
            "grade": float(grade),
            "failures": validation.failures.get(place, []),
            "num_tokens": len(completion.tokens),
            "finished": completion.finished,
        }
        for (index, prompt, completion, grade), (place, pred) in zip(samples, rest, strict=True)
    ]
    everyone = gather_objects(own, "answers")
    return sorted((row for one in everyone for row in one), key=lambda row: row["index"])
