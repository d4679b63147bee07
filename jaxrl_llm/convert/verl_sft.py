"""verl's supervised trainer, `verl.trainer.sft_trainer`: what each of its keys is here.

The keys of verl 0.8 to 0.10, with the older `fsdp_sft_trainer`.
"""

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.conversion import Dialect
from jaxrl_llm.convert.rules import (
    Answer,
    NoCounterpart,
    NotNeeded,
    Rule,
    Source,
    flag,
    largest_divisor,
    only,
    part_of,
    path_at,
)
from jaxrl_llm.convert.verl import (
    KERNELS,
    LAYOUT,
    TRAINER,
    adapter_targets,
    column,
    dtype_at,
    every,
    files_at,
    optimizer_keys,
    samples_cut,
)
from jaxrl_llm.convert.verl_sizes import set_steps

SFT_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.use_dynamic_bsz": False,
    "data.max_token_len_per_gpu": 8192,
    "model.enable_gradient_checkpointing": True,
    "model.fsdp_config.dtype": "bfloat16",
    "optim.lr": 1e-3,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
}


def _field_of_a_column(value: Any, source: Source) -> Answer:
    if not value:
        return NotNeeded("it is off")
    return NoCounterpart("write the field as a column of its own (docs/data.md)")


SFT_TABLE: dict[str, Rule] = {
    **{key: rule for key, rule in TRAINER.items() if not key.startswith("trainer.critic")},
    **{
        f"optim.{key.partition('.optim.')[2]}": rule
        for key, rule in optimizer_keys("x", "actor").items()
        if ".optim." in key
    },
    "optim.lr_scheduler": optimizer_keys("x", "actor")["x.optim.lr_scheduler_type"],
    "optim.init_lr_ratio": NotNeeded("the warm-up begins near 0"),
    "optim.lr_warmup_init": NotNeeded("the warm-up begins near 0"),
    "data.train_files": files_at("data.train_files"),
    "data.val_files": files_at("data.val_files"),
    "data.train_batch_size": "data.train_batch_size",
    "data.micro_batch_size_per_gpu": part_of("actor.micro_batch_size"),
    "data.micro_batch_size": part_of("actor.micro_batch_size"),
    "data.use_dynamic_bsz": part_of("actor.micro_batch_tokens"),
    "data.max_token_len_per_gpu": part_of("actor.micro_batch_tokens"),
    "data.max_length": part_of("data.max_prompt_length"),
    "data.truncation": "data.truncation",
    "data.train_max_samples": samples_cut,
    "data.val_max_samples": samples_cut,
    "data.prompt_key": column("prompt"),
    "data.response_key": column("completion"),
    "data.messages_key": column("messages"),
    "data.multiturn.messages_key": column("messages"),
    "data.multiturn.enable": NotNeeded("rows with messages are conversations"),
    "data.prompt_dict_keys": _field_of_a_column,
    "data.response_dict_keys": _field_of_a_column,
    "data.pad_mode": NotNeeded("`micro_batch_tokens` packs without padding"),
    "data.ignore_input_ids_mismatch": NotNeeded("the template renders whole conversations"),
    "data.num_workers": "data.num_workers",
    "data.balance_dp_token": NotNeeded("packed rows are balanced"),
    "data.trust_remote_code": NotNeeded("no code of a model is run"),
    "data.use_shm": NotNeeded("files are mapped into memory"),
    "data.apply_chat_template_kwargs.*": part_of("data.chat_template_kwargs"),
    "model.path": path_at("actor.path"),
    "model.partial_pretrain": path_at("actor.path"),
    "model.tokenizer_path": path_at("data.tokenizer"),
    "model.enable_gradient_checkpointing": flag("actor.remat", on="full", off="none"),
    "model.lora_rank": "actor.lora.rank",
    "model.lora_alpha": "actor.lora.alpha",
    "model.target_modules": adapter_targets,
    "model.trust_remote_code": NotNeeded("no code of a model is run"),
    "model.use_remove_padding": NotNeeded("`micro_batch_tokens` packs without padding"),
    "model.use_liger": KERNELS,
    "model.use_fused_kernels": KERNELS,
    "model.strategy": LAYOUT,
    "model.fsdp_config.dtype": dtype_at("actor.dtype"),
    "model.fsdp_config.*": LAYOUT,
    "model.mtp.*": NoCounterpart("multi-token prediction is missing here"),
    "engine.ulysses_sequence_parallel_size": part_of("mesh.sequence"),
    "engine.context_parallel_size": part_of("mesh.sequence"),
    "engine.tensor_model_parallel_size": part_of("mesh.tensor"),
    "engine.pipeline_model_parallel_size": part_of("mesh.pipeline"),
    "engine.expert_model_parallel_size": only(
        1, "1 is no split of experts", "set `mesh.expert`, and divide `mesh.fsdp` by it"
    ),
    "engine.dtype": dtype_at("actor.dtype"),
    "engine.*": LAYOUT,
    "ulysses_sequence_parallel_size": part_of("mesh.sequence"),
    "use_remove_padding": NotNeeded("`micro_batch_tokens` packs without padding"),
    "checkpoint.*": NotNeeded("all is saved; `jaxrl export` writes Hugging Face files"),
    "trainer.checkpoint.*": NotNeeded("all is saved; `jaxrl export` writes Hugging Face files"),
    "trainer.seed": "seed",
    "trainer.max_ckpt_to_keep": TRAINER["trainer.max_actor_ckpt_to_keep"],
    "trainer.profile_interval": NotNeeded("`profile.steps` is the switch"),
    "trainer.save_freq": every("save_every"),
    "engine": LAYOUT,
    "optim": NotNeeded("AdamW is the optimizer"),
}


