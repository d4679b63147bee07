"""Predicted against measured steps: python scripts/benchmarks/planned_steps.py [--write]

Plans every step of docs/measured_steps.jsonl without compiling, and prints the errors. `--write`
puts the table into docs/planner.md. A row has the name of a shape, or the sizes of its model as
`hf_config`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.placed_run import get_config  # noqa: E402
from benchmarks.run_config import run_config  # noqa: E402
from jaxrl_llm.config import apply_override  # noqa: E402
from jaxrl_llm.estimate.devices import Devices  # noqa: E402
from jaxrl_llm.estimate.estimate import Estimate, placed  # noqa: E402
from jaxrl_llm.estimate.rates import rates_of  # noqa: E402
from jaxrl_llm.estimate.work import Job, Work, work_of  # noqa: E402
from jaxrl_llm.models.config import ModelConfig  # noqa: E402
from jaxrl_llm.models.families import config_from_hf  # noqa: E402
from jaxrl_llm.models.shapes import SHAPES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "docs" / "measured_steps.jsonl"
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One measured step and its prediction."""

    row: dict[str, Any]
    planned: Estimate

    @property
    def step_error(self) -> float:
        return self.planned.seconds / self.row["step_seconds"] - 1.0

    @property
    def peak_error(self) -> float | None:
        """None where no peak was measured."""
        measured = self.row["peak_gib"]
        return None if measured is None else self.planned.peak / GIB / measured - 1.0


def compared_steps(every: int = 1) -> Iterator[Compared]:
    """The rows of the file without older versions, which computed something else.

    `every` 4 leaves out three of four.
    """
    rows = map(json.loads, STEPS.read_text().splitlines())
    for row in [row for row in rows if "older" not in row][::every]:
        work = work_of_row(row)
        devices = Devices(
            mesh=work.config.mesh,
            hosts=1,
            rates=rates_of(row["hardware"]),
            host_devices=row["devices"],
        )
        planned = placed(work, work.config, devices)
        if not row.get("run"):
            planned = replace(planned, host=0.0)  # the benchmark of a step has no metrics
        yield Compared(row=row, planned=planned)


def work_of_row(row: dict[str, Any]) -> Work:
    """The work that was measured, with the pass for the old log-probs if that version had one."""
    if row.get("run"):
        config = get_config()
        for text in row["overrides"]:
            config = apply_override(config, *text.split("=", 1))
        return work_of(config)
    config = run_config(
        model_of(row),
        algorithm=row["algorithm"],
        lengths=(row["prompt"], row["response"]),
        groups=tuple(row["groups"]),
        devices=1,
        overrides=[tuple(text.split("=", 1)) for text in row["overrides"]],
    )
    work = work_of(config)
    extra = "old_log_prob"
    if extra in row["stages"] and extra not in {job.stage for job in work.jobs}:
        first, *others = work.jobs
        work = replace(work, jobs=(first, Job(stage=extra, does="pass", role="actor"), *others))
    return work


def model_of(row: dict[str, Any]) -> ModelConfig:
    """The model of a row: a named shape, or the sizes that the row has."""
    return config_from_hf(row["hf_config"]) if "hf_config" in row else SHAPES[row["shape"]]


def table_lines() -> list[str]:
    """The table of docs/planner.md."""
    lines = [
        "| step | devices | measured, s | predicted, s | error | peak, GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in compared_steps():
        row, peak = each.row, each.peak_error
        measured = "" if peak is None else f"{row['peak_gib']:.1f}"
        predicted = "" if peak is None else f"{each.planned.peak / GIB:.1f}"
        lines.append(
            f"| {row['id']} | {row['devices']} × {row['hardware'].upper()} "
            f"| {row['step_seconds']:.2f} | {each.planned.seconds:.2f} | {each.step_error:+.0%} "
            f"| {measured} | {predicted} | {'' if peak is None else f'{peak:+.0%}'} |"
        )
    return lines


def main() -> None:
    lines = table_lines()
    print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))


if __name__ == "__main__":
    main()
