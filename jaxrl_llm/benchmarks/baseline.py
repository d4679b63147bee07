"""The peers' work and what they answered, as rows beside ours. No jax."""

from typing import Any

from jaxrl_llm.benchmarks.options import Options
from jaxrl_llm.benchmarks.peers import PEERS, run_peer
from jaxrl_llm.benchmarks.records import Row
from jaxrl_llm.benchmarks.roofline import H200
from jaxrl_llm.benchmarks.workloads import generation_workloads, training_workloads
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.models.shapes import SHAPES


def run_peers(options: Options) -> list[Row]:
    """Every peer of the command on every shape, one process after the other."""
    rows = []
    for shape in options.shapes:
        for name in PEERS[options.command]:
            for answer in run_peer(name, _work(options, shape), python=options.peer_python):
                rows.append(_row(options, shape, answer))
    return rows


def _work(options: Options, shape: str) -> dict[str, Any]:
    config = options.config(shape)
    work: dict[str, Any] = {
        "hf_config": to_hf_config(SHAPES[shape]),
        "repeats": options.repeats,
        "remat": config.actor.remat != "none",
        "learning_rate": config.actor.optimizer.learning_rate,
    }
    if options.command == "generation":
        work["cases"] = [
            {
                "case": one.name,
                "prompts": one.prompts,
                "samples": one.samples,
                "prompt_length": one.prompt_length,
                "limits": one.limits,
            }
            for one in generation_workloads(options, shape)
            if len(set(one.prompt_lengths)) == 1  # the peers take no others
        ]
    else:
        work["cases"] = [
            {
                "case": one.name,
                "kind": one.kind,
                "prompt_length": one.prompt_length,
                "lengths": one.lengths,
            }
            for one in training_workloads(options, shape)
            if one.kind != "values"  # the same pass with a smaller head
        ]
    return work


def _row(options: Options, shape: str, answer: dict[str, Any]) -> Row:
    case = answer.get("case", "all")
    seconds = tuple(answer.get("seconds", ()))
    row = Row(
        benchmark=options.command,
        shape=shape,
        case=case,
        who=answer["peer"],
        seconds=seconds,
        memory_bytes=answer.get("memory_bytes"),
        error=answer.get("error", ""),
        versions=answer.get("versions", {}),
    )
    if seconds:
        row.figures.update(_figures(options, shape, row))
    return row


def _figures(options: Options, shape: str, row: Row) -> dict[str, float]:
    if options.command == "generation":
        (work,) = [one for one in generation_workloads(options, shape) if one.name == row.case]
        if work.prefill:
            return {"prompt tokens/s": sum(work.prompt_lengths) / row.median}
        return {"tokens/s": sum(work.limits) / row.median}
    (work,) = [one for one in training_workloads(options, shape) if one.name == row.case]
    count = training_flops if work.kind == "update" else forward_flops
    flops = count(SHAPES[shape], work.lengths) / row.median
    return {
        "tokens/s": sum(work.lengths) / row.median,
        "TFLOP/s": flops / 1e12,
        "fraction of 790 TFLOP/s": flops / H200.peak,
    }
