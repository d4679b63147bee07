"""Predicted against measured steps: python scripts/benchmarks/planned_steps.py [--write]

Plans every step of docs/measured_steps.jsonl without compiling, and prints the errors. `--write`
puts the table into docs/planner.md.
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
from jaxrl_llm.models.config import GatedDelta, Latent, ModelConfig  # noqa: E402
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
    """The rows of the file but those of older versions, which computed something else.

    `every` 4 leaves out three of four.
    """
    rows = map(json.loads, STEPS.read_text().splitlines())
    for row in [row for row in rows if "older" not in row][::every]:
        work = work_of_row(row)
        devices = Devices(
            mesh=work.config.mesh,
            hosts=1,
            rates=rates_of(row["hardware"]),
            of_host=row["devices"],
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
        shape_of(row["shape"]),
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


def shape_of(name: str) -> ModelConfig:
    """A named shape, Qwen2.5-3B, which has no benchmarks of its own, or layers of a mixture."""
    if name in SHAPES:
        return SHAPES[name]
    if name in CUT:
        return CUT[name]()
    assert name == "qwen2.5-3b"
    small = SHAPES["qwen2.5-1.5b"]
    return replace(
        small,
        hidden_size=2048,
        intermediate_size=11_008,
        num_layers=36,
        num_heads=16,
        sliding_window=(),
    )


def _few_layers(name: str, mixture: dict[str, int], **sizes: Any) -> ModelConfig:
    """Four layers of a published shape with these sizes."""
    whole = SHAPES[name]
    assert whole.mixture is not None
    sizes = {
        "vocab_size": 32_768,
        "num_layers": 4,
        "sliding_window": whole.sliding_window[:4],
        **sizes,
    }
    return replace(whole, mixture=replace(whole.mixture, **mixture), **sizes)


# Rows of docs/results.jsonl name the experts and the hidden size. What they do not name is that of
# the published model here, but for a vocabulary of 32,768 where its own would not fit the card.
CUT = {
    "llama-70b-16layers": lambda: replace(
        SHAPES["llama-3.1-70b"], num_layers=16, sliding_window=()
    ),
    "hybrid-2b": lambda: ModelConfig(
        family="qwen3_5_text",
        vocab_size=248_320,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=24,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        rotary_factor=0.25,
        unit_offset=True,
        qk_norm=True,
        tie_word_embeddings=True,
        attention_gate=True,
        delta=GatedDelta(
            period=4, key_heads=16, value_heads=16, key_dim=128, value_dim=128, conv_size=4
        ),
    ),
    "qwen3moe-4layers": lambda: _few_layers("qwen3-30b-a3b", {"num_experts": 64}),
    "gptoss-4layers": lambda: _few_layers(
        "gpt-oss-20b",
        {"num_experts": 16, "expert_size": 2048},
        hidden_size=2048,
        intermediate_size=2048,
    ),
    "deepseek-4layers": lambda: _few_layers(
        "deepseek-v3",
        {
            "num_experts": 64,
            "experts_per_token": 6,
            "expert_size": 1408,
            "shared_size": 2816,
            "dense_layers": 1,
            "num_groups": 1,
            "groups_per_token": 1,
        },
        hidden_size=2048,
        intermediate_size=11_264,
        num_heads=16,
        num_kv_heads=16,
        vocab_size=163_840,
        latent=Latent(kv_rank=512, query_rank=None, rope_dim=64, value_dim=128),
    ),
}


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
