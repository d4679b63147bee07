"""TRL's keys, its defaults, and what each key is here.

The keys and defaults of TRL 1.10, with `transformers.TrainingArguments`.
"""

from pathlib import Path
from typing import Any

from jaxrl_llm.convert.rules import (
    Answer,
    NoCounterpart,
    NotNeeded,
    Ours,
    Rule,
    Source,
    epochs,
    flag,
    many,
    not_null,
    only,
    part_of,
    path_at,
    schedule,
    top_k,
    trackers,
)

TRAINERS = ("sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "ppo")
# Names of TRL's example scripts, where they are not the trainer's.
SCRIPTS = {"gspo": "grpo", "ppo_tldr": "ppo", "reward_modeling": "reward"}

COMMON_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
GROUP_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "epsilon": 0.2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start"},
    "dpo": {
        "learning_rate": 1e-6,
        "max_length": 1024,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "truncation_mode": "keep_start",
    },
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "orpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "cpo": {
        "learning_rate": 1e-6,
        "max_length": 1024,
        "beta": 0.1,
        "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
        "loss_type": "sigmoid",
    },
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "grpo": GROUP_DEFAULTS
    | {
        "num_generations": 8,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "loss_type": "dapo",
        "scale_rewards": "group",
    },
    "rloo": GROUP_DEFAULTS | {"num_generations": 2, "beta": 0.05},
    "ppo": {
        "learning_rate": 3e-6,
        "response_length": 53,
        "temperature": 0.7,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "kl_coef": 0.05,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "lam": 0.95,
    },
}

ENGINE = NotNeeded("one engine generates inside the training program")
KERNELS = NotNeeded("XLA compiles and fuses; logits are computed in blocks")
LAYOUT = NotNeeded("`mesh.fsdp` splits weights and optimizer state")
NO_BITS = NoCounterpart("frozen weights have 8 or 16 bits: actor.base_dtype=float8")
UPLOAD = not_null("`jaxrl export` writes the folder; upload it", learned=False)
SHOWN = NotNeeded("samples are always in the console, the report and the trace")
SMALLEST = 1e-9  # bound of an importance weight, in place of none
READING = NotNeeded("rows are read as they are needed")
PADDING = NotNeeded("`actor.micro_batch_tokens` packs without padding")
TOKENIZER = NoCounterpart("write it into the tokenizer's folder")


# ------------------------------------------------------------------------- single keys


def _model(value: Any, source: Source) -> Answer:
    path = str(Path(str(value)).expanduser())
    if source.trainer == "ppo" and source.get("sft_model_path"):
        return Ours({"data.tokenizer": path}, "the policy is sft_model_path")
    return Ours({"actor.path": path})


def _dtype(value: Any, source: Source) -> Answer:
    if value in ("auto", None):
        return NotNeeded("computation is bfloat16 by bf16, and weights that learn are float32")
    if value in ("bfloat16", "float32"):
        return Ours({"actor.dtype": value}, "weights that learn are float32")
    return NoCounterpart("actor.dtype is float32 or bfloat16")


def _bf16(value: Any, source: Source) -> Answer:
    dtype = source.settings.get("dtype", source.settings.get("torch_dtype"))
    if dtype in ("bfloat16", "float32") and "bf16" not in source.settings:
        return Ours({})
    return Ours({"actor.dtype": "bfloat16" if value else "float32"})


def adapters(key: str) -> Rule:
    """A key of LoRA, which use_peft switches on."""

    def rule(value: Any, source: Source) -> Answer:
        if not source.get("use_peft"):
            return NotNeeded("use_peft is off")
        return Ours({key: value})

    return rule


def _targets(value: Any, source: Source) -> Answer:
    if not source.get("use_peft"):
        return NotNeeded("use_peft is off")
    names = [str(name).strip(", ") for name in many(value)]
    return Ours({"actor.lora.targets": names})


