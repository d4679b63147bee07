"""Metrics of the mismatch between sampler and trainer, under the names of verl and NeMo-RL."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.shapes import Scalar, Tokens
from jaxrl_llm.numerics import masked_mean, masked_sum, masked_var

MAX_LOG_RATIO = 20.0
MULT_PROB_ERROR = "token_mult_prob_error"


def mismatch_metrics(
    old_logprobs: Tokens, rollout_logprobs: Tokens, mask: Tokens
) -> dict[str, Scalar]:
    """Distances of the two policies on the same tokens.

    - `training/rollout_probs_diff_{max,mean,std}`: |p_trainer - p_sampler| over tokens.
    - `rollout_corr/{kl,k3_kl}`: KL(sampler || trainer) by two estimators.
    - `rollout_corr/{training,rollout}_{ppl,log_ppl}`: perplexity exp(-mean log-prob) of a sequence
      and its logarithm, mean over sequences.
    - `rollout_corr/ppl_ratio`: perplexity of the trainer over the sampler's.
    - `rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}`: logarithm of that ratio.
    - `rollout_corr/chi2_{token,seq}`: mean squared ratio minus 1, over tokens and sequences.
    - `token_mult_prob_error`: mean over tokens of exp(|log-ratio|); 1 is perfect.

    All are 0 for an empty mask. Sequences without a token are not counted.
    """
    keep = mask != 0
    some = jnp.any(keep, axis=1)
    old = jnp.where(keep, old_logprobs, 0.0)
    rollout = jnp.where(keep, rollout_logprobs, 0.0)
    log_ratio = jnp.clip(old - rollout, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    gap = jnp.abs(jnp.exp(old) - jnp.exp(rollout))
    trainer = 0.0 - masked_mean(old, mask, axis=1)
    sampler = 0.0 - masked_mean(rollout, mask, axis=1)
    difference = 0.0 - masked_mean(log_ratio, mask, axis=1)
    whole = jnp.clip(masked_sum(old - rollout, mask, axis=1), -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def over_sequences(x: Array) -> Array:
        return masked_mean(x, some)

    def largest(x: Array) -> Array:
        return jnp.where(jnp.any(some), jnp.max(jnp.where(some, x, -jnp.inf)), 0.0)

    anything = jnp.any(keep)
    return {
        "training/rollout_probs_diff_max": jnp.max(gap, initial=0.0),
        "training/rollout_probs_diff_mean": masked_mean(gap, mask),
        "training/rollout_probs_diff_std": jnp.sqrt(masked_var(gap, mask)),
        "rollout_corr/kl": masked_mean(0.0 - log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(jnp.exp(log_ratio) - log_ratio - 1.0, mask),
        "rollout_corr/training_ppl": over_sequences(jnp.exp(trainer)),
        "rollout_corr/training_log_ppl": over_sequences(trainer),
        "rollout_corr/rollout_ppl": over_sequences(jnp.exp(sampler)),
        "rollout_corr/rollout_log_ppl": over_sequences(sampler),
        "rollout_corr/ppl_ratio": over_sequences(jnp.exp(difference)),
        "rollout_corr/log_ppl_diff": over_sequences(difference),
        "rollout_corr/log_ppl_abs_diff": over_sequences(jnp.abs(difference)),
        "rollout_corr/log_ppl_diff_max": largest(difference),
        "rollout_corr/log_ppl_diff_min": 0.0 - largest(0.0 - difference),
        "rollout_corr/chi2_token": jnp.where(
            anything, masked_mean(jnp.exp(2.0 * log_ratio), mask) - 1.0, 0.0
        ),
        "rollout_corr/chi2_seq": jnp.where(
            anything, over_sequences(jnp.exp(2.0 * whole)) - 1.0, 0.0
        ),
        MULT_PROB_ERROR: masked_mean(jnp.exp(jnp.abs(log_ratio)), mask),
    }
