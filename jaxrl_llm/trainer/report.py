"""The summary at the end of a run."""

from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.trainer.run import Summary


def print_summary(summary: Summary, config: Config) -> None:
    """What changed, how fast, and where everything is; process 0 alone prints."""
    if is_main():
        print("\n".join(summary_lines(summary, config)), flush=True)


def summary_lines(summary: Summary, config: Config) -> list[str]:
    """The summary as lines of plain text."""
    totals, run_dir = summary.totals, summary.run_dir
    state = "interrupted" if summary.interrupted else "finished"
    lines = [f"{state} at step {summary.step} of {config.total_steps} in {summary.seconds:.0f} s"]
    if totals.first_reward is not None and totals.last_reward is not None:
        lines.append(f"  reward          {totals.first_reward:.3f} -> {totals.last_reward:.3f}")
    for name, last in totals.last.items():
        first = f"{totals.first[name]:.3f} -> " if name in totals.first else ""
        lines.append(f"  {name}  {first}{last:.3f}")
    if totals.seconds:
        lines.append(f"  tokens/s        {totals.tokens / totals.seconds:,.0f}")
        lines.append("  time a stage")
        for name, seconds in totals.stage_seconds.items():
            lines.append(f"    {name:<40} {seconds:8.1f} s  {seconds / totals.seconds:4.0%}")
    lines += [
        f"  checkpoint      {summary.checkpoint}",
        f"  metrics         {run_dir / 'metrics.jsonl'}",
    ]
    if config.log.tensorboard:
        lines.append(f"  TensorBoard     tensorboard --logdir {run_dir / 'tensorboard'}")
    if config.log.trace:
        lines.append(f"  trace           {run_dir / 'trace'}")
    lines.append(
        f"  export          python scripts/export_hf.py --checkpoint={summary.checkpoint} "
        f"--output={run_dir / 'export'}"
    )
    if summary.interrupted:
        again = "run the same command again"
        if config.resume != "auto":
            again += " with --config.resume=auto"
        lines.append(f"  go on           {again}; it resumes from the checkpoint")
    return lines
