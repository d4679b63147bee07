"""DAPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/dapo.py

GRPO with DAPO's four changes (Yu et al. 2025, https://arxiv.org/abs/2503.14476): a higher upper
clip, and the loss as a mean over all tokens. The others are a penalty for responses near the
maximum length, and dynamic sampling. That replaces groups whose answers are all right or all wrong.
Near the end of this run most are all right. After three rounds those fill up the batch.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    overlong = c.OverlongPenalty(max_length=base.data.max_response_length, buffer=1)
    return replace(
        base,
        name="dapo",
        total_steps=300,  # 200 end at 0.89 to 0.91
        rollout=replace(
            base.rollout,
            filter_groups=c.FilterGroupsConfig(
                enable=True, metric="exact_answer", max_num_gen_batches=3, shortage="fill"
            ),
        ),
        algorithm=c.DAPO(),
        reward=replace(base.reward, functions=(*base.reward.functions, overlong)),
    )