def finish(source: Source, values: dict[str, Any]) -> list[str]:
    """Values that need several of verl's keys; notes about them."""
    notes: list[str] = []
    values["algorithm.kind"] = "sft"
    if "actor.path" not in values:
        raise ConfigError("model.path is missing: give it")
    _set_warmup(source, values, notes)
    _set_mesh(source, values)
    longest = source.whole("data.max_length")
    values["data.max_prompt_length"] = longest // 2  # the sum limits a row
    values["data.max_response_length"] = longest - longest // 2
    _set_passes(source, values, notes)
    return notes


def _set_warmup(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    set_steps(source, values, notes)
    steps = source.whole("optim.lr_warmup_steps")
    ratio = source.number("optim.lr_warmup_steps_ratio")
    if steps <= 0 and ratio and "total_steps" in values:
        steps = int(ratio * values["total_steps"])
    elif steps <= 0 and ratio:
        notes.append(f"actor.optimizer.warmup_steps: {ratio:g} of a number of steps not known")
    if steps > 0:
        values["actor.optimizer.warmup_steps"] = steps


def _set_mesh(source: Source, values: dict[str, Any]) -> None:
    sequence = source.count(
        "engine.ulysses_sequence_parallel_size",
        "ulysses_sequence_parallel_size",
        "engine.context_parallel_size",
    )
    axes = {
        "sequence": sequence,
        "tensor": source.count("engine.tensor_model_parallel_size"),
        "pipeline": source.count("engine.pipeline_model_parallel_size"),
    }
    split = axes["sequence"] * axes["tensor"] * axes["pipeline"]
    if source.devices % split:
        raise ConfigError(
            f"{source.devices} devices are no multiple of the {split} of {axes}; give --devices=N"
        )
    values |= {f"mesh.{name}": size for name, size in axes.items()}
    values["mesh.fsdp"] = source.devices // split


def _set_passes(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    if source.get("data.use_dynamic_bsz"):
        tokens = source.whole("data.max_token_len_per_gpu") * values["mesh.sequence"]
        values["actor.micro_batch_tokens"] = max(tokens, source.whole("data.max_length"))
        return
    replicas = values["mesh.fsdp"] * values["mesh.pipeline"]
    held = source.count("data.train_batch_size") // replicas
    asked = source.whole("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    fits = largest_divisor(held, asked)
    if fits != asked:
        notes.append(f"actor.micro_batch_size: {asked} does not divide {held}, so it became {fits}")
    values["actor.micro_batch_size"] = fits


VERL_SFT = Dialect(table=SFT_TABLE, finish=finish)
