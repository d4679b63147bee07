"""A run with config.exact=strict: no bit lies between the sampler and the trainer."""

import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.trainer.loop import train

FLAGS = {
    "total_steps": "2",
    "algorithm": "grpo",
    "data.val_tasks": "[]",
    "warmup": "null",
    "actor.ppo_epochs": "1",
    "actor.shuffle": "false",
    "actor.micro_batch_tokens": "40",
    "checkpoint.best_metric": "",
    "log.tensorboard": "false",
}
EXPERTS = {
    "actor.hf_config.model_type": "qwen3_moe",
    "actor.hf_config.head_dim": "8",
    "actor.hf_config.num_experts": "5",
    "actor.hf_config.num_experts_per_tok": "2",
    "actor.hf_config.moe_intermediate_size": "16",
}
EQUAL = {  # what a metric is where all bits are equal
    "training/rollout_probs_diff_max": 0.0,
    "rollout_corr/kl": 0.0,
    "rollout_corr/log_ppl_diff_max": 0.0,
    "rollout_corr/log_ppl_diff_min": 0.0,
    "token_mult_prob_error": 1.0,
}


@pytest.mark.slow  # slow tests are compiled as users have it; see generation/test_strict.py
@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("exact", ["strict", "repeatable"])
def test_sampler_and_trainer_agree_in_every_step(tmp_path, exact, model):
    """With two mini-batches a step, a pass of its own computes the old log-probs."""
    run = TinyRun(tmp_path)
    flags = FLAGS | {"run_dir": str(run.run_dir), "exact": exact} | model
    train(load_config(str(tmp_path / "tiny.py"), list(flags.items())))
    metrics = run.metrics()
    found = [{name: metrics[step][name] for name in EQUAL} for step in (1, 2)]
    assert (found == [EQUAL, EQUAL]) == (exact == "strict")
    assert metrics[2]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("rollout.quantization=float8", "config.rollout.quantization=float8 does not work"),
        ("rollout.dtype=bfloat16", "config.rollout.dtype=bfloat16 does not work"),
        ("mesh.fsdp=2", "config.mesh.fsdp=2 does not work"),
        ("actor.residual_dtype=bfloat16", "config.actor.residual_dtype=bfloat16 does not work"),
        ("actor.scan_layers=true", "config.actor.scan_layers=true does not work"),
        ("max_staleness=1 partial_rollouts=2", "config.partial_rollouts=2 does not work"),
    ],
)
def test_what_is_not_proven_is_refused(tmp_path, flag, words):
    TinyRun(tmp_path)
    flags = [*FLAGS.items(), ("exact", "strict")]
    load_config(str(tmp_path / "tiny.py"), flags)
    with pytest.raises(ConfigError, match=words):
        load_config(
            str(tmp_path / "tiny.py"), [*flags, *(each.split("=") for each in flag.split())]
        )


def test_a_sliding_window_is_refused(tmp_path):
    run = TinyRun(tmp_path)
    window = {"actor.hf_config.model_type": "mistral", "actor.hf_config.sliding_window": "4"}
    flags = FLAGS | {"run_dir": str(run.run_dir), "exact": "strict"} | window
    with pytest.raises(ValueError, match="exact=strict: the model has layers with a sliding"):
        train(load_config(str(tmp_path / "tiny.py"), list(flags.items())))
