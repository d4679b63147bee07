"""The cost of strict sums, and whether their bits agree: python scripts/benchmarks/strict.py

A JSON line a result, as soon as it is there. Random weights of a named shape.

Flags:
  --part=bits,step         bits: some layers of a model, sampler against trainer, by slots, batch
                           and kind of row; step: whole GRPO steps, standard and strict
  --shape=qwen2.5-1.5b     or another name of benchmark.py; "tiny" for a test
  --layers=4               of the model of bits
  --groups=32x8            prompts and samples of each, of bits
  --step_groups=32x8       prompts and samples of each, of step
  --variants=NAME[,NAME]   of bits: standard, kernels, chunks; of step: repeatable, strict, off
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

EXACT = "--xla_gpu_exclude_nondeterministic_ops=true"
FLAGS = {
    "part": "bits,step",
    "shape": "qwen2.5-1.5b",
    "layers": "4",
    "groups": "32x8",
    "step_groups": "32x8",
    "variants": "",
}


FAILED: list[str] = []  # what had an error; then the exit code is 1


def flags_of(argv: list[str]) -> dict[str, str]:
    """The flags and their defaults; SystemExit for an unknown one."""
    flags = dict(FLAGS)
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in flags:
            raise SystemExit(f"unknown flag {word}; the flags are {', '.join(FLAGS)}")
        flags[name] = value
    return flags


def say(**values: Any) -> None:
    """One JSON line."""
    print(json.dumps(values), flush=True)


def main(argv: list[str]) -> None:
    """Run the parts in turn; a part or variant that fails is reported, and the others continue."""
    flags = flags_of(argv)
    # As an exact run sets them, before jax is imported.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EXACT}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    import jax

    # A step finds programs there.
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    say(device=str(jax.devices()[0]), jax=jax.__version__)
    parts: dict[str, Callable[[dict[str, str]], None]] = {"bits": bits, "step": step}
    for name in flags["part"].split(","):
        attempt(name, partial(parts[name], flags))
    sys.exit(min(len(FAILED), 1))


def attempt(what: str, run: Callable[[], Any]) -> None:
    """Run, and report the seconds or the error."""
    start = time.perf_counter()
    try:
        run()
        say(done=what, seconds=round(time.perf_counter() - start, 1))
    except Exception as error:  # the other variants are still of interest
        FAILED.append(what)
        say(failed=what, error=f"{type(error).__name__}: {str(error)[:800]}")


def differing(a: Any, b: Any, mask: Any = None) -> dict[str, Any]:
    """Count the numbers that differ, and the largest difference."""
    import numpy as np

    a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
    seen = np.ones(a.shape, bool) if mask is None else np.asarray(mask) > 0
    gap = np.abs(a - b)[seen]
    return {"differ": int((a != b)[seen].sum()), "of": int(seen.sum()), "max": float(gap.max())}


def seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call, after one that compiles."""
    import statistics

    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# ------------------------------------------------------------------------- bits


@dataclass(frozen=True)
class Samples:
    """Prompts, their lengths and the responses' lengths, on the host."""

    prompts: Any
    lengths: Any
    limits: Any
    group: int


