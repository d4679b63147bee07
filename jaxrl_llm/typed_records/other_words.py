"""Words of TRL and verl that are no keys here, each with the key that does the same.

They are shown in errors. They are no aliases: a config has one name for one thing.
"""

RATE = "config.actor.optimizer.learning_rate"
LIMITS = "config.data.max_prompt_length and config.data.max_response_length"
CLIPS = "config.algorithm.clip_low and config.algorithm.clip_high"
EPOCHS = "config.total_steps: epochs times rows divided by config.data.train_batch_size"
BATCH = (
    "config.data.train_batch_size, over all devices; config.actor.micro_batch_tokens bounds memory"
)
ADAPTERS = "config.actor.lora.rank"
PARTS = "config.mesh.fsdp, or another axis of config.mesh"
WORDS: dict[str, str] = {
    "lr": RATE,
    "lr_scheduler_type": "config.actor.optimizer.schedule",
    "warmup_ratio": "config.actor.optimizer.warmup_steps, in optimizer steps",
    "lr_warmup_steps": "config.actor.optimizer.warmup_steps",
    "optim": "config.actor.optimizer.name",
    "adam_beta1": "config.actor.optimizer.b1",
    "adam_beta2": "config.actor.optimizer.b2",
    "adam_epsilon": "config.actor.optimizer.eps",
    "grad_clip": "config.actor.optimizer.max_grad_norm",
    "beta": "config.algorithm.kl_loss_coef with config.algorithm.use_kl_loss=true in GRPO; "
    "config.algorithm.beta in DPO, KTO, ORPO and SimPO",
    "kl_coef": "config.algorithm.kl_coef with config.algorithm.use_kl_in_reward=true; for the loss "
    "config.algorithm.kl_loss_coef with use_kl_loss=true",
    "kl_penalty": "config.algorithm.kl_reward_type",
    "entropy_coeff": "config.algorithm.entropy_coef",
    "epsilon": CLIPS,
    "epsilon_high": "config.algorithm.clip_high",
    "cliprange": CLIPS,
    "clip_ratio": CLIPS,
    "clip_ratio_low": "config.algorithm.clip_low",
    "clip_ratio_high": "config.algorithm.clip_high",
    "loss_type": "config.algorithm, such as dapo, and config.algorithm.loss_aggregation; in DPO "
    "config.algorithm.form",
    "loss_agg_mode": "config.algorithm.loss_aggregation",
    "scale_rewards": "config.algorithm.norm_adv_by_std and config.algorithm.std_of",
    "adv_estimator": "config.algorithm, such as grpo or ppo",
    "num_iterations": "config.actor.ppo_epochs",
    "num_ppo_epochs": "config.actor.ppo_epochs",
    "num_mini_batches": "config.actor.ppo_mini_batch_size, in prompts",
    "steps_per_generation": "config.actor.ppo_mini_batch_size, in prompts",
    "num_generations": "config.rollout.n",
    "num_return_sequences": "config.rollout.n",
    "max_completion_length": "config.data.max_response_length",
    "max_new_tokens": "config.data.max_response_length",
    "response_length": "config.data.max_response_length",
    "max_length": LIMITS,
    "max_seq_length": LIMITS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": "config.data.val_batch_size",
    "gradient_accumulation_steps": f"{BATCH}; gradients are accumulated where needed",
    "ppo_micro_batch_size_per_gpu": "config.actor.micro_batch_size, or micro_batch_tokens",
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
    "max_steps": "config.total_steps",
    "total_training_steps": "config.total_steps",
    "bf16": "config.actor.dtype=bfloat16",
    "gradient_checkpointing": "config.actor.remat=full",
    "packing": "config.actor.micro_batch_tokens=8192",
    "use_vllm": "not needed: the trainer's own weights generate",
    "gpu_memory_utilization": "config.rollout.memory_gb, in GB",
    "vllm_gpu_memory_utilization": "config.rollout.memory_gb, in GB",
    "tensor_model_parallel_size": "config.mesh.generation.tensor",
    "n_gpus_per_node": PARTS,
    "nnodes": PARTS,
    "model": "path, such as config.actor.path",
    "model_name_or_path": "config.actor.path",
    "model_path": "config.actor.path",
    "dataset": "config.data.train_files",
    "dataset_name": "config.data.train_files",
    "train_dataset": "config.data.train_files; rl.train(..., train_data=rows) in Python",
    "reward_funcs": "config.reward.functions; rl.train(..., rewards=[...]) in Python",
    "reward_weights": "config.reward.weights",
    "use_peft": ADAPTERS,
    "lora_r": ADAPTERS,
    "lora_rank": ADAPTERS,
    "lora_alpha": "config.actor.lora.alpha",
    "lora_target_modules": "config.actor.lora.targets",
    "target_modules": "config.actor.lora.targets",
    "output_dir": "config.run_dir",
    "default_local_dir": "config.run_dir",
    "run_name": "config.name",
    "experiment_name": "config.name",
    "report_to": "config.log.trackers",
    "logging_steps": "config.log.console_every",
    "save_steps": "config.save_every",
    "save_freq": "config.save_every",
    "eval_steps": "config.validation.every",
    "test_freq": "config.validation.every",
}


def answer(word: str, key: str = "config") -> str:
    """What `word`, unknown below `key`, is here: the end of a sentence, or empty."""
    text = WORDS.get(word, "")
    for record in ("optimizer", "lora"):
        if key.endswith(f".{record}"):
            text = text.replace(f"config.actor.{record}", key)
    return text
