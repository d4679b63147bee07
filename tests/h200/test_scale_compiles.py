"""Updates of large models, planned as a run plans them and compiled for up to 1,024 H200s.

The devices exist for the compiler only. Generation is not compiled here.
"""

from typing import Any

from target import h200_mesh, needs_compiler

from jaxrl_llm import config as c
from jaxrl_llm.distributed.layout import cuts_for
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.online import plan_iteration
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.rewarding import ArrayReward

pytestmark = needs_compiler

MEMORY = 141e9  # bytes of an H200
TUNED = {"xla_gpu_autotune_level": 4}  # Triton's matmuls are an error without tuning
SHAPES = {
    "7B": (3584, 18_944, 28, 28, 4),
    "32B": (5120, 27_648, 64, 40, 8),
    "70B": (8192, 28_672, 80, 64, 8),
    "72B": (8192, 29_568, 80, 64, 8),
}


def settings(shape: str) -> dict[str, Any]:
    hidden, mlp, layers, heads, kv_heads = SHAPES[shape]
    hf_config = {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    }
    return {
        "hf_config": hf_config,
        "dtype": "bfloat16",
        "attention": "pallas",
        "remat": "full",
        "scan_layers": True,
    }


def compiled_ppo(shape: str, devices: dict[str, int], *, prompts: int, row: int) -> Any:
    """The actor's update of an iteration of PPO, one mini-batch of packed rows."""
    model = settings(shape)
    config = c.Config(
        mesh=c.MeshConfig(**devices),
        fuse_stages=False,
        data=c.DataConfig(
            tokenizer="char",
            train_batch_size=prompts,
            max_prompt_length=1024,
            max_response_length=1024,
        ),
        actor=c.ActorConfig(**model, ppo_mini_batch_size=prompts, micro_batch_tokens=row),
        critic=c.CriticConfig(**model, micro_batch_tokens=row),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
        algorithm=c.PPO(use_kl_loss=True),
    )
    reward = ArrayReward(lambda responses, mask: mask.sum(axis=1))
    iteration = plan_iteration(config, load_tokenizer("char"), mesh_for(config.mesh, shape), reward)
    states, batch = iteration.abstract_states(), iteration.abstract_batch()
    segment = next(s for s in iteration.program.segments if s.name == "update_actor")
    batch = iteration.program.trace(states, batch)
    return iteration.program.lower(segment, states, batch).compile(compiler_options=TUNED)


def compiled_dpo(shape: str, devices: dict[str, int], *, pairs: int) -> Any:
    """A step of DPO with its reference model, one pair a replica and pass."""
    config = c.Config(
        mesh=c.MeshConfig(**devices),
        data=c.DataConfig(
            tokenizer="char",
            train_batch_size=pairs,
            max_prompt_length=1024,
            max_response_length=1024,
        ),
        actor=c.ActorConfig(**settings(shape), micro_batch_size=config_rows(devices)),
        algorithm=c.DPO(),
    )
    plan = plan_offline(config, load_tokenizer("char"), mesh_for(config.mesh, shape))
    states = plan.abstract_states({})
    (segment,) = plan.program.segments
    return plan.program.lower(segment, states, plan.trace()).compile(compiler_options=TUNED)


def config_rows(devices: dict[str, int]) -> int:
    """Records of a device and pass: at least one for each stage."""
    return devices.get("pipeline", 1)


def mesh_for(config: c.MeshConfig, shape: str) -> Any:
    cuts = cuts_for(config.sizes, (), [SHAPES[shape][-1]])
    others = {axis: config.sizes[axis] for axis in ("sequence", "pipeline")}
    return h200_mesh((config.data, config.fsdp, config.tensor), **others, cuts=cuts)


def gigabytes(compiled: Any) -> float:
    """Of a device: arguments, temporaries, and results that are not arguments' memory."""
    memory = compiled.memory_analysis()
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + own) / 1e9
