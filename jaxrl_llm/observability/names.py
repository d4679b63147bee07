"""Names of metrics that only the trainer writes, and that alarms watch."""

# A name under one of these, or equal to one without the slash, is reserved. `rewards/` is not: a
# function's own numbers stand there, except the names that `RewardManager` refuses.
RESERVED = (
    "actor/",
    "communication/",
    "critic/",
    "data/",
    "distillation/",
    "env/",
    "env_s/",
    "images/",
    "logps/",
    "num_turns/",
    "observation_length/",
    "parse/",
    "perf/",
    "prompt_length/",
    "rejection_sampling/",
    "response_length/",
    "reward_model/",
    "rewards/model/",
    "rollout/",
    "rollout_corr/",
    "sft/",
    "stop/",
    "teacher/",
    "timing_per_token_ms/",
    "timing_s/",
    "tools/",
    "train/",
    "training/",
    "turn_length/",
    "val-aux/",
    "val-core/",
)
RESERVED_NAMES = (
    "frac_reward_zero_std",
    "kl",
    "loss",
    "reward/masked_frac",
    "rewards/failures",
    "step",
    "token_mult_prob_error",
)
# Patterns of the metrics that each watcher of docs/alarms.md reads.
WATCHED: dict[str, tuple[str, ...]] = {
    "nonfinite": ("*",),
    "gradient_spike": ("actor/grad_norm", "critic/grad_norm", "grad_norm"),
    "entropy": ("actor/entropy",),
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss"),
    "update_kl": ("actor/ppo_kl",),
    "clip_fraction": ("actor/pg_clipfrac",),
    "ratio": ("actor/ratio_p01", "actor/ratio_p99"),
    "mismatch": ("token_mult_prob_error",),
    "reward_std": ("critic/score/mean",),
    "reward_deviation": ("critic/score/mean",),
    "zero_variance": ("frac_reward_zero_std",),
    "length_drift": ("response_length/mean",),
    "cut_share": ("response_length/clip_ratio",),
    "masked_share": ("reward/masked_frac",),
    "environment_failures": ("env/masked_frac",),
    "no_tool_calls": ("tools/call_frequency",),
    "turn_drift": ("num_turns/mean",),
    "repetition": ("rollout/repetition",),
    "reward_hacking": ("val-core/*/reward/mean@*",),
    "explained_variance": ("critic/vf_explained_var",),
    "host_memory": ("perf/process_memory_gb",),
    "device_memory": ("perf/memory_in_use_gb",),
    "step_time": ("perf/time_per_step",),
}


def is_reserved(name: str) -> bool:
    """True when a metric of this name would replace one of the trainer."""
    if name.endswith("/micro_batches"):  # any stage has one
        return True
    return name.startswith(RESERVED) or f"{name}/" in RESERVED or name in RESERVED_NAMES
