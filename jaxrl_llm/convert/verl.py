"""verl's RL trainer, `verl.trainer.main_ppo`: what each of its keys is here.

The keys and defaults of verl 0.8 to 0.10.
"""

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.conversion import Dialect
from jaxrl_llm.convert.rules import (
    NoCounterpart,
    NotNeeded,
    Ours,
    Rule,
    Source,
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
from jaxrl_llm.convert.verl_rewards import set_rewards
from jaxrl_llm.convert.verl_sizes import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    has_critic,
    set_mesh,
    set_passes,
    set_schedules,
    set_steps,
)
from jaxrl_llm.convert.verl_values import (
    ENGINE,
    FOREIGN,
    IMAGES,
    KERNELS,
    LAYOUT,
    MODEL,
    MOE,
    MULTI_TURN,
    PASSES,
    PROCESSES,
    PROFILER,
    TOOLS,
    TURNS,
    adapter_rank,
    adapter_targets,
    agent_loop,
    aggregation,
    betas,
    clip,
    column,
    correction_loss,
    critic_mini_batch,
    critic_only,
    critic_path,
    critic_warmup,
    custom_class,
    dtype_at,
    every,
    files_at,
    filter_metric,
    filter_rounds,
    generated_length,
    importance,
    learning_dtype,
    learns_without_ratio,
    manager,
    min_learning_rate,
    most_turns,
    of_turns,
    offload,
    optimizer_kind,
    quantization,
    recompute,
    resume,
    samples_cut,
    threshold,
    total_epochs,
    val_top_k,
)

REF = "actor_rollout_ref.ref"

# Defaults of verl that a run depends on. Of others, ours are the same.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{MODEL}.enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{ACTOR}.fsdp_config.fsdp_size": -1,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.optim.lr": 1e-5,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}

# ------------------------------------------------------------------------- tables


