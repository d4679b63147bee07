"""The benchmarks: workloads and flags of each command, and sizes by shape. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

Batch = tuple[int, int]  # rows, tokens a row; (rows, 0) where rows suffice
NUM_MIX_LENGTHS = 1024
# Keys of a config that set the size of a whole step.
STEP_SIZES: tuple[str, ...] = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "rollout.n",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The workloads and flags of one benchmark."""

    workloads: tuple[str, ...]
    default: tuple[str, ...]  # the workloads that run when none is named
    shape: str = "qwen2.5-1.5b"
    batch: str = ""  # the form of --batch; empty where there is no such flag
    flags: tuple[str, ...] = ()  # flags that not every command takes
    # Scripts of the folder peers/; attention's peers run in this process. None refuses --baseline.
    peers: tuple[str, ...] | None = None
    # Keys of a config that this benchmark does not take, and why.
    refused: Mapping[str, str] = field(default_factory=dict)


_NO_WARMUP = {"critic.warmup_steps": "the actor's updates would be left out"}
_NO_ADAPTERS = {
    "actor.lora.rank": "rl_step --workload=grpo_lora measures adapters",
    "critic.lora.rank": "rl_step measures adapters: --workload=ppo --config.critic.lora.rank=N",
}
_NO_FILTERS = dict.fromkeys(
    ("rollout.top_k", "rollout.top_p", "rollout.min_p"),
    "the check compares log-probs of the whole softmax; rl_step measures filters",
)
_NO_SIZES: dict[str, str] = dict.fromkeys(
    STEP_SIZES, "it does nothing here; --batch, --prompt, --response and --groups set the sizes"
)
COMMANDS = {
    "generation": Command(
        workloads=("fixed", "rl_mix", "prefill", "lengths"),
        default=("fixed", "rl_mix"),
        batch="ROWS, e.g. 64",
        flags=("lengths", "compiler_option"),
        peers=("vllm_generation",),
        refused=_NO_SIZES
        | _NO_FILTERS
        | {"rollout.temperature": "the check compares log-probs at temperature 1"},
    ),
    "sessions": Command(
        workloads=("rl_mix", "append", "clients", "turns"),
        default=("rl_mix", "append", "clients"),
        batch="ROWS, e.g. 64",
        refused=_NO_SIZES
        | _NO_FILTERS
        | {"rollout.temperature": "the check compares log-probs at temperature 1"},
    ),
    "training": Command(
        workloads=("update", "logprob", "reference", "values", "mix", "lengths"),
        default=("update", "logprob"),
        batch="ROWSxTOKENS, e.g. 4x2048",
        flags=("lengths", "compiler_option"),
        peers=("torch_training",),
        refused=_NO_SIZES | _NO_WARMUP | _NO_ADAPTERS,
    ),
    "attention": Command(
        workloads=("dense", "packed", "decode"),
        default=("dense", "packed", "decode"),
        shape="llama-3.1-8b,qwen2.5-0.5b",
        batch="ROWSxTOKENS, e.g. 4x2048",
        flags=("head_dim", "window", "cache", "compiler_option"),
        peers=(),
    ),
    # The workloads are algorithms; with _lora adapters learn, with _apart unmerged ones generate.
    "rl_step": Command(
        workloads=("ppo", "grpo", "grpo_lora", "grpo_lora_apart"),
        default=("ppo",),
        peers=("trl_step",),
        refused=_NO_WARMUP,
    ),
    "layout_switch": Command(
        workloads=("switch",), default=("switch",), flags=("compiler_option",), refused=_NO_SIZES
    ),
}
# Flags that one workload measures: it must be the only one.
ONLY_WITH = {"window": "dense", "cache": "decode", "lengths": "lengths"}

# Batches of each workload by shape, "" for every other shape: the rows of docs/results.jsonl.
_TRAINING: dict[str, tuple[Batch, ...]] = {
    "tiny": ((2, 32),),
    "qwen2.5-0.5b": ((8, 2048),),
    "qwen2.5-1.5b": ((4, 2048), (8, 4096)),
    "": ((2, 2048),),
}
BATCHES: dict[str, dict[str, tuple[Batch, ...]]] = {
    "fixed": {
        "tiny": ((1, 0), (3, 0)),
        "qwen2.5-7b": ((1, 0), (64, 0), (256, 0)),
        "": ((1, 0), (64, 0), (256, 0), (1024, 0)),
    },
    "prefill": {"tiny": ((3, 0),), "": ((256, 0),)},
    "append": {"tiny": ((2, 0),), "": ((1, 0), (256, 0))},
    "clients": {"tiny": ((3, 0),), "": ((1, 0), (64, 0), (256, 0))},
    "turns": {"tiny": ((3, 0),), "": ((1024, 0),)},
    "update": _TRAINING,
    "logprob": _TRAINING,
    "reference": _TRAINING,
    "values": _TRAINING,
    # 16k tokens in all, and one longer row.
    "dense": {
        "tiny": ((2, 64),),
        "": ((16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768)),
    },
    "packed": {"tiny": ((1, 128),), "": ((1, 16384), (1, 32768))},
    # Slots, and the entries of each slot's own cache.
    "decode": {"tiny": ((4, 64),), "": ((64, 2048), (256, 2048), (1024, 2048))},
}
# Tokens of a prompt and of a response; prompts and samples of each in rl_step and the mixes.
LENGTHS = {"tiny": (8, 8), "": (512, 512)}
GROUPS = {"tiny": (4, 2), "": (128, 8)}


def of_shape(table: Mapping[str, T], shape: str) -> T:
    """The entry of `shape`, or the one for every other shape."""
    return table.get(shape, table[""])
