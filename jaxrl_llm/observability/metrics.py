"""Metrics of a batch and of a step, under verl's names.

`batch_metrics` is traced as a part of an iteration. `repeated_share`, `performance_metrics` and
`memory_metrics` run on the host. Rows with a prompt of length 0 are padding and do not count.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxrl_llm.numerics import masked_mean, masked_var, safe_divide

GIB = 1024**3  # verl's gigabyte
EXPLAINED_EPS = 1e-5  # added to the variance of the returns, as verl does
GRAM = 4  # tokens in a row that count as repeated
LEAST_TOKENS = 16  # shortest response whose repetition is measured

Metrics = dict[str, Array]


def batch_metrics(
    *,
    prompt_lengths: Int[Array, " B"],
    response_lengths: Int[Array, " B"],
    mask: Float[Array, "B R"],
    scores: Float[Array, " B"],
    rewards: Float[Array, "B R"],
    advantages: Float[Array, "B R"],
    returns: Float[Array, "B R"],
    values: Float[Array, "B R"] | None = None,
    group_ids: Int[Array, " B"] | None = None,
    sample_mask: Float[Array, " B"] | None = None,
    images: UInt8[Array, "B I N C Q"] | None = None,
    image_places: Int[Array, "B P"] | None = None,
    max_response_length: int,
    max_prompt_length: int | None = None,
    **_: Array,
) -> Metrics:
    """critic/*, images/*, response_length/* and prompt_length/* of a batch, as float32 scalars.

    Statistics of scores and rewards are over samples (rewards are summed over a sample's tokens),
    the others are over tokens. A sample outside of `sample_mask` counts in lengths alone. Fields
    have the names of `RolloutBatch`; other fields are ignored.
    Without `max_prompt_length` there is no prompt_length/clip_ratio.
    """
    valid = prompt_lengths > 0
    token_rewards = jnp.where(mask != 0, rewards, 0.0)
    learned = valid
    if sample_mask is not None:
        learned = valid & (sample_mask != 0)
        mask = jnp.where(learned[:, None], mask, 0.0)
    metrics = statistics("critic/score", scores, learned)
    metrics |= statistics("critic/rewards", token_rewards.sum(axis=1), learned)
    metrics |= statistics("critic/advantages", advantages, mask)
    metrics |= statistics("critic/returns", returns, mask)
    if values is not None:
        metrics |= statistics("critic/values", values, mask)
        metrics["critic/vf_explained_var"] = explained_variance(returns, values, mask)
    if group_ids is not None:
        metrics["frac_reward_zero_std"] = frac_zero_std(scores, group_ids, learned)
    metrics |= length_statistics("response_length", response_lengths, valid, max_response_length)
    metrics |= length_statistics("prompt_length", prompt_lengths, valid, max_prompt_length)
    if images is not None and image_places is not None:
        metrics |= image_metrics(images, image_places, prompt_lengths)
    return metrics


def image_metrics(
    images: UInt8[Array, "B I N C Q"],
    image_places: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
) -> Metrics:
    """images/*: numbers of images and of their tokens, and the room that their pixels take."""
    _, most, room, *_ = images.shape
    tokens = jnp.sum(image_places >= 0, dtype=jnp.float32)
    firsts = (image_places >= 0) & (image_places % room == 0)
    number = jnp.sum(firsts, dtype=jnp.float32)
    return {
        "images/per_row": number / jnp.maximum(jnp.sum(prompt_lengths > 0), 1),
        "images/tokens": tokens / jnp.maximum(number, 1),
        "images/token_share": tokens / jnp.maximum(prompt_lengths.astype(jnp.float32).sum(), 1),
        "images/room_use": tokens / (len(images) * most * room),
        "images/pixels_gb": jnp.float32(images.size / 1e9),
    }


def statistics(name: str, x: Array, mask: Array) -> Metrics:
    """name/{mean,max,min} of x over the mask, in float32; 0 for an empty mask."""
    x = x.astype(jnp.float32)
    any_selected = jnp.any(mask != 0)
    highest = jnp.max(jnp.where(mask != 0, x, -jnp.inf))
    lowest = jnp.min(jnp.where(mask != 0, x, jnp.inf))
    return {
        f"{name}/mean": masked_mean(x, mask),
        f"{name}/max": jnp.where(any_selected, highest, 0.0),
        f"{name}/min": jnp.where(any_selected, lowest, 0.0),
    }


def frac_zero_std(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], valid: Array
) -> Float[Array, ""]:
    """Share of the groups whose samples all have the same score. GRPO learns nothing from them."""
    same = (group_ids[:, None] == group_ids[None, :]) & valid[None, :]
    highest = jnp.max(jnp.where(same, scores[None, :], -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(same, scores[None, :], jnp.inf), axis=1)
    share = jnp.where(valid, safe_divide(jnp.float32(1), same.sum(axis=1, dtype=jnp.float32)), 0)
    return safe_divide(jnp.where(highest == lowest, share, 0.0).sum(), share.sum())


def length_statistics(name: str, lengths: Array, valid: Array, maximum: int | None) -> Metrics:
    """name/{mean,max,min} of lengths in tokens, and name/clip_ratio, the share at the maximum.

    As in verl, a response whose stop token is its last possible token counts as clipped.
    """
    metrics = statistics(name, lengths, valid)
    if maximum is not None:
        clipped = (lengths >= maximum).astype(jnp.float32)
        metrics[f"{name}/clip_ratio"] = masked_mean(clipped, valid)
    return metrics


def explained_variance(
    returns: Float[Array, "B R"], values: Float[Array, "B R"], mask: Float[Array, "B R"]
) -> Float[Array, ""]:
    """1 - var(returns - values) / (var(returns) + 1e-5) over the mask, as in verl.

    1 means a perfect critic, 0 one as good as a constant, a negative value one that is worse.
    """
    unexplained = masked_var(returns - values, mask)
    return 1.0 - safe_divide(unexplained, masked_var(returns, mask) + EXPLAINED_EPS)


def repeated_share(tokens: Sequence[int]) -> float | None:
    """1 - distinct 4-grams / 4-grams of a response; None for one that is too short."""
    if len(tokens) < LEAST_TOKENS:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int64), GRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def performance_metrics(
    timings: Mapping[str, float],
    *,
    num_prompt_tokens: int,
    num_response_tokens: int,
    num_devices: int,
) -> dict[str, float]:
    """timing_s/*, timing_per_token_ms/* and perf/* of a step, including memory.

    `timings` has the seconds of each stage by its verl name, and of the whole step as "step".
    The time per token of generation counts response tokens; other stages count all tokens.
    perf/throughput is tokens per second and device over the whole step.
    """
    num_tokens = num_prompt_tokens + num_response_tokens
    tokens_of: dict[str, int] = dict.fromkeys(
        ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), num_tokens
    )
    tokens_of["gen"] = num_response_tokens
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    metrics |= {
        f"timing_per_token_ms/{name}": 1000.0 * timings[name] / count
        for name, count in tokens_of.items()
        if name in timings and count > 0
    }
    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = timings["step"]
    metrics["perf/throughput"] = num_tokens / (max(timings["step"], 1e-9) * num_devices)
    return metrics | memory_metrics()


def memory_metrics(devices: Sequence[Any] | None = None) -> dict[str, float]:
    """Memory of the devices and the host in GiB, as far as it is known.

    perf/max_memory_allocated_gb is the highest peak of this process's devices since its start,
    perf/memory_in_use_gb what the fullest one holds now; a CPU device reports neither.
    perf/cpu_memory_used_gb is what the whole host uses now, perf/process_memory_gb what this
    process does; only Linux reports them.
    """
    metrics = {}
    devices = jax.local_devices() if devices is None else devices
    stats = [device.memory_stats() or {} for device in devices]
    device_keys = {"max_memory_allocated": "peak_bytes_in_use", "memory_in_use": "bytes_in_use"}
    for name, key in device_keys.items():
        known = [found[key] for found in stats if found.get(key) is not None]
        if known:
            metrics[f"perf/{name}_gb"] = max(known) / GIB
    used = _host_memory_used(Path("/proc/meminfo"))
    if used is not None:
        metrics["perf/cpu_memory_used_gb"] = used / GIB
    statm = Path("/proc/self/statm")
    if statm.is_file():
        pages = int(statm.read_text().split()[1])
        metrics["perf/process_memory_gb"] = pages * os.sysconf("SC_PAGE_SIZE") / GIB
    return metrics


def _host_memory_used(meminfo: Path) -> int | None:
    """Bytes in use on the host; None without /proc/meminfo."""
    if not meminfo.is_file():
        return None
    kilobytes = {}
    for line in meminfo.read_text().splitlines():
        name, _, amount = line.partition(":")
        kilobytes[name] = int(amount.split()[0])
    return (kilobytes["MemTotal"] - kilobytes["MemAvailable"]) * 1024
