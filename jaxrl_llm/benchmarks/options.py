"""The command line of scripts/benchmark.py: read and checked without jax."""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.benchmarks.peers import PEERS
from jaxrl_llm.coercion import coerce
from jaxrl_llm.config import (
    ActorConfig,
    Config,
    ConfigError,
    CriticConfig,
    DataConfig,
    FunctionConfig,
    MeshConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
)
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.shapes import SHAPES
from jaxrl_llm.overrides import apply_override
from jaxrl_llm.signatures import nearest
from jaxrl_llm.validation import validate

Batch = tuple[int, int]  # rows, tokens a row
NUM_MIX_LENGTHS = 1024

# Keys of a config that size a whole step and nothing else.
STEP_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "rollout.n",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
)

# Each benchmark's workloads; those it runs when none is named.
WORKLOADS = {
    "generation": (("fixed", "rl_mix", "prefill"), ("fixed", "rl_mix")),
    "training": (("update", "logprob", "values", "mix"), ("update", "logprob")),
    "attention": (("dense", "packed", "decode"), ("dense", "packed", "decode")),
    "rl_step": (("ppo", "grpo"), ("ppo",)),  # functions of algorithms/alias.py
    "layout_switch": (("switch",), ("switch",)),
}
COMMANDS = tuple(WORKLOADS)
DEFAULT_SHAPES = {"attention": ("llama-3.1-8b", "qwen2.5-0.5b")}
DEFAULT_SHAPE = ("qwen2.5-1.5b",)

