"""The work of each benchmark as plain numbers, the same for us and for a peer. No jax."""

from dataclasses import dataclass

import numpy as np

from benchmarks.commands import LENGTHS, NUM_MIX_LENGTHS, of_shape
from benchmarks.options import Options
from jaxrl_llm.config import ConfigError

MIX_MEDIAN, MIX_SIGMA, MIX_RANGE = 500, 0.8, (16, 2048)
# Numbers that the published measurement drew from its generator before the mix: prompts of a
# warm-up (16 x 128 tokens) and of fixed batches (512 tokens each), ids from 10 to 120,000.
DRAWN_BEFORE = 16 * 128 + (1 + 64 + 256 + 1024) * 512
TINY_SCALE = 128


@dataclass(frozen=True, kw_only=True)
class GenerationWorkload:
    """Prompts, each answered `samples` times; `limits` are the tokens of every response."""

    name: str
    prompt_lengths: tuple[int, ...]
    samples: int
    limits: tuple[int, ...]
    prefill: bool = False  # only the prompts are measured

    @property
    def prompts(self) -> int:
        return len(self.prompt_lengths)

    @property
    def prompt_length(self) -> int:
        """Tokens that prompts are padded to."""
        return max(self.prompt_lengths)

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """A batch of groups and the pass over it; `kind` names its stage."""

    name: str
    kind: str
    samples: int
    prompt_lengths: tuple[int, ...]  # tokens of each prompt
    limits: tuple[int, ...]  # tokens of each response

    @property
    def prompts(self) -> int:
        return len(self.prompt_lengths)

    @property
    def prompt_length(self) -> int:
        """Tokens that prompts are padded to."""
        return max(self.prompt_lengths)

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, its prompt included."""
        prompts = np.repeat(self.prompt_lengths, self.samples)
        return tuple(int(n) for n in prompts + np.asarray(self.limits))


def rl_mix_lengths() -> np.ndarray:
    """The 1,024 response lengths of the RL mix: lognormal, 16 to 2,048 tokens, mean 633.

    Drawn as the measured vLLM run drew them, generator state included, so that figures compare.
    """
    rng = np.random.default_rng(0)
    rng.integers(10, 120_000, DRAWN_BEFORE)
    lengths = np.exp(rng.normal(np.log(MIX_MEDIAN), MIX_SIGMA, NUM_MIX_LENGTHS))
    return np.clip(lengths, *MIX_RANGE).astype(int)


def generation_workloads(options: Options, shape: str) -> list[GenerationWorkload]:
    """Fixed batches of distinct prompts, the mix of groups with uneven responses, and prefills."""
    prompt, response = options.sizes(shape)
    cases = []
    if "fixed" in options.workloads:
        cases += [
            GenerationWorkload(
                name=f"fixed_{rows}",
                prompt_lengths=(prompt,) * rows,
                samples=1,
                limits=(response,) * rows,
            )
            for rows, _ in options.batches_of(shape, "fixed")
        ]
    if "rl_mix" in options.workloads:
        prompts, samples = options.group_sizes(shape)
        cases.append(
            GenerationWorkload(
                name=f"rl_mix_{options.response}" if options.response else "rl_mix",
                prompt_lengths=(prompt,) * prompts,
                samples=samples,
                limits=mix_limits(shape, prompts * samples, options.response),
            )
        )
    if "lengths" in options.workloads:
        prompts, samples, limits = _own_lengths(options)
        cases.append(
            GenerationWorkload(
                name=f"lengths_{len(prompts)}x{samples}",
                prompt_lengths=prompts,
                samples=samples,
                limits=limits,
            )
        )
    if "prefill" in options.workloads:
        for rows, _ in options.batches_of(shape, "prefill"):
            uneven = mix_limits(shape, rows, prompt)
            for name, lengths in (
                (f"prefill_{rows}", (prompt,) * rows),
                (f"prefill_uneven_{rows}", uneven),
            ):
                cases.append(
                    GenerationWorkload(
                        name=name,
                        prompt_lengths=lengths,
                        samples=1,
                        limits=(1,) * rows,
                        prefill=True,
                    )
                )
    return cases


def mix_limits(shape: str, rows: int, longest: int | None = None) -> tuple[int, ...]:
    """The lengths of the mix, repeated after 1,024, and scaled to at most `longest`.

    None keeps the mix's own limit: 2,048, or 16 for the tiny shape.
    """
    if longest is None:
        longest = MIX_RANGE[1] // TINY_SCALE if shape == "tiny" else MIX_RANGE[1]
    lengths = np.maximum(np.resize(rl_mix_lengths(), rows) * longest // MIX_RANGE[1], 1)
    return tuple(int(length) for length in lengths)


def packed_lengths(shape: str, rows: int, tokens: int) -> list[list[int]]:
    """Lengths of sequences (a prompt, a response of the mix) that fill rows of `tokens`."""
    prompt, _ = of_shape(LENGTHS, shape)
    upcoming = iter(mix_limits(shape, NUM_MIX_LENGTHS) * rows)
    packed: list[list[int]] = []
    for _ in range(rows):
        row = [min(prompt + next(upcoming), tokens)]
        while sum(row) + (length := prompt + next(upcoming)) <= tokens:
            row.append(length)
        packed.append(row)
    return packed


def packed_groups(
    options: Options, shape: str, rows: int, tokens: int
) -> list[list[tuple[int, list[int]]]]:
    """Prompts, each with the responses of a group or fewer, that fill rows up to `tokens`.

    ConfigError for rows that have no room for a prompt and a response.
    """
    prompt, samples = options.sizes(shape)[0], options.group_sizes(shape)[1]
    if tokens <= prompt:
        raise ConfigError(
            f"packed rows of {tokens} tokens have no room for a prompt of {prompt} and a response: "
            "longer ones by --batch=ROWSxTOKENS, or --prompt=N"
        )
    upcoming = iter(mix_limits(shape, NUM_MIX_LENGTHS) * rows)
    packed: list[list[tuple[int, list[int]]]] = []
    for _ in range(rows):
        row = [(prompt, [min(next(upcoming), tokens - prompt)])]
        used, length = prompt + row[0][1][0], next(upcoming)
        while True:
            begins = len(row[-1][1]) == samples
            used += length + prompt * begins
            if used > tokens:
                break
            if begins:
                row.append((prompt, []))
            row[-1][1].append(length)
            length = next(upcoming)
        packed.append(row)
    return packed


def training_workloads(options: Options, shape: str) -> list[TrainingWorkload]:
    """Every pass on every batch of full rows, and on groups with the uneven lengths of the mix.

    Full rows have a prompt of one token unless --prompt says otherwise: then every token but the
    first has a loss, as in the peer.
    """
    cases = []
    for kind in options.workloads:
        if kind == "lengths":
            prompt_lengths, samples, limits = _own_lengths(options)
            cases.append(
                TrainingWorkload(
                    name=f"update_lengths_{len(prompt_lengths)}x{samples}",
                    kind="update",
                    prompt_lengths=prompt_lengths,
                    samples=samples,
                    limits=limits,
                )
            )
            continue
        if kind == "mix":
            prompts, samples = options.group_sizes(shape)
            cases.append(
                TrainingWorkload(
                    name=f"update_mix_{prompts}x{samples}",
                    kind="update",
                    prompt_lengths=(options.sizes(shape)[0],) * prompts,
                    samples=samples,
                    limits=mix_limits(shape, prompts * samples),
                )
            )
            continue
        for rows, tokens in options.batches_of(shape, kind):
            prompt = options.prompt or 1
            cases.append(
                TrainingWorkload(
                    name=f"{kind}_{rows}x{tokens}",
                    kind=kind,
                    prompt_lengths=(prompt,) * rows,
                    samples=1,
                    limits=(tokens - prompt,) * rows,
                )
            )
    return cases


def _own_lengths(options: Options) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Prompt tokens of each group, samples of each, and response tokens of --lengths=FILE."""
    prompts, samples = options.groups or (len(options.lengths), 1)
    limits = tuple(response for _, response in options.lengths)
    return tuple(prompt for prompt, _ in options.lengths[::samples]), samples, limits
