"""Peers that users run instead, measured in processes of their own on the same machine. No jax.

A peer is a standalone script of the folder peers/. It reads its work as JSON from stdin and prints
a JSON object a case. It runs before this process touches the GPU, because jax claims the memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import COMMANDS
from benchmarks.options import Options
from benchmarks.records import Row
from benchmarks.roofline import H200
from benchmarks.run_config import step_name
from benchmarks.workloads import generation_workloads, training_workloads
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.flops import forward_flops, training_flops

FOLDER = Path(__file__).resolve().parent / "peers"
TIME_LIMIT_S = 1800


def run_peers(options: Options) -> list[Row]:
    """Every peer of the command on every shape, one process after the other."""
    rows = []
    for shape in options.shapes:
        for name in COMMANDS[options.command].peers or ():
            for answer in _run_peer(name, _work(options, shape), python=options.peer_python):
                rows.append(_row(options, shape, answer))
    return rows


def _work(options: Options, shape: str) -> dict[str, Any]:
    config = options.config(shape)
    work: dict[str, Any] = {
        "hf_config": to_hf_config(options.shapes[shape]),
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
    elif options.command == "rl_step":
        work["cases"] = [_step(options, shape, workload) for workload in options.workloads]
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


def _step(options: Options, shape: str, workload: str) -> dict[str, Any]:
    """A whole step for TRL.

    Its micro-batches have at most as many tokens as ours, in rows of one sample, and divide the
    samples.
    """
    config = options.config(shape, workload)
    data, lora = config.data, config.actor.lora
    prompt, response = data.max_prompt_length, data.max_response_length
    samples = data.train_batch_size * config.rollout.n
    most = config.actor.micro_batch_size or samples
    if config.actor.micro_batch_tokens:
        most = max(1, config.actor.micro_batch_tokens // (prompt + response))
    targets = list(lora.targets)
    adapters = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": "all-linear" if targets == ["all-linear"] else targets,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }
    return {
        "case": step_name(workload, config),
        "prompts": data.train_batch_size,
        "samples": config.rollout.n,
        "prompt": prompt,
        "response": response,
        "micro_batch": max(d for d in range(1, most + 1) if samples % d == 0),
        "lora": adapters if lora.enabled else None,
        # Faster without. "projections" and "attention" keep what torch would compute again.
        "remat": config.actor.remat == "full",
    }


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
    if options.command == "rl_step":
        prompts, samples = options.group_sizes(shape)
        return {"tokens/s/device": prompts * samples * sum(options.sizes(shape)) / row.median}
    (work,) = [one for one in training_workloads(options, shape) if one.name == row.case]
    count = training_flops if work.kind == "update" else forward_flops
    flops = count(options.shapes[shape], work.lengths) / row.median
    return {
        "tokens/s": sum(work.lengths) / row.median,
        "TFLOP/s": flops / 1e12,
        "fraction of 790 TFLOP/s": flops / H200.peak,
    }


def _run_peer(name: str, work: dict[str, Any], *, python: str | None) -> list[dict[str, Any]]:
    """The objects that the peer printed, and one with an `error` if its process failed.

    Each has `case` and `peer`, and `seconds` (a list, one a repeat) or `error`.
    """
    command = [python or sys.executable, str(FOLDER / f"{name}.py")]
    try:
        done = subprocess.run(
            command, input=json.dumps(work), capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
    except FileNotFoundError:
        return [{"peer": name, "error": f"--peer_python={python}: no such program"}]
    except subprocess.TimeoutExpired:
        return [{"peer": name, "error": f"took longer than {TIME_LIMIT_S} s"}]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-3:])
        answers.append({"peer": name, "error": f"exit code {done.returncode}: {last[-500:]}"})
    return answers