# Batches of each benchmark by shape: the measured rows of docs/benchmarks.md.
GENERATION_BATCHES = {"tiny": (1, 3), "qwen2.5-7b": (1, 64, 256), "": (1, 64, 256, 1024)}
PREFILL_BATCHES: dict[str, tuple[Batch, ...]] = {"tiny": ((3, 0),), "": ((256, 0),)}
TRAINING_BATCHES: dict[str, tuple[Batch, ...]] = {
    "tiny": ((2, 32),),
    "qwen2.5-0.5b": ((8, 2048),),
    "qwen2.5-1.5b": ((4, 2048), (8, 4096)),
    "": ((2, 2048),),
}
# 16k tokens in all, and one longer row.
ATTENTION_BATCHES: dict[str, tuple[Batch, ...]] = {
    "tiny": ((2, 64),),
    "": ((16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768)),
}
PACKED_BATCHES: dict[str, tuple[Batch, ...]] = {
    "tiny": ((1, 128),),
    "": ((1, 16384), (1, 32768)),
}
# Slots and the entries of each slot's own cache.
DECODE_BATCHES: dict[str, tuple[Batch, ...]] = {
    "tiny": ((4, 64),),
    "": ((64, 2048), (256, 2048), (1024, 2048)),
}
# Prompt and response tokens where the command line gives none.
PROMPT = {"tiny": 8, "": 512}
RESPONSE = {"tiny": 8, "": 512}
# Prompts and samples of each in rl_step and the rl_mix.
GROUPS = {"tiny": (4, 2), "": (128, 8)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """One command, checked. `config` holds the settings of the product, the model's apart."""

    command: str
    shapes: tuple[str, ...]
    workloads: tuple[str, ...]
    batches: tuple[Batch, ...]  # empty takes those of the shape; (rows, 0) where rows suffice
    prompt: int | None
    response: int | None
    groups: tuple[int, int] | None
    head_dim: int | None  # of `attention`: None takes the shape's
    window: int | None  # of its dense rows, in tokens
    cache: str  # dtype of its decode caches: bfloat16 or float8
    repeats: int
    baseline: bool
    peer_python: str | None
    json: Path | None
    check: Path | None
    store: Path | None
    devices: int
    compile_cache: Path | None
    profile: Path | None
    compiler_options: tuple[tuple[str, str | bool], ...]  # for XLA, on every measured program
    overrides: tuple[tuple[str, str], ...]
    words: tuple[str, ...]  # the command line as given, for the record

    def sizes(self, shape: str) -> tuple[int, int]:
        """Prompt and response tokens for generation and whole steps."""
        prompt = PROMPT.get(shape, PROMPT[""]) if self.prompt is None else self.prompt
        response = RESPONSE.get(shape, RESPONSE[""]) if self.response is None else self.response
        return prompt, response

    def group_sizes(self, shape: str) -> tuple[int, int]:
        """Prompts, and samples of each."""
        return self.groups or GROUPS.get(shape, GROUPS[""])

    def heads_of(self, shape: str) -> ModelConfig:
        """The shape whose heads `attention` measures, of --head_dim dimensions if it is given."""
        model = SHAPES[shape]
        return model if self.head_dim is None else replace(model, head_dim=self.head_dim)

    def batches_of(self, shape: str) -> tuple[Batch, ...]:
        """The batches to measure for one shape."""
        if self.batches:
            return self.batches
        if self.command == "generation":
            return tuple((rows, 0) for rows in _of(GENERATION_BATCHES, shape))
        return _of(TRAINING_BATCHES if self.command == "training" else ATTENTION_BATCHES, shape)

    def prefill_batches(self, shape: str) -> tuple[Batch, ...]:
        """Prompts to prefill, each number of them once full and once of uneven lengths."""
        return self.batches or _of(PREFILL_BATCHES, shape)

    def packed_batches(self, shape: str) -> tuple[Batch, ...]:
        """Rows to fill with uneven sequences, and the tokens of each."""
        return self.batches or _of(PACKED_BATCHES, shape)

    def decode_batches(self, shape: str) -> tuple[Batch, ...]:
        """Slots, and the tokens that each may add to its prompt."""
        return self.batches or _of(DECODE_BATCHES, shape)

    def config(self, shape: str, algorithm: str = "ppo") -> Config:
        """The config of a run at `shape`: bf16, float32 master weights, the overrides applied."""
        return _config(self, shape, algorithm)


def read_options(words: Sequence[str]) -> Options:
    """The command line as Options; ConfigError with the remedy for any mistake."""
    parser = _parser()
    given, rest = parser.parse_known_args(list(words))
    overrides = []
    for word in rest:
        key, equals, value = word.partition("=")
        if not key.startswith("--config.") or not equals:
            flags = [option for action in parser._actions for option in action.option_strings]
            raise ConfigError(
                f"unknown argument {word}{nearest(key, flags)}\nflags: {', '.join(flags)}, "
                "--config.KEY=VALUE"
            )
        overrides.append((key.removeprefix("--config."), value))
    command = given.command
    options = Options(
        command=command,
        shapes=given.shape or DEFAULT_SHAPES.get(command, DEFAULT_SHAPE),
        workloads=given.workload or WORKLOADS[command][1],
        batches=given.batch or (),
        prompt=given.prompt,
        response=given.response,
        groups=given.groups,
        head_dim=given.head_dim,
        window=given.window,
        cache=given.cache,
        repeats=given.repeats,
        baseline=given.baseline,
        peer_python=given.peer_python,
        json=given.json,
        check=given.check,
        store=given.store,
        devices=given.devices,
        compile_cache=given.compile_cache,
        profile=given.profile,
        # XLA takes a flag's value as a bool, any other as text.
        compiler_options=tuple(
            (name, value == "true" if value in ("true", "false") else value)
            for name, value in given.compiler_option
        ),
        overrides=tuple(overrides),
        words=tuple(words),
    )
    _check(options)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what it takes")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="scripts/benchmark.py", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--shape", type=_names(SHAPES))
    known = dict.fromkeys(name for every, _ in WORKLOADS.values() for name in every)
    parser.add_argument("--workload", type=_names(known))
    parser.add_argument("--batch", type=_batches)
    parser.add_argument("--prompt", type=_count)
    parser.add_argument("--response", type=_count)
    parser.add_argument("--groups", type=_pair)
    parser.add_argument("--head_dim", type=_count)
    parser.add_argument("--window", type=_count)
    parser.add_argument("--cache", choices=("bfloat16", "float8"), default="bfloat16")
    parser.add_argument("--repeats", type=_count, default=3)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--peer_python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--devices", type=_count, default=0)
    parser.add_argument("--compile_cache", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--compiler_option", type=_named, action="append", default=[])
    return parser


def _names(known: Any) -> Any:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown{nearest(name, list(known))}; there are {', '.join(known)}"
                )
        if not names:
            raise argparse.ArgumentTypeError(f"name one or more of {', '.join(known)}")
        return names

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write two numbers with an x, e.g. 128x8")
    first, second = text.split("x")
    return int(first), int(second)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def _batches(text: str) -> tuple[Batch, ...]:
    return tuple(_pair(part) if "x" in part else (_count(part), 0) for part in text.split(","))


