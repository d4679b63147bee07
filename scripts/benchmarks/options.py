"""The command line of scripts/benchmark.py: read and checked without jax."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.commands import (
    BATCHES,
    COMMANDS,
    GROUPS,
    LENGTHS,
    NUM_MIX_LENGTHS,
    ONLY_WITH,
    Batch,
    of_shape,
)
from benchmarks.run_config import run_config
from benchmarks.sizes import Shapes, read_lengths, read_shapes
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.references import nearest


@dataclass(frozen=True, kw_only=True)
class Options:
    """One command, checked. `overrides` are the --config.KEY=VALUE of the command line."""

    command: str
    shapes: Shapes  # the models by name
    workloads: tuple[str, ...]
    batches: tuple[Batch, ...]  # empty: the batches of the shape
    prompt: int | None
    response: int | None
    groups: tuple[int, int] | None
    lengths: tuple[Batch, ...]  # prompt and response tokens of each sample of --lengths=FILE
    head_dim: int | None  # head dim of `attention`; None: the shape's
    window: int | None  # window of its dense rows, in tokens
    cache: str  # dtype of its decode caches
    repeats: int
    baseline: bool
    peer_python: str | None
    json: Path | None
    devices: int
    compile_cache: Path | None
    profile: Path | None
    compiler_options: tuple[tuple[str, str | bool], ...]  # for XLA, on every measured program
    overrides: tuple[tuple[str, str], ...]
    words: tuple[str, ...]  # the command line as given, for the record

    def sizes(self, shape: str) -> tuple[int, int]:
        """Prompt and response tokens for generation and whole steps."""
        prompt, response = of_shape(LENGTHS, shape)
        return self.prompt or prompt, self.response or response

    def group_sizes(self, shape: str) -> tuple[int, int]:
        """Prompts, and samples of each."""
        return self.groups or of_shape(GROUPS, shape)

    def heads_of(self, shape: str) -> ModelConfig:
        """The model whose heads `attention` measures, with --head_dim if it is given."""
        model = self.shapes[shape]
        return model if self.head_dim is None else replace(model, head_dim=self.head_dim)

    def batches_of(self, shape: str, workload: str) -> tuple[Batch, ...]:
        """The batches of one workload: --batch, or the batches of the shape."""
        return self.batches or of_shape(BATCHES[workload], shape)

    def config(self, shape: str, algorithm: str = "ppo") -> Config:
        """The config of a run at `shape`: bf16, float32 master weights, the overrides applied."""
        return run_config(
            self.shapes[shape],
            algorithm=algorithm,
            lengths=self.sizes(shape),
            groups=self.group_sizes(shape),
            devices=self.devices,
            overrides=self.overrides,
        )


def read_options(words: Sequence[str]) -> Options:
    """The command line as Options; ConfigError with the remedy for any mistake."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(list(words))
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
    values = vars(arguments)
    command = COMMANDS[arguments.command]
    values["shapes"] = read_shapes(arguments.shapes or command.shape)
    values["workloads"] = arguments.workloads or (
        ("lengths",) if arguments.lengths and "lengths" in command.flags else command.default
    )
    values["compiler_options"] = tuple(arguments.compiler_options)
    _check_flags(arguments, overrides)
    values["lengths"] = (
        read_lengths(arguments.lengths, arguments.groups) if arguments.lengths else ()
    )
    options = Options(**values, overrides=tuple(overrides), words=tuple(words))
    _check_sizes(options)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what it takes")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="scripts/benchmark.py", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=tuple(COMMANDS))
    known = dict.fromkeys(name for command in COMMANDS.values() for name in command.workloads)
    parser.add_argument("--workload", dest="workloads", type=_names(known))
    parser.add_argument("--batch", dest="batches", type=_batches, default=())
    parser.add_argument("--groups", type=_pair)
    for flag in ("prompt", "response", "head_dim", "window"):
        parser.add_argument(f"--{flag}", type=_count)
    parser.add_argument("--cache", choices=("bfloat16", "float8"), default="bfloat16")
    parser.add_argument("--repeats", type=_count, default=3)
    parser.add_argument("--devices", type=_count, default=0)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--shape", dest="shapes")
    parser.add_argument("--peer_python")
    for flag in ("lengths", "json", "compile_cache", "profile"):
        parser.add_argument(f"--{flag}", type=Path)
    parser.add_argument(
        "--compiler_option", dest="compiler_options", type=_named, action="append", default=[]
    )
    return parser


def _names(known: Mapping[str, Any]) -> Callable[[str], tuple[str, ...]]:
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write two numbers with an x, e.g. 128x8")
    first, second = text.split("x")
    return int(first), int(second)


def _named(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    # XLA takes a flag's value as a bool, and any other value as text.
    return name, value == "true" if value in ("true", "false") else value


def _batches(text: str) -> tuple[Batch, ...]:
    return tuple(_pair(part) if "x" in part else (_count(part), 0) for part in text.split(","))


def _check_flags(arguments: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> None:
    """Refuse flags and keys that the command does not take, by its row of COMMANDS."""
    name, command = arguments.command, COMMANDS[arguments.command]
    for workload in arguments.workloads:
        if workload not in command.workloads:
            known = ", ".join(command.workloads)
            raise ConfigError(f"{name} has no workload {workload}; it has {known}")
    if arguments.batches and not command.batch:
        raise ConfigError(f"{name} takes no --batch; --groups=PROMPTSxSAMPLES sets its size")
    if any((tokens > 0) != ("x" in command.batch) for _, tokens in arguments.batches):
        raise ConfigError(f"--batch of {name} is {command.batch}")
    for flag in dict.fromkeys(flag for one in COMMANDS.values() for flag in one.flags):
        value = getattr(arguments, "compiler_options" if flag == "compiler_option" else flag)
        if value in (None, "bfloat16", (), []):
            continue
        if flag not in command.flags:
            takers = " and ".join(key for key, one in COMMANDS.items() if flag in one.flags)
            raise ConfigError(f"--{flag} belongs to {takers}, not to {name}; drop it")
        only = ONLY_WITH.get(flag)
        if only and arguments.workloads != (only,):
            raise ConfigError(f"--{flag} is measured on {only} alone: --workload={only}")
    if arguments.baseline and command.peers is None:
        peers = ", ".join(key for key, one in COMMANDS.items() if one.peers is not None)
        raise ConfigError(f"--baseline: {name} has no peer to run; these have: {peers}")
    if arguments.baseline and name == "rl_step" and "ppo" in arguments.workloads:
        raise ConfigError(
            "--baseline: TRL has a GRPOTrainer alone; --workload=grpo or grpo_lora works"
        )
    for key, _ in overrides:
        if name == "attention":
            raise ConfigError("attention takes no --config.KEY: it measures kernels, not a run")
        if key in command.refused:
            raise ConfigError(f"--config.{key}: {name} takes no such key; {command.refused[key]}")


def _check_sizes(options: Options) -> None:
    """Refuse sizes that do not fit each other, and configs that no run would take."""
    if "rl_mix" in options.workloads and math.prod(options.groups or (1,)) > NUM_MIX_LENGTHS:
        raise ConfigError(f"--groups: rl_mix has {NUM_MIX_LENGTHS} lengths; 128x8 takes all")
    for shape in options.shapes:
        for workload in options.workloads if options.command == "rl_step" else ("ppo",):
            options.config(shape, workload)
