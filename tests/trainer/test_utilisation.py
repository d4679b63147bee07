"""perf/mfu/*: the FLOPs of an iteration's programs against counts made by hand."""

from dataclasses import replace

import pytest
from tiny_iteration import MODEL, open_iteration, tiny_config

from jaxrl_llm.trainer.clock import mfu_metrics, segment_flops

LENGTHS = [3, 5]
PEAK = 1e12


def forward_by_hand(*, head: bool) -> int:
    """2 FLOPs a weight and token, and 2 * heads * head_dim * length^2 a layer of attention."""
    h, ffn, kv, layers = 32, 48, 16, MODEL["num_hidden_layers"]
    attention = 2 * h * h + 2 * h * kv + (h + 2 * kv)  # qwen2's q, k and v have a bias
    weights = layers * (attention + 3 * h * ffn + 2 * h) + h  # two norms a layer, one at the end
    weights += MODEL["vocab_size"] * h if head else h
    return 2 * weights * sum(LENGTHS) + layers * 2 * h * (9 + 25)


def metrics_of(iteration, timings, peak=PEAK, step=1):
    return mfu_metrics(
        iteration.program.segments,
        timings,
        roles=iteration.roles,
        epochs=iteration.epochs,
        lengths=LENGTHS,
        peak=peak,
        step=step,
    )


def test_a_stage_by_itself_counts_its_own_work():
    iteration = open_iteration(replace(tiny_config(num_layers=2), fuse_stages=False))
    timings = {segment.name: 0.5 for segment in iteration.program.segments}
    found = metrics_of(iteration, timings)
    # Two epochs of updates, and an update is three forward passes.
    actor, critic = forward_by_hand(head=True), forward_by_hand(head=False)
    assert found == {
        "perf/mfu/actor": pytest.approx(6 * actor / (0.5 * PEAK)),
        "perf/mfu/critic": pytest.approx(6 * critic / (0.5 * PEAK)),
    }
    by_name = {s.name: s for s in iteration.program.segments}
    count = {
        name: segment_flops(by_name[name], iteration.roles, iteration.epochs, LENGTHS)
        for name in ("gen", "ref", "old_log_prob", "values", "reward", "adv")
    }
    assert count["adv"] == 0  # no model takes part
    assert count["gen"] == count["ref"] == count["old_log_prob"] == actor
    assert count["values"] == count["reward"] == critic


def test_programs_that_update_count_all_of_their_passes():
    iteration = open_iteration(tiny_config(model_reward=False, num_layers=2))
    updating = iteration.program.segments[-1]
    assert {"update_actor", "update_critic"} <= set(updating.name.split("+"))
    found = metrics_of(iteration, {updating.name: 2.0})
    flops = segment_flops(updating, iteration.roles, iteration.epochs, LENGTHS)
    assert found["perf/mfu/actor"] == found["perf/mfu/critic"] == flops / (2.0 * PEAK)


def test_left_out_where_it_would_mislead():
    together = open_iteration(tiny_config(num_layers=2))  # one program that generates too
    (segment,) = together.program.segments
    assert metrics_of(together, {segment.name: 1.0}) == {}
    apart = open_iteration(tiny_config(model_reward=False, num_layers=2))
    timings = {segment.name: 1.0 for segment in apart.program.segments}
    assert metrics_of(apart, timings, peak=None) == {}


def test_an_actor_that_waits_for_its_critic_uses_nothing():
    config = tiny_config(model_reward=False, num_layers=2)
    config = replace(config, critic=replace(config.critic, warmup_steps=2))
    iteration = open_iteration(config)
    (updating,) = (s for s in iteration.program.segments if "update_actor" in s.name)
    timings = {updating.name: 1.0}
    both = metrics_of(iteration, timings, step=3)
    actor = 6 * forward_by_hand(head=True) / PEAK
    assert both["perf/mfu/actor"] == both["perf/mfu/critic"]
    assert metrics_of(iteration, timings, step=2) == {
        "perf/mfu/critic": pytest.approx(both["perf/mfu/critic"] - actor)
    }