def _of(table: dict[str, Any], shape: str) -> Any:
    return table.get(shape, table[""])


def _check(options: Options) -> None:
    command = options.command
    known = WORKLOADS[command][0]
    for name in options.workloads:
        if name not in known:
            raise ConfigError(f"{command} has no workload {name}; it has {', '.join(known)}")
    with_tokens = command in ("training", "attention")
    for _, tokens in options.batches:
        if command in ("rl_step", "layout_switch"):
            raise ConfigError(f"{command} takes no --batch; --groups=PROMPTSxSAMPLES sizes a step")
        if with_tokens != (tokens > 0):
            form = "ROWSxTOKENS, e.g. 4x2048" if with_tokens else "ROWS, e.g. 64"
            raise ConfigError(f"--batch of {command} is {form}")
    if options.compiler_options and command == "rl_step":
        raise ConfigError("rl_step compiles as a run does; drop --compiler_option")
    for flag, given, workload in (
        ("head_dim", options.head_dim, ""),
        ("window", options.window, "dense"),
        ("cache", options.cache != "bfloat16", "decode"),
    ):
        if given and command != "attention":
            raise ConfigError(f"--{flag} belongs to attention, not to {command}")
        if given and workload and options.workloads != (workload,):
            raise ConfigError(f"--{flag} is measured on {workload} alone: --workload={workload}")
    if options.window == 1:
        raise ConfigError(
            "--window=1: a token that sees itself alone gives its query no gradient to compare; "
            "2 or more works"
        )
    if options.overrides and command == "attention":
        raise ConfigError("attention takes no --config.KEY: it measures kernels, not a run")
    if options.baseline and command not in PEERS:
        peers = ", ".join(PEERS)
        raise ConfigError(f"--baseline: {command} has no peer to run; these have: {peers}")
    for flag, file in (("check", options.check), ("store", options.store)):
        if file is not None and not options.baseline:
            raise ConfigError(f"--{flag} compares ratios with a peer; add --baseline")
    if options.check is not None and not options.check.is_file():
        raise ConfigError(
            f"--check={options.check}: no such file; --store={options.check} makes it"
        )
    if options.groups is not None and command == "generation":
        if math.prod(options.groups) > NUM_MIX_LENGTHS:
            raise ConfigError(f"--groups: rl_mix has {NUM_MIX_LENGTHS} lengths; 128x8 takes all")
    for key, _ in options.overrides:
        if command != "rl_step" and key in STEP_SIZES:
            raise ConfigError(
                f"--config.{key} does nothing in {command}; --batch, --prompt, --response and "
                "--groups size it"
            )
    if command in ("training", "rl_step") and "critic.warmup_steps" in dict(options.overrides):
        raise ConfigError("--config.critic.warmup_steps: the actor's updates would be left out")
    if command == "generation" and "rollout.temperature" in dict(options.overrides):
        raise ConfigError("generation samples at temperature 1, where the check compares log-probs")
    for shape in options.shapes:
        for workload in options.workloads if command == "rl_step" else ("ppo",):
            options.config(shape, workload)


def _config(options: Options, shape: str, algorithm: str) -> Config:
    prompt, response = options.sizes(shape)
    num_prompts, samples = options.group_sizes(shape)
    # Never read: validation asks for them, the benchmark draws its own tokens and rewards.
    tasks = (TaskConfig(),)
    reward = FunctionConfig(path="jaxrl_llm.rewards.exact_answer:exact_answer")
    config = Config(
        name=f"benchmark_{shape}",
        total_steps=1000,
        mesh=MeshConfig(fsdp=max(options.devices, 1)),
        data=DataConfig(
            tokenizer="char",
            train_batch_size=num_prompts,
            max_prompt_length=prompt,
            max_response_length=response,
            train_tasks=tasks,
            val_tasks=tasks,
        ),
        actor=ActorConfig(
            hf_config=to_hf_config(SHAPES[shape]),
            dtype="bfloat16",
            ppo_mini_batch_size=num_prompts,
        ),
        critic=CriticConfig(dtype="bfloat16"),
        rollout=RolloutConfig(n=samples),
        algorithm=FunctionConfig(path=f"jaxrl_llm.algorithms.alias:{algorithm}"),
        reward=RewardConfig(functions=(reward,)),
        exact=False,
        fuse_stages=False,
    )
    for key, text in options.overrides:
        config = apply_override(config, key, text)
    config = coerce(config, Config, "config")
    validate(config)
    return config
