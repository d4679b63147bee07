"""On-policy distillation on sums of three digits: a student learns from a teacher's log-probs.

python scripts/train.py --config=configs/distillation.py

The teacher is a model that the run trains first, by supervised learning alone. The student is the
warmed-up model of `ppo.py`, which had much less of that. The student answers, and the teacher says
how likely it finds each token (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649). No reward
takes part in learning, it is only measured. --config.teacher.path=DIR takes a teacher that exists.

The forward KL over the teacher's likeliest tokens instead of the reverse KL by sample:
--config.algorithm=distillation_top_k
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    training = c.SupervisedConfig(
        steps=900,
        batch_size=256,
        eval_every=50,
        stop_at=0.97,
        optimizer=c.OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=20),
    )
    return replace(
        base,
        name="distillation",
        teacher=c.TeacherConfig(training=training),
        algorithm=c.Distillation(),
    )