def bits(flags: dict[str, str]) -> None:
    """Sampler against trainer for some layers of the shape."""
    import numpy as np

    from jaxrl_llm.kernels.decode_attention import block_entries
    from jaxrl_llm.kernels.strict import Strict
    from jaxrl_llm.models.base import model_spec
    from jaxrl_llm.models.shapes import SHAPES

    config, layers = SHAPES[flags["shape"]], int(flags["layers"])
    config = replace(config, num_layers=layers, sliding_window=(None,) * layers)
    tiny = flags["shape"] == "tiny"
    longest = 24 if tiny else 256
    prompts, group = (int(n) for n in flags["groups"].split("x"))
    rng = np.random.default_rng(0)
    samples = Samples(
        rng.integers(0, config.vocab_size, (prompts, longest)).repeat(group, axis=0),
        rng.integers(longest // 4, longest + 1, prompts).repeat(group),
        rng.integers(longest // 8, longest + 1, prompts * group),
        group,
    )
    J = 16 if tiny else block_entries(config.head_dim)
    variants = {
        "standard": None,
        "kernels": Strict(rows=256, block=J, align=J, kernels=not tiny),
        "chunks": Strict(rows=16 if tiny else 256, block=J, align=J),
    }
    chosen = flags["variants"].split(",") if flags["variants"] else list(variants)
    spec = model_spec(config)
    for name in (name for name in chosen if name in variants):
        attempt(f"bits {name}", partial(_bits, name, spec, samples, variants[name], tiny))


def _bits(name: str, spec: Any, samples: Samples, strict: Any, tiny: bool) -> None:
    import jax
    import numpy as np

    from jaxrl_llm.models.base import init_params

    params = jax.jit(partial(init_params, spec))(jax.random.key(1))
    dtype = "float32" if tiny else "bfloat16"
    computed = jax.tree.map(lambda x: x.astype(dtype), params)
    every, group = np.arange(len(samples.lengths)), samples.group
    generate = partial(_generate, spec, computed, samples, strict)
    say(compiling="generate", variant=name)
    base, took = generate(every, group, 0)
    mask = np.asarray(base.mask)

    def compare(what: str, other: Any, rows: Any = slice(None), seen: Any = None) -> None:
        logprobs = np.asarray(base.logprobs)[rows]
        gap = differing(other, logprobs, mask[rows] if seen is None else seen)
        say(bits=what, variant=name, **gap)

    say(time="generate", variant=name, seconds=round(took, 4))
    for what, other, seen, took in _trained(spec, params, samples, base, strict, dtype):
        say(time=what, variant=name, seconds=round(took, 4))
        compare(what, other, seen=seen)
    few, took = generate(every, group, len(every) // 3)
    same = np.asarray(few.tokens) == np.asarray(base.tokens)
    compare("a third of the slots", few.logprobs, seen=mask * same)
    alone, _ = generate(every[3:6], 1, 0)
    compare("three samples alone", alone.logprobs, slice(3, 6))


def _generate(
    spec: Any, params: Any, samples: Samples, strict: Any, chosen: Any, group: int, slots: int
) -> tuple[Any, float]:
    import jax

    from jaxrl_llm.generation.engine import generate
    from jaxrl_llm.generation.sampler import SamplingParams
    from jaxrl_llm.generation.settings import GenerationSettings

    settings = GenerationSettings(
        sampling=SamplingParams(max_new_tokens=samples.prompts.shape[1]),
        group=group,
        num_slots=slots,
        strict=strict,
        attention="exact",
    )
    key = jax.random.key(3, impl="threefry2x32")

    @jax.jit
    def run(params: Any, prompts: Any, lengths: Any, ids: Any, limits: Any) -> Any:
        return generate(spec, params, prompts, lengths, ids, key, settings, limits_N=limits)

    of_chosen = [x[chosen] for x in (samples.prompts, samples.lengths)]
    arguments = (params, *of_chosen, chosen, samples.limits[chosen])
    return run(*arguments), seconds(lambda: run(*arguments).logprobs, 3)


def _trained(
    spec: Any, params: Any, samples: Samples, output: Any, strict: Any, dtype: str
) -> Iterator[tuple[str, Any, Any, float]]:
    """Log-probs of the samples by the trainer: packed, padded, and with a gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.learner.forward import ForwardSettings, response_statistics
    from jaxrl_llm.learner.rows import packed_rows, padded_rows, plan_packing

    settings = ForwardSettings(dtype=dtype, attention="exact", strict=strict)
    mask = np.asarray(output.mask)
    lengths = jnp.asarray(output.lengths)
    prompts, prompt_lengths = jnp.asarray(samples.prompts), jnp.asarray(samples.lengths)
    plan = plan_packing(
        prompt_lengths,
        lengths,
        row_tokens=64 * samples.prompts.shape[1],
        group=samples.group,
        num_replicas=1,
        align=settings.align,
    )

    def of_part(params: Any, part: Any) -> Any:
        rows = packed_rows(plan, part, prompts, prompt_lengths, output.tokens, lengths)
        statistics = response_statistics(
            params, rows, spec=spec, settings=settings, with_entropy=True
        )
        return statistics.logprobs, rows.included

    def whole(params: Any) -> Any:
        def add(part: Any, total: Any) -> Any:
            return total + of_part(params, part)[0]

        return jax.lax.fori_loop(0, plan.num_rows, add, jnp.zeros(mask.shape, jnp.float32))

    say(compiling="packed rows")
    run = jax.jit(whole)
    yield "packed rows", run(params), None, seconds(partial(run, params), 3)

    few = min(64, len(mask))

    def padded(params: Any) -> Any:
        rows = padded_rows(prompts[:few], prompt_lengths[:few], output.tokens[:few], settings.align)
        return response_statistics(params, rows, spec=spec, settings=settings).logprobs

    run = jax.jit(padded)
    seen = mask * (np.arange(len(mask)) < few)[:, None]
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[:few] = run(params)
    yield f"padded rows, {few} samples", logprobs, seen, seconds(partial(run, params), 3)

    def loss(params: Any) -> Any:
        logprobs, included = of_part(params, jnp.int32(0))
        return logprobs.sum(), (logprobs, included)

    run = jax.jit(jax.grad(loss, has_aux=True))
    logprobs, included = run(params)[1]
    seen = mask * np.asarray(included)[:, None]
    yield "one packed row with its gradient", logprobs, seen, seconds(partial(run, params), 3)


# ------------------------------------------------------------------------- step


def step(flags: dict[str, str]) -> None:
    """Whole GRPO steps with the program of a run."""
    from benchmarks.harness import run_cases
    from benchmarks.options import read_options
    from benchmarks.rl_step import rl_step_cases

    of_step = ("repeatable", "strict", "off")
    chosen = [name for name in flags["variants"].split(",") if name in of_step] or of_step[:2]
    cases = []
    for name in chosen:
        words = ["rl_step", "--workload=grpo", f"--shape={flags['shape']}"]
        words += [f"--groups={flags['step_groups']}", f"--config.exact={name}"]
        if flags["shape"] != "tiny":
            words += [
                "--config.actor.micro_batch_tokens=9216",
                "--config.algorithm.use_kl_loss=false",
            ]
        of_name = rl_step_cases(read_options(words))
        for case in of_name:
            case.name += f", {name}"
        cases += of_name
    say(compiling=[case.name for case in cases])

    def report(row: Any) -> None:
        say(step=row.case, seconds=row.seconds, checks=row.checks, figures=row.figures)
        if row.error:
            say(failed=row.case, error=row.error[:800])

    run_cases(cases, repeats=2, compiler_options={}, report=report)


if __name__ == "__main__":
    main(sys.argv[1:])
