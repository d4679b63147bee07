"""Names of metrics that only the trainer writes."""

# A name under one of these, or equal to one without the slash, is reserved. `rewards/` is not: a
# function's own numbers stand there, except the names that `RewardManager` refuses.
RESERVED = (
    "actor/",
    "communication/",
    "critic/",
    "data/",
    "distillation/",
    "logps/",
    "perf/",
    "prompt_length/",
    "rejection_sampling/",
    "response_length/",
    "reward_model/",
    "rewards/model/",
    "rollout/",
    "rollout_corr/",
    "sft/",
    "teacher/",
    "timing_per_token_ms/",
    "timing_s/",
    "train/",
    "training/",
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


def is_reserved(name: str) -> bool:
    """True when a metric of this name would replace one of the trainer."""
    if name.endswith("/micro_batches"):  # any stage has one
        return True
    return name.startswith(RESERVED) or f"{name}/" in RESERVED or name in RESERVED_NAMES