def optimizer_keys(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of an optimizer, of FSDP's and of Megatron's."""
    ours = f"{role}.optimizer"
    override = f"{theirs}.optim.override_optimizer_config"
    return {
        f"{theirs}.optim.lr": f"{ours}.learning_rate",
        f"{theirs}.optim.lr_warmup_steps": part_of(f"{ours}.warmup_steps"),
        f"{theirs}.optim.lr_warmup_steps_ratio": part_of(f"{ours}.warmup_steps"),
        f"{theirs}.optim.weight_decay": f"{ours}.weight_decay",
        f"{theirs}.optim.betas": betas(role),
        f"{theirs}.optim.clip_grad": f"{ours}.max_grad_norm",
        f"{theirs}.grad_clip": f"{ours}.max_grad_norm",
        f"{theirs}.optim.lr_scheduler_type": schedule(f"{ours}.schedule"),
        f"{theirs}.optim.warmup_style": schedule(f"{ours}.schedule"),
        f"{theirs}.optim.lr_decay_style": schedule(f"{ours}.schedule"),
        f"{theirs}.optim.min_lr_ratio": f"{ours}.min_learning_rate_ratio",
        f"{theirs}.optim.min_lr": min_learning_rate(role, theirs),
        f"{theirs}.optim.optimizer": optimizer_kind(role),
        f"{theirs}.optim.optimizer_impl": NotNeeded("optax computes it"),
        f"{theirs}.optim.total_training_steps": NotNeeded("the schedule ends with the run"),
        f"{override}.optimizer_cpu_offload": offload(role),
        f"{override}.*": NotNeeded("`optimizer.offload` moves the whole state"),
    }


def _learner(theirs: str, role: str, fsdp: str) -> dict[str, Rule]:
    """Keys that the actor and the critic share."""
    megatron = f"{theirs}.megatron"
    return {
        **optimizer_keys(theirs, role),
        f"{theirs}.strategy": LAYOUT,
        f"{theirs}.ppo_micro_batch_size_per_gpu": part_of(f"{role}.micro_batch_size"),
        f"{theirs}.ppo_micro_batch_size": part_of(f"{role}.micro_batch_size"),
        f"{theirs}.use_dynamic_bsz": part_of(f"{role}.micro_batch_tokens"),
        f"{theirs}.ppo_max_token_len_per_gpu": part_of(f"{role}.micro_batch_tokens"),
        f"{theirs}.forward_micro_batch_size_per_gpu": PASSES,
        f"{theirs}.forward_max_token_len_per_gpu": PASSES,
        f"{theirs}.{fsdp}.optimizer_offload": offload(role),
        f"{theirs}.{fsdp}.offload_policy": offload(role),
        f"{theirs}.{fsdp}.dtype": dtype_at(f"{role}.dtype"),
        f"{theirs}.{fsdp}.mixed_precision.param_dtype": dtype_at(f"{role}.dtype"),
        f"{theirs}.{fsdp}.model_dtype": learning_dtype,
        **{f"{theirs}.{fsdp}.{name}": LAYOUT for name in FSDP_KEYS},
        f"{megatron}.optimizer_offload": offload(role),
        f"{megatron}.expert_model_parallel_size": MOE,
        f"{megatron}.expert_tensor_parallel_size": NotNeeded("it splits experts only"),
        f"{megatron}.dtype": dtype_at(f"{role}.dtype"),
        **{f"{megatron}.{name}": LAYOUT for name in MEGATRON_KEYS},
        f"{theirs}.checkpoint.*": NotNeeded(
            "all is saved; `jaxrl export` writes Hugging Face files"
        ),
        f"{theirs}.profiler.*": PROFILER,
        f"{theirs}.data_loader_seed": NotNeeded("`seed` seeds all"),
        f"{theirs}.use_torch_compile": KERNELS,
        f"{theirs}.nccl_timeout": PROCESSES,
    }


# Names below a folder, of which each has the same answer. A folder.* takes any name.
FSDP_KEYS = (
    "param_offload", "wrap_policy.*", "reshard_after_forward", "forward_prefetch", "strategy",
    "use_orig_params", "entropy_checkpointing", "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size", "use_torch_compile", "pad_to_length", "full_determinism",
    "mixed_precision.*", "turbo_config.*", "seed",
)  # fmt: skip
MEGATRON_KEYS = (
    "param_offload", "grad_offload", "sequence_parallel", "use_mbridge", "vanilla_mbridge",
    "use_dist_checkpointing", "dist_checkpointing_path", "use_remove_padding",
    "use_distributed_optimizer", "use_megatron_fsdp", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "override_transformer_config.*", "override_ddp_config.*", "seed",
    "extra.*",
)  # fmt: skip
OFFLOADS = (
    "optimizer_offload", "offload_policy", "model_dtype", "dtype", "fsdp_size",
    "ulysses_sequence_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
PASS_KEYS = (
    "strategy", "use_torch_compile", "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz",
    "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "profiler.*",
    "ulysses_sequence_parallel_size", "entropy_checkpointing", "entropy_from_logits_with_chunking",
)  # fmt: skip
ENGINE_KEYS = (
    "name", "mode", "gpu_memory_utilization", "enforce_eager", "free_cache_engine", "load_format",
    "layered_summon", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching",
    "max_model_len", "cudagraph_capture_sizes", "checkpoint_engine.*", "engine_kwargs.*",
    "update_weights_bucket_megabytes", "data_parallel_size", "pipeline_model_parallel_size",
    "disable_log_stats", "skip_tokenizer_init", "scheduling_policy", "multi_stage_wake_up",
    "profiler.*", "trace.*", "prometheus.*", "skip_rollout", "skip_dump_dir", "over_sample_rate",
    "full_determinism", "seed", "nnodes", "n_gpus_per_node",
)  # fmt: skip
SCORE_KEYS = (
    "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_length", "strategy",
    "forward_max_token_len_per_gpu", "num_workers", "use_reward_loop", "rollout.*",
    "enable_resource_pool", "n_gpus_per_node", "nnodes", "model.use_remove_padding",
    "model.fsdp_config.*", "model.trust_remote_code", "model.use_fused_kernels",
    "model.input_tokenizer", "ulysses_sequence_parallel_size", "profiler.*",
)  # fmt: skip

DATA: dict[str, Rule] = {
    "data.train_files": files_at("data.train_files"),
    "data.val_files": files_at("data.val_files"),
    "data.tokenizer": path_at("data.tokenizer"),
    "data.prompt_key": column("prompt"),
    "data.reward_fn_key": column("data_source"),
    "data.train_batch_size": "data.train_batch_size",
    "data.val_batch_size": "data.val_batch_size",
    "data.gen_batch_size": NotNeeded("a round draws data.train_batch_size prompts"),
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    "data.truncation": "data.truncation",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    "data.filter_overlong_prompts_workers": NotNeeded("rows are read as they are needed"),
    "data.shuffle": "data.shuffle",
    "data.seed": lambda value, source: Ours({"seed": value} if value is not None else {}),
    "data.dataloader_num_workers": "data.num_workers",
    "data.train_max_samples": samples_cut,
    "data.val_max_samples": samples_cut,
    "data.return_raw_chat": NotNeeded("conversations are kept"),
    "data.return_raw_input_ids": NotNeeded("tokens are kept"),
    "data.return_full_prompt": NotNeeded("prompts are in the trace"),
    "data.validation_shuffle": NotNeeded("the order changes no metric"),
    "data.trust_remote_code": NotNeeded("no code of a model is run"),
    "data.use_shm": NotNeeded("files are mapped into memory"),
    "data.custom_cls.path": custom_class,
    "data.custom_cls.name": custom_class,
    "data.apply_chat_template_kwargs.*": part_of("data.chat_template_kwargs"),
    "data.image_key": IMAGES,
    "data.image_patch_size": IMAGES,
    "data.video_key": IMAGES,
    "data.tool_config_path": of_turns(TOOLS),
    "data.sampler.*": NoCounterpart("`data.priority` draws prompts by their scores"),
}

MODELS: dict[str, Rule] = {
    f"{MODEL}.path": path_at("actor.path"),
    f"{MODEL}.tokenizer_path": path_at("data.tokenizer"),
    f"{MODEL}.enable_gradient_checkpointing": flag("actor.remat", on="full", off="none"),
    f"{MODEL}.enable_activation_offload": NotNeeded("`remat=full` keeps layer inputs only"),
    f"{MODEL}.use_remove_padding": NotNeeded("`micro_batch_tokens` packs without padding"),
    f"{MODEL}.use_shm": NotNeeded("weights are read once a host"),
    f"{MODEL}.use_liger": KERNELS,
    f"{MODEL}.use_fused_kernels": KERNELS,
    f"{MODEL}.fused_kernel_options.*": KERNELS,
    f"{MODEL}.tiled_mlp.*": KERNELS,
    f"{MODEL}.trust_remote_code": NotNeeded("no code of a model is run"),
    f"{MODEL}.torch_dtype": dtype_at("actor.dtype"),
    f"{MODEL}.lora_rank": adapter_rank,
    f"{MODEL}.lora_alpha": "actor.lora.alpha",
    f"{MODEL}.target_modules": adapter_targets,
    f"{MODEL}.exclude_modules": not_null("name the modules in `actor.lora.targets`"),
    f"{MODEL}.lora_adapter_path": path_at("actor.lora.path"),
    f"{MODEL}.lora.rank": adapter_rank,
    f"{MODEL}.lora.alpha": "actor.lora.alpha",
    f"{MODEL}.lora.dropout": "actor.lora.dropout",
    f"{MODEL}.lora.merge": "actor.lora.merge",
    f"{MODEL}.lora.target_modules": NoCounterpart("name modules as Hugging Face does: q_proj"),
    f"{MODEL}.lora.*": NotNeeded("A begins at random and B at 0"),
    f"{MODEL}.override_config.*": NoCounterpart("edit config.json in the model's folder"),
    f"{MODEL}.custom_chat_template": NoCounterpart("write it into the tokenizer's folder"),
    f"{MODEL}.external_lib": NoCounterpart("a new family is one file: docs/port-a-model.md"),
    f"{MODEL}.mtp.*": NoCounterpart("multi-token prediction is missing here"),
}

UPDATE: dict[str, Rule] = {
    **_learner(ACTOR, "actor", "fsdp_config"),
    f"{ACTOR}.megatron.tensor_model_parallel_size": part_of("mesh.tensor"),
    f"{ACTOR}.megatron.pipeline_model_parallel_size": part_of("mesh.pipeline"),
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": part_of("mesh.pipeline_rounds"),
    f"{ACTOR}.megatron.context_parallel_size": part_of("mesh.sequence"),
    f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": recompute,
    f"{ACTOR}.megatron.override_transformer_config.*": KERNELS,
    f"{ACTOR}.fsdp_config.fsdp_size": part_of("mesh.fsdp"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": part_of("mesh.sequence"),
    f"{ACTOR}.ulysses_sequence_parallel_size": part_of("mesh.sequence"),
    f"{ACTOR}.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs": "actor.ppo_epochs",
    f"{ACTOR}.shuffle": "actor.shuffle",
    f"{ACTOR}.clip_ratio": NotNeeded("verl reads clip_ratio_low and clip_ratio_high, both 0.2"),
    f"{ACTOR}.clip_ratio_low": clip("low"),
    f"{ACTOR}.clip_ratio_high": clip("high"),
    f"{ACTOR}.clip_ratio_c": "algorithm.clip_c",
    f"{ACTOR}.loss_agg_mode": aggregation,
    f"{ACTOR}.loss_scale_factor": "algorithm.loss_scale",
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{ACTOR}.use_kl_loss": "algorithm.use_kl_loss",
    f"{ACTOR}.kl_loss_coef": "algorithm.kl_loss_coef",
    f"{ACTOR}.kl_loss_type": "algorithm.kl_loss_type",
    f"{ACTOR}.tau_pos": "algorithm.tau_pos",
    f"{ACTOR}.tau_neg": "algorithm.tau_neg",
    f"{ACTOR}.policy_loss.loss_mode": part_of("algorithm"),
    f"{ACTOR}.policy_loss.clip_cov_ratio": "algorithm.clip_cov_ratio",
    f"{ACTOR}.policy_loss.clip_cov_lb": "algorithm.clip_cov_lb",
    f"{ACTOR}.policy_loss.clip_cov_ub": "algorithm.clip_cov_ub",
    f"{ACTOR}.policy_loss.kl_cov_ratio": "algorithm.kl_cov_ratio",
    f"{ACTOR}.policy_loss.dro_beta": "algorithm.beta",
    f"{ACTOR}.policy_loss.ppo_kl_coef": "algorithm.ppo_kl_coef",
    f"{ACTOR}.policy_loss.tau_pos": "algorithm.tau_pos",
    f"{ACTOR}.policy_loss.tau_neg": "algorithm.tau_neg",
    f"{ACTOR}.calculate_entropy": NotNeeded("entropy is always a metric"),
    f"{ACTOR}.calculate_sum_pi_squared": NotNeeded("the estimator asks for it"),
    f"{ACTOR}.entropy_checkpointing": KERNELS,
    f"{ACTOR}.entropy_from_logits_with_chunking": KERNELS,
    f"{ACTOR}.use_fused_kernels": KERNELS,
    f"{ACTOR}.use_remove_padding": NotNeeded("`micro_batch_tokens` packs without padding"),
    f"{ACTOR}.use_prefix_grouper": flag("actor.share_prompts", on=True, off=True),
    f"{ACTOR}.router_replay.*": NotNeeded("`rollout.routing_replay` is on for experts"),
    **{f"{REF}.{name}": PASSES for name in PASS_KEYS},
    **{f"{REF}.fsdp_config.{name}": PASSES for name in (*FSDP_KEYS, *OFFLOADS)},
    **{f"{REF}.megatron.{name}": PASSES for name in (*MEGATRON_KEYS, *OFFLOADS)},
    "actor_rollout_ref.hybrid_engine": ENGINE,
    "actor_rollout_ref.nccl_timeout": PROCESSES,
}

GENERATION: dict[str, Rule] = {
    f"{ROLLOUT}.tensor_model_parallel_size": part_of("mesh.generation.tensor"),
    f"{ROLLOUT}.n": "rollout.n",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.top_k": top_k,
    f"{ROLLOUT}.do_sample": only(True, "it samples", "set `rollout.temperature=0`"),
    f"{ROLLOUT}.dtype": dtype_at("rollout.dtype"),
    f"{ROLLOUT}.max_num_seqs": "rollout.num_slots",
    f"{ROLLOUT}.quantization": quantization,
    f"{ROLLOUT}.ignore_eos": not_null("a response ends at its stop token"),
    f"{ROLLOUT}.prompt_length": generated_length("data.max_prompt_length"),
    f"{ROLLOUT}.response_length": generated_length("data.max_response_length"),
    f"{ROLLOUT}.calculate_log_probs": NotNeeded("the sampler's log-probs are always kept"),
    f"{ROLLOUT}.expert_parallel_size": NotNeeded("`mesh.generation.tensor` splits the experts"),
    f"{ROLLOUT}.log_prob_micro_batch_size": PASSES,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": PASSES,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": PASSES,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": PASSES,
    f"{MULTI_TURN}.*": of_turns(TURNS),
    f"{MULTI_TURN}.enable": of_turns(
        NotNeeded("`rollout.tools` and `rollout.environment` make an agent run")
    ),
    f"{MULTI_TURN}.max_assistant_turns": of_turns(most_turns),
    f"{MULTI_TURN}.tool_config_path": of_turns(TOOLS),
    f"{MULTI_TURN}.function_tool_path": of_turns(TOOLS),
    f"{MULTI_TURN}.max_parallel_calls": of_turns(
        NoCounterpart("all calls of a turn are run, in their order")
    ),
    f"{MULTI_TURN}.max_tool_response_length": of_turns(
        NoCounterpart("it counts characters; set `rollout.max_tool_result_tokens`")
    ),
    f"{MULTI_TURN}.tool_response_truncate_side": of_turns(
        only("middle", "long results lose their middle", "long results lose their middle")
    ),
    f"{MULTI_TURN}.format": of_turns(NotNeeded("the format of calls is the tokenizer's")),
    **{
        f"{MULTI_TURN}.{name}": of_turns(NotNeeded("sampled ids are never encoded again"))
        for name in ("use_inference_chat_template", "tokenization_sanity_check_mode")
    },
    f"{ROLLOUT}.agent.*": TURNS,
    f"{ROLLOUT}.agent.default_agent_loop": agent_loop,
    f"{ROLLOUT}.agent.num_workers": PROCESSES,
    f"{ROLLOUT}.val_kwargs.n": "validation.n",
    f"{ROLLOUT}.val_kwargs.top_p": "validation.top_p",
    f"{ROLLOUT}.val_kwargs.top_k": val_top_k,
    f"{ROLLOUT}.val_kwargs.temperature": lambda value, source: Ours(
        {"validation.temperature": float(value)}
    ),
    f"{ROLLOUT}.val_kwargs.do_sample": NotNeeded("temperature 0 is greedy; verl reads that alone"),
    **{f"{ROLLOUT}.{name}": ENGINE for name in ENGINE_KEYS},
}

VALUE_MODEL: dict[str, Rule] = {
    key: critic_only(rule)
    for key, rule in {
        **_learner(CRITIC, "critic", "fsdp"),
        **_learner(CRITIC, "critic", "model.fsdp_config"),
        "critic.model.path": critic_path,
        "critic.model.enable_gradient_checkpointing": flag("critic.remat", on="full", off="none"),
        **{
            f"critic.model.{name}": NotNeeded("the critic is read like the actor")
            for name in ("use_remove_padding", "trust_remote_code", "tokenizer_path", "use_shm")
        },
        "critic.ppo_mini_batch_size": critic_mini_batch,
        "critic.ppo_epochs": "critic.ppo_epochs",
        "critic.cliprange_value": "algorithm.cliprange_value",
        "critic.ulysses_sequence_parallel_size": NotNeeded("roles share mesh.sequence"),
        "critic.fsdp.ulysses_sequence_parallel_size": NotNeeded("roles share mesh.sequence"),
        "critic.enable": NotNeeded("the algorithm says whether it has a critic"),
        "critic.shuffle": NotNeeded("the critic takes actor.shuffle"),
        "critic.loss_agg_mode": NotNeeded("the critic takes algorithm.loss_aggregation"),
    }.items()
}

ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": part_of("algorithm"),
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.lam": "algorithm.lam",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "algorithm.use_kl_in_reward": "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty": "algorithm.kl_reward_type",
    "algorithm.kl_ctrl.type": "algorithm.kl_controller",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.filter_groups.enable": "rollout.filter_groups.enable",
    "algorithm.mask_truncated_samples": "rollout.mask_truncated",  # a key of rLLM's verl
    "rllm.mask_truncated_samples": "rollout.mask_truncated",
    "algorithm.filter_groups.metric": filter_metric,
    "algorithm.filter_groups.max_num_gen_batches": filter_rounds,
    "algorithm.rollout_correction.rollout_is": importance("algorithm.rollout_is"),
    "algorithm.rollout_correction.rollout_is_threshold": importance(
        "algorithm.rollout_is_threshold"
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": importance(
        "algorithm.rollout_is_batch_normalize"
    ),
    "algorithm.rollout_correction.rollout_rs": threshold("algorithm.rollout_rs"),
    "algorithm.rollout_correction.rollout_rs_threshold": threshold(
        "algorithm.rollout_rs_threshold"
    ),
    "algorithm.rollout_correction.bypass_mode": "algorithm.bypass_mode",
    "algorithm.rollout_correction.loss_type": correction_loss,
    "algorithm.gdpo_reward_keys": NoCounterpart("name one function a part in reward.functions"),
    "algorithm.use_pf_ppo": not_null("PF-PPO is missing: write an algorithm"),
    "algorithm.pf_ppo.*": NoCounterpart("PF-PPO is missing: write an algorithm"),
}

FUNCTION = part_of("reward.functions")
REWARDS: dict[str, Rule] = {
    **{
        f"{prefix}{key}": rule
        for prefix, keys in (
            (
                "",
                {
                    "custom_reward_function.path": FUNCTION,
                    "custom_reward_function.name": FUNCTION,
                    "custom_reward_function.reward_kwargs.*": FUNCTION,
                },
            ),
            (
                "reward.",
                {
                    "custom_reward_function.path": FUNCTION,
                    "custom_reward_function.name": FUNCTION,
                    "custom_reward_function.reward_kwargs.*": FUNCTION,
                    "reward_manager.name": manager,
                    "reward_manager.source": NotNeeded("functions are named by path"),
                    "num_workers": "reward.num_workers",
                    "reward_kwargs.*": FUNCTION,
                    "reward_model.enable": part_of("reward.model"),
                    "reward_model.model_path": part_of("reward.model.path"),
                    **{f"reward_model.{name}": ENGINE for name in SCORE_KEYS},
                    "sandbox_fusion.*": NoCounterpart("`code` is our sandbox: reward.functions"),
                },
            ),
        )
        for key, rule in keys.items()
    },
    "reward_model.enable": part_of("reward.model"),
    "reward_model.model.path": part_of("reward.model.path"),
    "reward_model.reward_manager": manager,
    "reward_model.reward_kwargs.*": FUNCTION,
    "reward_model.launch_reward_fn_async": NotNeeded("workers grade while stages run"),
    "reward_model.sandbox_fusion.*": NoCounterpart("`code` is our sandbox: reward.functions"),
    **{
        f"reward_model.{name}": NotNeeded("the reward model runs on the same devices")
        for name in SCORE_KEYS
    },
    "sandbox_fusion.*": NoCounterpart("`code` is our sandbox: reward.functions"),
}

TRAINER: dict[str, Rule] = {
    "trainer.project_name": NotNeeded("WANDB_PROJECT and the like name it: docs/trackers.md"),
    "trainer.experiment_name": lambda value, source: Ours({"name": str(value)} if value else {}),
    "trainer.logger": trackers,
    "trainer.log_val_generations": "log.num_samples",
    "trainer.rollout_data_dir": NotNeeded("`log.trace` keeps every sample in the run's folder"),
    "trainer.validation_data_dir": NotNeeded("the run's folder has them"),
    "trainer.nnodes": part_of("mesh"),
    "trainer.n_gpus_per_node": part_of("mesh"),
    "trainer.save_freq": every("save_every"),
    "trainer.test_freq": every("validation.every"),
    "trainer.total_epochs": total_epochs,
    "trainer.total_training_steps": part_of("total_steps"),
    "trainer.val_before_train": "validation.before_train",
    "trainer.val_only": not_null("`jaxrl evaluate` does that"),
    "trainer.critic_warmup": critic_warmup,
    "trainer.default_local_dir": "run_dir",
    "trainer.default_hdfs_dir": not_null("mount it, or copy the run's folder"),
    "trainer.resume_mode": resume,
    "trainer.resume_from_path": not_null(FOREIGN.remedy),
    "trainer.max_actor_ckpt_to_keep": lambda value, source: Ours(
        {"checkpoint.keep_latest": value} if value else {}
    ),
    "trainer.max_critic_ckpt_to_keep": NotNeeded("a checkpoint holds all roles"),
    "trainer.balance_batch": NotNeeded("packed rows are balanced"),
    "trainer.device": NotNeeded("jax finds the devices"),
    "trainer.v1.*": PROCESSES,
    "trainer.use_v1": PROCESSES,
    "trainer.use_legacy_worker_impl": PROCESSES,
    "trainer.ray_wait_register_center_timeout": PROCESSES,
    "trainer.del_local_ckpt_after_load": NotNeeded("`checkpoint.keep_latest` deletes old ones"),
    "trainer.esi_redundant_time": NoCounterpart(
        "`checkpoint.save_by` saves before a time", learned=False
    ),
    "ray_kwargs.*": PROCESSES,
    "ray_init.*": PROCESSES,
    "transfer_queue.*": PROCESSES,
    "global_profiler.steps": lambda value, source: Ours({"profile.steps": list(many(value))}),
    "global_profiler.*": PROFILER,
    "hydra.*": NotNeeded("a config is a Python file"),
    "model_engine": LAYOUT,
    "--config-name": NotNeeded("its defaults are read as the FSDP ones"),
    "--config-path": NotNeeded("its defaults are read as the FSDP ones"),
}

DISTILLATION: dict[str, Rule] = {
    "distillation.enabled": part_of("algorithm"),
    "distillation.distillation_loss.loss_mode": part_of("algorithm"),
    "distillation.distillation_loss.use_policy_gradient": part_of("algorithm"),
    "distillation.distillation_loss.topk": part_of("teacher.top_k"),
    "distillation.distillation_loss.use_task_rewards": only(
        False, "the teacher is the only signal", "only the teacher's signal: rewards are logged"
    ),
    "distillation.distillation_loss.loss_max_clamp": not_null("losses are not clamped"),
    "distillation.distillation_loss.log_prob_min_clamp": not_null("losses are not clamped"),
    "distillation.n_gpus_per_node": NotNeeded("the teacher shares the actor's devices"),
    "distillation.nnodes": NotNeeded("the teacher shares the actor's devices"),
    "distillation.teacher_models.teacher_model.model_path": path_at("teacher.path"),
    "distillation.teacher_models.teacher_model.inference.*": ENGINE,
    "distillation.teacher_models.teacher_model.num_replicas": ENGINE,
    "distillation.teacher_models.*": NoCounterpart("a run has one teacher"),
    "distillation.teacher_key": NoCounterpart("a run has one teacher"),
}

TABLE: dict[str, Rule] = (
    DATA | MODELS | UPDATE | GENERATION | VALUE_MODEL | ALGORITHM | REWARDS | TRAINER | DISTILLATION
)

# ------------------------------------------------------------------------- the whole

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "optimal_token_baseline": "optimal_token_baseline",
}
# Losses on the advantages of GRPO.
LOSSES = {
    "gspo": "gspo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}
PAIRED = {*LOSSES, "vanilla", "gpg"} - {"dro"}


def _set_algorithm(source: Source, values: dict[str, Any]) -> None:
    """The kind of algorithm, from the estimator and the loss."""
    if source.get("distillation.enabled"):
        _set_distillation(source, values)
        return
    estimator = str(source.get("algorithm.adv_estimator"))
    loss = str(source.get(f"{ACTOR}.policy_loss.loss_mode"))
    base = estimator.removesuffix("_vectorized")
    if learns_without_ratio(source):
        loss = "gpg"
    if (estimator, loss) == ("gpg", "gpg"):
        kind = "gpg"
    elif loss == "vanilla" and estimator in ESTIMATORS:
        kind = ESTIMATORS[estimator]
    elif base == "grpo" and loss in LOSSES:
        kind = LOSSES[loss]
    elif (estimator in ESTIMATORS or estimator == "gpg") and loss in PAIRED:
        kind = "pair"
        values |= {"algorithm.adv_estimator": base, "algorithm.loss_mode": loss}
    else:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} with policy_loss.loss_mode={loss} has no "
            f"counterpart. Estimators: {', '.join(ESTIMATORS)}, gpg. Losses: vanilla, gpg, "
            f"{', '.join(LOSSES)}. Your own is one function: docs/add-an-algorithm.md"
        )
    values["algorithm.kind"] = kind


def _set_distillation(source: Source, values: dict[str, Any]) -> None:
    loss = "distillation.distillation_loss."
    mode = str(source.get(f"{loss}loss_mode") or "k3")
    by_advantage = bool(source.get(f"{loss}use_policy_gradient"))
    if by_advantage and mode != "k1":
        raise ConfigError(
            f"{loss}loss_mode={mode} as an advantage has no counterpart; k1 has, or "
            "use_policy_gradient=False"
        )
    if mode == "forward_kl_topk":
        values["algorithm.kind"] = "distillation_top_k"
        values["teacher.top_k"] = source.whole(f"{loss}topk") or 32
    else:
        values |= {"algorithm.kind": "distillation", "algorithm.kl_type": mode}
    if "teacher.path" not in values:
        raise ConfigError("distillation.enabled=True needs one teacher: teacher_model.model_path")


def _set_chat_variables(source: Source, values: dict[str, Any]) -> None:
    folder = "data.apply_chat_template_kwargs."
    variables = {
        key.removeprefix(folder): value
        for key, value in source.settings.items()
        if key.startswith(folder)
    }
    if variables:
        values["data.chat_template_kwargs"] = variables


def _set_critic(source: Source, values: dict[str, Any]) -> None:
    """The critic computes in the actor's type, unless it was said."""
    if has_critic(source):
        values.setdefault("critic.dtype", values["actor.dtype"])
        epochs = source.whole(f"{ACTOR}.ppo_epochs")
        values.setdefault("critic.ppo_epochs", epochs)


def finish(source: Source, values: dict[str, Any]) -> list[str]:
    """Values that need several of verl's keys; notes about them."""
    notes: list[str] = []
    if not source.get("data.train_files"):
        notes.append("data.train_files: the command line names no data; set it")
    if "actor.path" not in values:
        raise ConfigError(f"{MODEL}.path is missing: give it")
    for check in (_set_algorithm, _set_chat_variables, _set_critic, set_mesh):
        check(source, values)
    if values.get("algorithm.loss_mode", "gpg") != "gpg":
        notes.append("algorithm: `pair` takes the loss's own clip, not clip_ratio_low and _high")
    for add in (set_steps, set_schedules, set_passes, set_rewards):
        add(source, values, notes)
    return notes


VERL = Dialect(table=TABLE, finish=finish)
