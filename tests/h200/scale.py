"""Programs of large models, planned as a run plans them and compiled for up to 1,024 H200s.

The devices exist for the compiler only. The table of docs/scaling.md is printed by, for example,

    python tests/h200/scale.py 72B PPO --mesh data=4 fsdp=8 tensor=8 pipeline=4 --row 4096
"""

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm import config as c
from jaxrl_llm.estimate.compiled import RealPrograms
from jaxrl_llm.estimate.topology import COMPILER_OPTIONS, compile_devices

MEMORY = 141e9  # bytes of an H200
ALGORITHMS = {"PPO": c.PPO(use_kl_loss=True), "GRPO": c.GRPO(use_kl_loss=True), "DPO": c.DPO()}


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 152_064
    experts: int = 0  # each of `mlp` inner numbers; 8 of a token. 0: a dense model

    def hf_config(self) -> dict[str, Any]:
        mixture = {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": self.mlp,
            "norm_topk_prob": True,
        }
        return {
            "model_type": "qwen2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 4_194_304,
            "tie_word_embeddings": False,
            **(mixture if self.experts else {}),
        }


SHAPES = {
    "7B": Shape(3584, 18_944, 28, 28, 4),  # Qwen2.5-7B
    "32B": Shape(5120, 27_648, 64, 40, 8),  # Qwen2.5-32B
    "70B": Shape(8192, 28_672, 80, 64, 8, 128_256),  # Llama-3.1-70B
    "72B": Shape(8192, 29_568, 80, 64, 8),  # Qwen2.5-72B
    "30B-A3B": Shape(2048, 768, 48, 32, 4, 151_936, 128),  # Qwen3-30B-A3B
    "235B-A22B": Shape(4096, 1536, 94, 64, 4, 151_936, 128),  # Qwen3-235B-A22B
    # DeepSeek-V3's layers of experts. Its latent attention, shared expert and three dense layers
    # do not exist here: plain attention and experts alone stand for them.
    "671B": Shape(7168, 2048, 61, 56, 8, 129_280, 256),
}


class Scaled(RealPrograms):
    """A run of a large model, planned: abstract states and the programs of a step.

    Online, samples are packed into rows of `row` tokens; offline, each record is that long. A
    micro-batch has one row or record a replica. The dtype is bf16 over float32 master weights.
    """

    def __init__(
        self,
        shape: Shape,
        algorithm: Any,
        mesh: dict[str, int],
        *,
        row: int,
        prompts: int = 1,
        **model: Any,
    ) -> None:
        """A step has `prompts` prompts or records a replica.

        `model` are settings of every model, as in `ModelSettings`.
        """
        config = c.MeshConfig(**mesh)
        offline = not isinstance(algorithm, c.PPO | c.GRPO)
        settings = {
            "dtype": "bfloat16",
            "attention": "pallas",
            "remat": "full",
            "scan_layers": True,
            **model,
        }
        settings |= {"micro_batch_size": 1} if offline else {"micro_batch_tokens": row}
        rows = config.num_replicas * prompts
        prompt = min(1024, row // 2)
        actor = {"hf_config": shape.hf_config(), **settings}
        config = c.Config(
            mesh=config,
            data=c.DataConfig(
                tokenizer="char",
                train_batch_size=rows,
                max_prompt_length=prompt,
                max_response_length=row - prompt,
            ),
            actor=c.ActorConfig(**actor, **({} if offline else {"ppo_mini_batch_size": rows})),
            critic=c.CriticConfig(**settings),
            reward=c.RewardConfig() if offline else c.RewardConfig(functions=(c.ExactAnswer(),)),
            rollout=c.RolloutConfig(n=8 if isinstance(algorithm, c.GRPO) else 1),
            algorithm=algorithm,
        )
        super().__init__(config, compile_devices(config.mesh.num_devices), (shape.kv_heads,))

    def compiled(self, stage: str, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """The program of `stage`, compiled for the cards, with other options than a plan's."""
        return self.compile(stage, COMPILER_OPTIONS | (options or {}))


def peak(compiled: jax.stages.Compiled) -> int:
    """Bytes of a device: arguments, temporaries, and results that are not arguments' memory."""
    memory = compiled.memory_analysis()
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + own


STEP = 65_536  # tokens
SHARE = 0.9  # of the card's memory that may be used


def longest_row(shape: Shape, algorithm: Any, mesh: dict[str, int]) -> int:
    """The most tokens of a row, in multiples of STEP, whose update fits with all roles; 0 if none.

    Memory grows with the row as a line does. Two short rows give the line, then the row is
    compiled.
    """

    def used(row: int) -> float:
        scaled = Scaled(shape, algorithm, mesh, row=row, prompts=mesh.get("sequence", 1))
        temporaries = scaled.compiled("update_actor").memory_analysis().temp_size_in_bytes
        total = temporaries + sum(scaled.resident().values())
        print(f"a row of {row:,} tokens needs {total / 1e9:.1f} GB a device", flush=True)
        return total

    short = STEP * max(1, math.prod(mesh.values()) // 8)
    first, second = used(short), used(2 * short)
    row = int(short + (SHARE * MEMORY - first) * short / (second - first)) // STEP * STEP
    while row > 0 and used(row) > SHARE * MEMORY:
        row -= STEP * max(1, row // STEP // 20)
    return max(row, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("--mesh", nargs="+", required=True, metavar="AXIS=SIZE")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step, a replica")
    parser.add_argument("--stages", nargs="*", help="the programs to compile; all of them if none")
    parser.add_argument("--longest", action="store_true", help="the longest row that fits")
    options = parser.parse_args()
    mesh = {axis: int(size) for axis, _, size in (x.partition("=") for x in options.mesh)}
    shape, algorithm = SHAPES[options.shape], ALGORITHMS[options.algorithm]
    if options.longest:
        print(f"{longest_row(shape, algorithm, mesh):,} tokens")
        return
    scaled = Scaled(shape, algorithm, mesh, row=options.row, prompts=options.prompts)
    for role, size in scaled.resident().items():
        print(f"{role} keeps {size / 1e9:.2f} GB a device", flush=True)
    for stage in options.stages or scaled.stages:
        start = time.monotonic()
        memory = scaled.compiled(stage).memory_analysis()
        print(
            f"{stage}: arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, temporaries "
            f"{memory.temp_size_in_bytes / 1e9:.2f} GB; {time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
