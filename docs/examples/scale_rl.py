"""ScaleRL's recipe on sums of three digits: each part of it is a key.

python scripts/train.py --config=docs/examples/scale_rl.py

Khatri et al. 2025, https://arxiv.org/abs/2510.13786. Two parts are left out here: generation ahead
of the update (docs/placement.md, max_staleness=8) needs devices of its own, and there are no forced
interruptions of long answers.
"""

from dataclasses import replace
from typing import Any

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def not_yet_solved(mean: Any, *, most: float = 0.9) -> Any:
    """No-positive-resampling: weight 0 for a prompt whose last answers were nearly all right."""
    return (mean < most).astype(float)


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    return replace(
        base,
        name="scale_rl",
        data=replace(
            base.data, priority=c.Custom(path=f"{__file__}:not_yet_solved"), priority_uniform=0.0
        ),
        actor=replace(base.actor, dtype="bfloat16", head_dtype="float32"),  # float32 logits
        rollout=replace(  # zero-variance filtering; further prompts take the place of such groups
            base.rollout, filter_groups=c.FilterGroupsConfig(enable=True, shortage="fill")
        ),
        algorithm=c.CISPO(
            clip_high=4.0,  # truncated importance weights: at most 5
            bypass_mode=True,  # the ratio is to the sampler's policy
            std_of="advantages",  # batch-level normalisation
            loss_aggregation="prompt-mean",
        ),
    )
