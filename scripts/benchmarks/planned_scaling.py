"""Tables of docs/planner.md and docs/scaling.md: python scripts/benchmarks/planned_scaling.py

Names of tables print those alone: dense, mixtures, weak, ahead.

The layouts that the planner chooses for published models on 1 to 1,024 H200s, and weak scaling.
Nothing is compiled.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

from benchmarks.planned_steps import ROOT, shape_of  # noqa: E402
from benchmarks.workloads import mix_limits  # noqa: E402
from jaxrl_llm import config as c  # noqa: E402
from jaxrl_llm.estimate.automatic import best_placements, shares  # noqa: E402
from jaxrl_llm.estimate.rates import GB, rates_of  # noqa: E402
from jaxrl_llm.estimate.search import best_layouts  # noqa: E402
from jaxrl_llm.estimate.work import Work, work_of  # noqa: E402
from jaxrl_llm.models.config import Mixture  # noqa: E402
from jaxrl_llm.models.families import to_hf_config  # noqa: E402

COUNTS = (1, 4, 8, 64, 1024)
WEAK = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_HOST = 8


def scale_config(name: str) -> c.Config:
    """A layout of configs/scale."""
    return c.open_config(str(ROOT / "configs" / "scale" / f"{name}.py"))


MODELS: dict[str, dict[str, Any]] = {
    "0.5B": to_hf_config(shape_of("qwen2.5-0.5b")),
    "7B": to_hf_config(shape_of("qwen2.5-7b")),
    "32B": scale_config("grpo_32b_64").actor.hf_config,
    "72B": scale_config("ppo_72b_1024").actor.hf_config,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "30B-A3B": to_hf_config(shape_of("qwen3-30b-a3b")),
    "235B-A22B": to_hf_config(
        replace(
            shape_of("qwen3-30b-a3b"),
            hidden_size=4096,
            intermediate_size=12_288,
            num_layers=94,
            sliding_window=(),
            num_heads=64,
            mixture=Mixture(
                num_experts=128, experts_per_token=8, expert_size=1536, normalized=True
            ),
        )
    ),
    "671B": to_hf_config(shape_of("deepseek-v3")),
}
ALGORITHMS: dict[str, tuple[Any, int]] = {
    "PPO": (c.PPO(use_kl_loss=True), 1),
    "GRPO": (c.GRPO(use_kl_loss=True), 8),
}
LONGEST = 4096  # tokens of a response, for generating ahead
SLOTS = 256  # of a replica that generates, for mixtures
SAMPLES = 64  # a device; 1,024 + 1,024 tokens each


def run_of(hf: dict[str, Any], algorithm: str, devices: int, slots: int = 0) -> c.Config:
    """A run with SAMPLES samples a device in one update; `slots` decode at once, 0 takes all."""
    settings, n = ALGORITHMS[algorithm]
    prompts = max(devices * SAMPLES // n, 8)
    model: dict[str, Any] = {"dtype": "bfloat16", "micro_batch_tokens": 8192}
    return c.Config(
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=prompts,
            max_prompt_length=1024,
            max_response_length=1024,
        ),
        actor=c.ActorConfig(hf_config=hf, ppo_mini_batch_size=prompts, **model),
        critic=c.CriticConfig(**model),
        rollout=c.RolloutConfig(n=n, num_slots=slots),
        algorithm=settings,
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )


def choices(
    models: dict[str, dict[str, Any]],
    algorithms: Iterable[str],
    counts: Iterable[int],
    slots: int = 0,
) -> Iterator[str]:
    """The fastest layout of each model, algorithm and number of devices, as rows of a table."""
    yield "| model | GPUs | step, s | tokens/s per GPU | GB | search, s | layout |"
    yield "|---|---|---|---|---|---|---|"
    for name, hf in models.items():
        for algorithm in algorithms:
            for count in counts:
                work = work_of(run_of(hf, algorithm, count, slots))
                start = time.monotonic()
                found = best_layouts(work, count, -(-count // PER_HOST), rates_of("h200"))
                spent = time.monotonic() - start
                if not found:
                    cells = "| does not fit | | "
                    yield f"| {name} {algorithm} | {count:,} {cells}| {spent:.1f} | |"
                    continue
                best = found[0].estimate
                yield (
                    f"| {name} {algorithm} | {count:,} | {best.seconds:.1f} "
                    f"| {best.tokens_per_second:,.0f} | {best.peak / GB:.0f} | {spent:.1f} "
                    f"| {_short(found[0].flags)} |"
                )


def weak_scaling() -> Iterator[str]:
    """Tokens a second and GPU with as many prompts a GPU, from the first number that fits."""
    yield "| run | GPUs | mesh | step, s | tokens/s per GPU | of the first |"
    yield "|---|---|---|---|---|---|"
    for config in (scale_config("ppo_72b_1024"), scale_config("dpo_70b_1024")):
        whole, first = work_of(config), 0.0
        for count in WEAK:
            part: Work = whole.scaled(count / config.mesh.num_devices)
            found = best_layouts(part, count, count // PER_HOST, rates_of("h200"), settings=[part])
            if not found:
                yield f"| {config.name} | {count:,} | does not fit | | | |"
                continue
            best = found[0].estimate
            first = first or best.tokens_per_second
            yield (
                f"| {config.name} | {count:,} | {_short(found[0].flags)} | {best.seconds:.1f} "
                f"| {best.tokens_per_second:,.0f} | {best.tokens_per_second / first:.0%} |"
            )


def asynchrony() -> Iterator[str]:
    """GRPO in one group, and with a rollout apart that generates one step ahead.

    Responses have the lengths of the RL mix, 16 to 4,096 tokens, so that few are long.
    """
    yield "| model | GPUs | one group, s | ahead, s | gain | GPUs of the rollout |"
    yield "|---|---|---|---|---|---|"
    lengths = [(1024, response) for response in mix_limits("", 1024, LONGEST)]
    for name in ("0.5B", "7B"):
        for count in (2, 4, 8, 64):
            config, hosts = run_of(MODELS[name], "GRPO", count), -(-count // PER_HOST)
            config = replace(config, data=replace(config.data, max_response_length=LONGEST))
            rates = rates_of("h200")
            work = work_of(config, lengths=lengths)
            one = best_placements(work, count, hosts, rates, keep_settings=True)
            ahead = work_of(replace(config, max_staleness=1), lengths=lengths)
            apart = best_placements(
                ahead, count, hosts, rates, own=shares(count), keep_settings=True
            )
            apart = [each for each in apart if each[0].apart]
            if not one or not apart:
                yield f"| {name} | {count} | does not fit | | | |"
                continue
            first, second = one[0][0], apart[0][0]
            own = second.apart["rollout"].count
            yield (
                f"| {name} | {count} | {first.seconds:.1f} | {second.seconds:.1f} "
                f"| {first.seconds / second.seconds - 1:+.0%} | {own} |"
            )


def _short(flags: tuple[str, ...]) -> str:
    names = {"--config.mesh.": "", "--config.actor.": "", "micro_batch_tokens": "rows"}
    found = []
    for flag in flags:
        if flag.startswith("--config.critic."):
            continue  # as the actor's
        for long, short in names.items():
            flag = flag.replace(long, short)
        found.append(f"`{flag}`")
    return " ".join(found)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    tables = {
        "dense": lambda: choices(MODELS, ALGORITHMS, COUNTS),
        "mixtures": lambda: choices(MIXTURES, ALGORITHMS, (8, 64, 1024), SLOTS),
        "weak": weak_scaling,
        "ahead": asynchrony,
    }
    for name in sys.argv[1:] or tables:
        for line in tables[name]():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
