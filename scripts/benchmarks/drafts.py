"""Draft tokens on a real model: python scripts/benchmarks/drafts.py --model=FOLDER

A JSON line a result, as soon as it is there. Most prompts are short questions, which the model soon
ends. A few ask for a list of numbers, or begin one of sums, steps or products. The model goes on
with it until it stops or the limit comes: a heavy tail of repetitive text. The prompts are made
from a seed, and the model samples every token. Rollouts without drafts and with them run
alternately, with the same keys. No GPU has run it yet.

Flags:
  --model=FOLDER       Hugging Face folder of a small instruction model, e.g. SmolLM2-135M-Instruct
  --groups=128x8       prompts and samples of each
  --lists=4            prompts of a list
  --response=2048      most tokens of a response
  --drafts=7           most draft tokens of a sequence in a step
  --temperature=0.5
  --dtype=bfloat16
  --repeats=3          rollouts of each kind, after one that compiles
  --greedy=4x2         prompts and samples of a greedy rollout in float32; its tokens must be equal
  --greedy_response=512
  --texts=FILE         where to write the tokens of the last rollout, as JSON
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

FLAGS = {
    "model": "",
    "groups": "128x8",
    "lists": "4",
    "response": "2048",
    "drafts": "7",
    "temperature": "0.5",
    "dtype": "bfloat16",
    "repeats": "3",
    "greedy": "4x2",
    "greedy_response": "512",
    "texts": "",
}


def flags_of(argv: list[str]) -> dict[str, str]:
    """The flags and their defaults; SystemExit for an unknown one."""
    parser = argparse.ArgumentParser(usage=__doc__)
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", default=default, required=name == "model")
    return vars(parser.parse_args(argv))


def say(**values: Any) -> None:
    """One JSON line."""
    print(json.dumps(values), flush=True)


LINES = 12  # lines of a list before the model goes on


def list_prompt(rng: np.random.Generator, number: int, tokenizer: Any) -> str:
    """A request for numbers, or the beginning of a list of sums, steps or products."""
    a, b = (int(x) for x in rng.integers(2, 60, 2))
    if number % 4 == 0:
        last = 100 * (1 + number % 5)
        return chat(tokenizer, f"Write the numbers from {a} to {a + last}, one on each line.")
    lines = [f"{a + i} + {b} = {a + i + b}" for i in range(LINES)] + [f"{a + LINES} + {b} ="]
    if number % 4 == 1:
        lines = [f"Step {i + 1}: {a + i * b} + {b} = {a + (i + 1) * b}" for i in range(LINES)]
        lines.append(f"Step {LINES + 1}:")
    elif number % 4 == 2:
        lines = [f"{a} x {i + 1} = {a * (i + 1)}" for i in range(LINES)] + [f"{a} x {LINES + 1} ="]
    return "\n".join(lines)


def chat(tokenizer: Any, text: str) -> str:
    """A user message as the model reads it."""
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def prompts_of(tokenizer: Any, prompts: int, num_lists: int) -> list[list[int]]:
    """The ids of the prompts. Prompts of a list are spread evenly."""
    rng = np.random.default_rng(0)
    places = np.linspace(0, prompts - 1, num_lists).astype(int).tolist()
    texts = []
    for place in range(prompts):
        if place in places:
            texts.append(list_prompt(rng, places.index(place), tokenizer))
        else:
            a, b = (int(x) for x in rng.integers(2, 100, 2))
            texts.append(chat(tokenizer, f"What is {a} + {b}? Answer in one sentence."))
    return [tokenizer.encode(text) for text in texts]


def rollout(
    model: Any, groups: str, response: int, temperature: float, num_lists: int, drafts: int
) -> Callable[[int], Any]:
    """A function of a seed that generates every response."""
    import jax

    from jaxrl_llm.generation.engine import compiler_options, generate
    from jaxrl_llm.generation.memory import Replica, fitted
    from jaxrl_llm.generation.sampler import SamplingParams
    from jaxrl_llm.generation.settings import GenerationSettings

    prompts, group = (int(n) for n in groups.split("x"))
    ids = prompts_of(model.tokenizer, prompts, num_lists)
    lengths = np.array([len(x) for x in ids], np.int32)
    tokens = np.zeros((prompts, lengths.max()), np.int32)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = each
    tokens, lengths = tokens.repeat(group, 0), lengths.repeat(group)
    sampling = SamplingParams(
        max_new_tokens=response,
        temperature=temperature,
        stop_token_ids=tuple(model.tokenizer.stop_ids),
    )
    settings = GenerationSettings(sampling=sampling, group=group, drafts=drafts)
    replica = Replica(
        config=model.spec.config,
        dtype=model.spec.dtype,
        tensor=1,
        samples=len(tokens),
        width=tokens.shape[1],
    )
    settings = fitted(settings, replica, model.memory)
    numbers = np.arange(len(tokens), dtype=np.uint32)
    run = jax.jit(
        partial(generate, model.spec, settings=settings),
        compiler_options=compiler_options(len(tokens), settings.num_slots),
    )
    arrays = jax.device_put((tokens, lengths, numbers))
    return lambda seed: jax.block_until_ready(run(model.params, *arrays, jax.random.key(seed)))


def said(out: Any, seconds: float) -> dict[str, Any]:
    """What a rollout gave."""
    lengths = np.asarray(out.lengths)
    figures = {
        "seconds": round(seconds, 3),
        "tokens/s": round(float(lengths.sum()) / seconds, 1),
        "tokens": int(lengths.sum()),
        "steps": int(out.steps),
        "median length": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "over half of it": int((lengths > lengths.max() / 2).sum()),
    }
    if out.drafts_offered is not None:
        offered, accepted = int(out.drafts_offered), int(out.drafts_accepted)
        figures["acceptance"] = round(accepted / max(offered, 1), 3)
        figures["share of tokens"] = round(accepted / int(lengths.sum()), 3)
    return figures


def speed(flags: dict[str, str], model: Any) -> None:
    """Time rollouts without drafts and with them, alternately."""
    drafts = int(flags["drafts"])
    how = (float(flags["temperature"]), int(flags["lists"]))
    runs = {}
    for number in (0, drafts):
        runs[number] = rollout(model, flags["groups"], int(flags["response"]), *how, number)
        start = time.perf_counter()
        runs[number](0)
        say(compiled=f"drafts={number}", seconds=round(time.perf_counter() - start, 1))
    seconds: dict[int, list[float]] = {0: [], drafts: []}
    outputs: dict[int, Any] = {}
    for seed in range(1, 1 + int(flags["repeats"])):
        for number, run in runs.items():
            start = time.perf_counter()
            outputs[number] = run(seed)
            seconds[number].append(time.perf_counter() - start)
            say(drafts=number, seed=seed, **said(outputs[number], seconds[number][-1]))
    plain, drafted = outputs[0], outputs[drafts]
    same = np.asarray(plain.tokens) == np.asarray(drafted.tokens)
    same = np.cumprod(same, axis=1).astype(bool) & (np.asarray(plain.mask) > 0)
    gap = np.abs(np.asarray(plain.logprobs) - np.asarray(drafted.logprobs))[same]
    medians = [statistics.median(each) for each in seconds.values()]
    say(
        speedup=round(medians[0] / medians[1], 3),
        equal_tokens=round(float(same.sum() / np.asarray(plain.mask).sum()), 4),
        largest_logprob_gap=float(gap.max()),
        mean_logprob_gap=float(gap.mean()),
    )
    if flags["texts"]:
        rows = [
            row[:length].tolist()
            for row, length in zip(
                np.asarray(drafted.tokens), np.asarray(drafted.lengths), strict=True
            )
        ]
        Path(flags["texts"]).write_text(json.dumps(rows))


def greedy(flags: dict[str, str], model: Any) -> None:
    """Require equal tokens of greedy rollouts in float32."""
    prompts = int(flags["greedy"].split("x")[0])
    outputs = [
        rollout(model, flags["greedy"], int(flags["greedy_response"]), 0.0, prompts // 2, number)(0)
        for number in (0, int(flags["drafts"]))
    ]
    differing = int((np.asarray(outputs[0].tokens) != np.asarray(outputs[1].tokens)).sum())
    steps = [int(out.steps) for out in outputs]
    accepted, offered = int(outputs[1].drafts_accepted), int(outputs[1].drafts_offered)
    say(greedy_differing=differing, steps=steps, accepted=accepted, offered=offered)
    if differing:
        raise SystemExit("greedy tokens in float32 differ with drafts")


def main(argv: list[str]) -> None:
    """Time rollouts, then compare greedy ones in float32."""
    flags = flags_of(argv)
    import jax

    from jaxrl_llm.checkpoint.layout import find_model_path
    from jaxrl_llm.evaluation.answering import open_model

    say(device=str(jax.devices()[0]), jax=jax.__version__)
    dtype: Any = flags["dtype"]
    model = find_model_path(flags["model"])
    speed(flags, open_model(model, dtype=dtype))
    greedy(flags, open_model(model, dtype="float32"))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose profile.py would hide Python's
    main(sys.argv[1:])