def _optimizer(value: Any, source: Source) -> Answer:
    if str(value).startswith(("adamw_torch", "adamw_hf", "adamw_apex")):
        return NotNeeded("AdamW is the default")
    name = str(value).partition("_")[0]
    if name in ("lion", "adafactor"):
        return Ours({"actor.optimizer.name": name})
    if "8bit" in str(value):
        return Ours({"actor.optimizer.moment_dtype": "bfloat16"}, "16 bits, not 8")
    return NoCounterpart("actor.optimizer.name=my_file.py:optimizer takes one of yours")


def _resume(value: Any, source: Source) -> Answer:
    if isinstance(value, bool) or value is None:
        return NotNeeded("a run in the same folder goes on by itself")
    return NoCounterpart("a checkpoint of TRL has no optimizer state for us; give its weights")


def _eval_batch(value: Any, source: Source) -> Answer:
    return Ours({"data.val_batch_size": int(value) * source.devices})


def _beta(value: Any, source: Source) -> Answer:
    if source.trainer == "rloo":
        return Ours(
            {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_coef": float(value)},
            "in the reward",
        )
    if source.trainer == "grpo":
        return Ours(
            {
                "algorithm.use_kl_loss": bool(value),
                "algorithm.kl_loss_coef": float(value),
                "algorithm.kl_loss_type": "k3_unclamped",
                "algorithm.kl_loss_unbiased": bool(value and source.get("use_bias_correction_kl")),
            },
            "in the loss",
        )
    return Ours({"algorithm.beta": value})


def _epsilon(value: Any, source: Source) -> Answer:
    return Ours(
        {
            "algorithm.clip_low": value,
            "algorithm.clip_high": source.get("epsilon_high") or value,
        }
    )


def _completions(value: Any, source: Source) -> Answer:
    return Ours({"data.max_response_length": value} if value else {})


def _prompt_length(value: Any, source: Source) -> Answer:
    return Ours({"data.max_prompt_length": value} if value else {})


def _truncation(value: Any, source: Source) -> Answer:
    return Ours({"data.truncation": "left" if value == "keep_end" else "right"})


def _correction(value: Any, source: Source) -> Answer:
    """TRL's correction of the gap between vLLM and trainer."""
    level, _, how = str(value).partition("_")
    most = source.get("vllm_importance_sampling_clip_max") or 3.0
    values: dict[str, Any] = {"algorithm.rollout_is": level}
    least = source.get("vllm_importance_sampling_clip_min") or SMALLEST
    values["algorithm.rollout_is_threshold"] = f"{least}_{most}" if how == "mask" else float(most)
    return Ours(values, "sampler and trainer differ less here: it may stay off")


def _centre(value: Any, source: Source) -> Answer:
    return Ours({"algorithm.center": float(value)} if value else {})


def _loss_names(value: Any, source: Source) -> Answer:
    return Ours(part_of="algorithm")


def _coefficient(key: str) -> Rule:
    return lambda value, source: Ours({key: float(value)})


# ------------------------------------------------------------------------- tables

LEARNING: dict[str, Rule] = {
    "per_device_train_batch_size": part_of("data.train_batch_size"),
    "gradient_accumulation_steps": part_of("data.train_batch_size"),
    "per_device_eval_batch_size": _eval_batch,
    "eval_accumulation_steps": NotNeeded("metrics are summed as they come"),
    "auto_find_batch_size": NoCounterpart("`jaxrl plan` finds sizes that fit", learned=False),
    "num_train_epochs": lambda value, source: epochs(source, source.number("max_steps") > 0),
    "max_steps": part_of("total_steps"),
    "learning_rate": "actor.optimizer.learning_rate",
    "lr_scheduler_type": schedule("actor.optimizer.schedule"),
    "lr_scheduler_kwargs": not_null("`optimizer.min_learning_rate_ratio` is the one setting"),
    "warmup_steps": part_of("actor.optimizer.warmup_steps"),
    "warmup_ratio": part_of("actor.optimizer.warmup_steps"),
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.b1",
    "adam_beta2": "actor.optimizer.b2",
    "adam_epsilon": "actor.optimizer.eps",
    "max_grad_norm": _coefficient("actor.optimizer.max_grad_norm"),
    "optim": _optimizer,
    "bf16": _bf16,
    "fp16": not_null("float16 is missing: bf16"),
    "tf32": NotNeeded("float32 matmuls keep their bits"),
    "gradient_checkpointing": flag("actor.remat", on="full", off="none"),
    "gradient_checkpointing_kwargs": NotNeeded("`actor.remat` is the one setting"),
    "activation_offloading": NotNeeded("`remat=full` keeps layer inputs only"),
    "use_liger_kernel": KERNELS,
    "torch_compile": KERNELS,
    "torch_empty_cache_steps": KERNELS,
    "ddp_find_unused_parameters": LAYOUT,
    "ddp_timeout": LAYOUT,
    "deepspeed": LAYOUT,
    "accelerate_config": LAYOUT,
    "fsdp": LAYOUT,
    "fsdp_config": LAYOUT,
    "ds3_gather_for_generation": LAYOUT,
    "seed": "seed",
    "data_seed": NotNeeded("`seed` seeds all"),
    "disable_dropout": NotNeeded("models have no dropout"),
    "use_cpu": NotNeeded("jax finds the devices"),
    "router_aux_loss_coef": "actor.router_aux_loss_coef",
    "remove_unused_columns": NotNeeded("columns go to the reward functions"),
    "label_names": NotNeeded("columns are found by their names"),
}

OUTPUT: dict[str, Rule] = {
    "output_dir": "run_dir",
    "overwrite_output_dir": only(
        False, "a run goes on in its folder", "`resume=never`, or another run_dir"
    ),
    "run_name": "name",
    "logging_steps": lambda value, source: Ours({"log.console_every": max(1, int(value))}),
    "logging_first_step": NotNeeded("the first step is always shown"),
    "logging_strategy": NotNeeded("every step is logged"),
    "logging_dir": NotNeeded("logs are in the run's folder"),
    "report_to": trackers,
    "save_strategy": part_of("save_every"),
    "save_steps": part_of("save_every"),
    "save_total_limit": "checkpoint.keep_latest",
    "save_only_model": NotNeeded("`jaxrl export` writes the weights alone"),
    "load_best_model_at_end": NotNeeded("`checkpoint.keep_best` keeps it"),
    "metric_for_best_model": NoCounterpart(
        "`checkpoint.best_metric`, by the name in docs/metrics.md", learned=False
    ),
    "greater_is_better": NotNeeded("a minus before checkpoint.best_metric says so"),
    "resume_from_checkpoint": _resume,
    "eval_strategy": part_of("validation.every"),
    "eval_steps": part_of("validation.every"),
    "eval_on_start": "validation.before_train",
    "do_eval": NotNeeded("held-out data are evaluated if there are some"),
    "do_train": NotNeeded("the command trains"),
    "push_to_hub": UPLOAD,
    "hub_model_id": UPLOAD,
    "hub_strategy": NotNeeded("nothing is uploaded"),
    "hub_private_repo": NotNeeded("nothing is uploaded"),
    "log_completions": SHOWN,
    "log_multimodal": SHOWN,
    "log_unique_prompts": SHOWN,
    "num_completions_to_print": "log.num_samples",
    "generate_during_eval": "validation.generate",
    "disable_tqdm": NotNeeded("a pipe gets no progress line"),
}

MODELS: dict[str, Rule] = {
    "model_name_or_path": _model,
    "model_revision": only("main", "main is the default", "download that revision as a folder"),
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "attn_implementation": NotNeeded("`actor.attention=auto` takes the fastest"),
    "trust_remote_code": NotNeeded("no code of a model is run"),
    "model_init_kwargs": not_null("keys of `actor` set type and attention"),
    "use_peft": part_of("actor.lora"),
    "lora_r": adapters("actor.lora.rank"),
    "lora_alpha": adapters("actor.lora.alpha"),
    "lora_dropout": adapters("actor.lora.dropout"),
    "lora_target_modules": _targets,
    "lora_task_type": NotNeeded("the algorithm says it"),
    "lora_modules_to_save": not_null("adapters learn, and no other weights"),
    "use_rslora": adapters("actor.lora.rslora"),
    "use_dora": adapters("actor.lora.dora"),
    "load_in_4bit": NO_BITS,
    "load_in_8bit": NO_BITS,
    "bnb_4bit_quant_type": NO_BITS,
    "use_bnb_nested_quant": NO_BITS,
    "cast_lm_head_to_fp32": lambda value, source: Ours(
        {"actor.head_dtype": "float32"} if value else {}
    ),
}

DATA: dict[str, Rule] = {
    "dataset_name": part_of("data.train_files"),
    "dataset_config": part_of("data.train_files"),
    "dataset_train_split": part_of("data.train_files"),
    "dataset_test_split": part_of("data.val_files"),
    "dataset_streaming": READING,
    "dataset_num_proc": READING,
    "dataloader_num_workers": "data.num_workers",
    "dataloader_pin_memory": READING,
    "dataloader_drop_last": READING,
    "shuffle_dataset": "data.shuffle",
    "max_length": part_of("data.max_prompt_length"),
    "max_seq_length": part_of("data.max_prompt_length"),
    "max_prompt_length": _prompt_length,
    "max_completion_length": _completions,
    "truncation_mode": _truncation,
    "packing": part_of("actor.micro_batch_tokens"),
    "packing_strategy": PADDING,
    "eval_packing": PADDING,
    "padding_free": PADDING,
    "pad_to_multiple_of": PADDING,
    "pad_token": PADDING,
    "eos_token": TOKENIZER,
    "chat_template_path": TOKENIZER,
    "chat_template_kwargs": "data.chat_template_kwargs",
    "dataset_text_field": lambda value, source: Ours(
        {} if value == "text" else {"data.columns.text": value}
    ),
    "completion_only_loss": only(
        True, "the loss is on completions", "rows with the column text count whole"
    ),
    "assistant_only_loss": only(
        True, "the loss is on the assistant's turns", "rows with the column text count whole"
    ),
}

GENERATION: dict[str, Rule] = {
    "num_generations": "rollout.n",
    "num_generations_eval": "validation.n",
    # TRL counts answers to calls, and a turn of the model follows the last one.
    "max_tool_calling_iterations": lambda value, source: Ours(
        {"rollout.max_turns": 0 if value is None else int(value) + 1}
    ),
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": top_k,
    "min_p": lambda value, source: Ours({"rollout.min_p": float(value or 0.0)}),
    "repetition_penalty": only(1.0, "1 is off", "sampling has temperature, top_k, top_p, min_p"),
    "generation_kwargs": not_null("sampling has temperature, top_k, top_p, min_p"),
    "cache_implementation": ENGINE,
    "use_transformers_paged": ENGINE,
    "use_transformers_continuous_batching": ENGINE,
    "use_vllm": ENGINE,
    "vllm_importance_sampling_correction": NotNeeded("the gap is small; `algorithm.rollout_is`"),
    "vllm_importance_sampling_mode": _correction,
    "vllm_importance_sampling_clip_min": part_of("algorithm.rollout_is_threshold"),
    "vllm_importance_sampling_clip_max": part_of("algorithm.rollout_is_threshold"),
    **{
        f"vllm_{name}": ENGINE
        for name in (
            "mode", "model_impl", "enable_sleep_mode", "server_base_url", "server_host",
            "server_port", "server_timeout", "group_port", "gpu_memory_utilization",
            "max_model_length", "tensor_parallel_size",
        )
    },
}  # fmt: skip

GROUPS: dict[str, Rule] = {
    "generation_batch_size": part_of("data.train_batch_size"),
    "steps_per_generation": part_of("data.train_batch_size"),
    "num_iterations": part_of("actor.ppo_epochs"),
    "beta": _beta,
    "epsilon": _epsilon,
    "epsilon_high": part_of("algorithm.clip_high"),
    "delta": lambda value, source: Ours({"algorithm.clip_c": float(value)} if value else {}),
    "loss_type": _loss_names,
    "importance_sampling_level": _loss_names,
    "scale_rewards": _loss_names,
    "multi_objective_aggregation": _loss_names,
    "sapo_temperature_pos": "algorithm.tau_pos",
    "sapo_temperature_neg": "algorithm.tau_neg",
    "entropy_coef": "algorithm.entropy_coef",
    "use_adaptive_entropy": not_null("`algorithm.entropy_coef` is constant"),
    "top_entropy_quantile": only(1.0, "all tokens count", "all tokens count"),
    "mask_truncated_completions": "rollout.mask_truncated",
    "normalize_advantages": not_null("`algorithm=reinforce_plus_plus` whitens over the batch"),
    "reward_clip_range": not_null("clip in the reward function"),
    "sync_ref_model": part_of("reference.refresh_every"),
    "ref_model_sync_steps": part_of("reference.refresh_every"),
    "ref_model_mixup_alpha": part_of("reference.mixup_alpha"),
    "off_policy_mask_threshold": "algorithm.off_policy_mask",
    "use_bias_correction_kl": part_of("algorithm.kl_loss_unbiased"),
    "reward_funcs": part_of("reward.functions"),
    "reward_weights": lambda value, source: Ours(
        {"reward.weights": [float(weight) for weight in many(value)]}
    ),
    "reward_model_name_or_path": path_at("reward.model.path"),
}

OFFLINE: dict[str, Rule] = {
    "label_smoothing": "algorithm.label_smoothing",
    "loss_weights": _loss_names,
    "precompute_ref_log_probs": "precompute_reference",
    "precompute_ref_batch_size": NotNeeded("passes take actor.micro_batch_size"),
    "desirable_weight": _coefficient("algorithm.desirable_weight"),
    "undesirable_weight": _coefficient("algorithm.undesirable_weight"),
    "cpo_alpha": _loss_names,
    "simpo_gamma": _loss_names,
    "center_rewards_coefficient": _centre,
    "f_divergence_type": only("reverse_kl", "it is the reverse KL", "it is the reverse KL"),
    "ld_alpha": not_null("`form=sigmoid_norm` divides by lengths"),
    "use_weighting": not_null("write an algorithm (docs/add-an-algorithm.md)"),
    "is_encoder_decoder": not_null("decoders only"),
    "alpha": not_null("write an algorithm (docs/add-an-algorithm.md)"),
}

VALUE_MODEL: dict[str, Rule] = {
    "num_ppo_epochs": part_of("actor.ppo_epochs"),
    "num_mini_batches": part_of("actor.ppo_mini_batch_size"),
    "total_episodes": part_of("total_steps"),
    "response_length": "data.max_response_length",
    "stop_token": only("eos", "eos ends a response", "rollout.stop_token_ids"),
    "stop_token_id": lambda value, source: Ours({"rollout.stop_token_ids": list(many(value))}),
    "missing_eos_penalty": not_null("`overlong_penalty` in reward.functions, or a function"),
    "sft_model_path": path_at("actor.path"),
    "reward_model_path": path_at("reward.model.path"),
    "local_rollout_forward_batch_size": NotNeeded("passes take actor.micro_batch_size"),
    "num_sample_generations": SHOWN,
    "whiten_rewards": not_null("advantages are whitened"),
    "kl_coef": lambda value, source: Ours(
        {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_coef": float(value)}
    ),
    "kl_estimator": "algorithm.kl_reward_type",
    "cliprange": lambda value, source: Ours(
        {"algorithm.clip_low": value, "algorithm.clip_high": value}
    ),
    "cliprange_value": "algorithm.cliprange_value",
    "vf_coef": NotNeeded("the critic has an optimizer of its own"),
    "gamma": _coefficient("algorithm.gamma"),
    "lam": _coefficient("algorithm.lam"),
}

TABLE: dict[str, Rule] = (
    LEARNING | OUTPUT | MODELS | DATA | GENERATION | GROUPS | OFFLINE | VALUE_MODEL
)
