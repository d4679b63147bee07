"""Rows whose tokens are split over devices: passes and updates equal those on one device.

Whole iterations and offline steps with split rows are in test_mixes.py.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_learner_mesh import ALGORITHM, V, fields
from tiny_iteration import open_iteration, random_params, tiny_config
from tiny_models import CONFIGS

from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated, shardings
from jaxrl_llm.kernels.flash_attention import token_order
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    attention_work,
    response_scores,
    response_statistics,
    response_values,
    row_logprobs,
    spread,
)
from jaxrl_llm.learner.losses import PolicyLoss, with_counts
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import rows_of, whole_rows
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.base import model_spec

WITH_DATA = {"data": 2, "sequence": 4}
WITH_ALL = {"fsdp": 2, "sequence": 2, "tensor": 2}


def close(found, expected, what):
    """Within 1e-5 of the norm."""
    difference = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert difference <= 1e-5 * np.linalg.norm(expected) + 1e-9, (what, difference)


def lowered_update(mesh, *, layout_rules=None, row_tokens, **settings):
    """The actor's gradient program on packed rows, lowered."""
    iteration = open_iteration(tiny_config(num_layers=2), mesh)
    role = iteration.roles["actor"]
    layout = role.layout
    if layout_rules:
        layout = replace(layout, rules=layout.rules.replace(**layout_rules))
    forward = replace(role.forward, layout=layout, **settings)
    loss = PolicyLoss(algorithm=ALGORITHM, temperature=0.9, spec=role.spec, settings=forward)
    parts = Packed(row_tokens=row_tokens, num_replicas=layout.num_replicas, shard=lambda rows: rows)

    def gradients(params, batch):
        batch = with_counts(batch, jnp.bool_(False))
        return accumulate(loss, params, batch, cast_ahead=None, micro_batches=parts)

    def abstract(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    batch = jax.tree.map(lambda x: abstract(x, batch_sharding(mesh)), fields())
    params = jax.tree.map(abstract, role.spec.params, role.param_shardings)
    out_shardings = (role.param_shardings, replicated(mesh))
    return jax.jit(gradients, out_shardings=out_shardings).lower(params, batch)


@pytest.mark.nightly
def test_no_device_keeps_the_tokens_of_others_between_layers():
    """What the loops over layers carry: the residual stream, and all that the gradient needs.

    Without rematerialisation everything is kept that is not gathered again.
    """
    program = lowered_update(make_mesh(**WITH_ALL), row_tokens=40, scan_layers=True).compile()
    loops = re.findall(r"= \(([^\n]*?)\) while\(", program.as_text())
    carried = [re.findall(r"\[([\d,]+)\]", loop) for loop in loops]
    # Two layers; a row of 40 tokens on two times two devices; a hidden size of 32.
    of_layers = [shapes for shapes in carried if "2,1,10,32" in shapes]
    assert len(of_layers) == 2  # forward and backward
    for shapes in of_layers:
        assert "1,10,32" in shapes
        assert not [shape for shape in shapes if re.search(r"\b(20|40),32$", shape)]


@pytest.mark.parametrize(
    "sizes",
    [WITH_ALL, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow)],
    ids=["all", "no-sequence"],
)
def test_tensor_gathers_activations_and_no_weights(sizes):
    mesh = make_mesh(**sizes)
    program = lowered_update(mesh, row_tokens=40, scan_layers=True).compile()
    axes = MeshAxes(names=mesh.axis_names, sizes=mesh.axis_sizes)
    over_tensor = [x for x in collectives(program.as_text(), axes, ()) if "tensor" in x.axis]
    assert {x.kind for x in over_tensor} == {"all-gather", "all-reduce"}
    gathered = {x.shape for x in over_tensor if x.kind == "all-gather"}
    # The hidden states of a row, and the ids of its tokens.
    tokens = 40 // mesh.shape["sequence"]
    assert gathered == {f"f32[1,{tokens},32]", f"s32[1,{tokens},1]"}


def test_an_axis_of_size_1_changes_no_program():
    mesh = make_mesh(data=2, fsdp=4)
    programs = [
        lowered_update(mesh, layout_rules=rules, row_tokens=25).as_text()
        for rules in ({}, {"tokens": None, "residual": None})
    ]
    assert programs[0] == programs[1]


def passes(part, params, specs, settings):
    """All that passes without a gradient compute, by name."""
    rows = rows_of(part)
    common = {"spec": specs[0], "settings": settings}
    found = response_statistics(
        params[0],
        rows,
        temperature=0.8,
        with_entropy=True,
        with_squares=True,
        candidates=part["candidates"],
        top_k=2,
        **common,
    )
    scalar = {"spec": specs[1], "settings": settings}
    narrow = response_statistics(
        params[0], rows, with_entropy=True, with_squares=True, kept=part["candidates"], **common
    )
    return {
        "logprobs over kept tokens": narrow.logprobs,
        "their entropy": narrow.entropy,
        "their squares": narrow.sum_squares,
        "logprobs": found.logprobs,
        "entropy": found.entropy,
        "squares": found.sum_squares,
        "at candidates": found.at_candidates,
        "top": found.top[1],
        "values": response_values(params[1], rows, **scalar),
        "scores": response_scores(params[1], rows, part["response_lengths"], **scalar),
    }


def test_passes_with_windows_and_shared_prompts():
    """Layers that see all and layers with a window; packed rows whose prompts are shared."""
    specs = [model_spec(CONFIGS["qwen2_window"], kind) for kind in ("causal_lm", "scalar")]
    params = [random_params(spec.params, seed) for seed, spec in enumerate(specs)]
    batch = fields()
    for name in ("prompts", "prompt_lengths"):  # groups of two
        batch[name] = batch[name][::2].repeat(2, axis=0)
    batch["candidates"] = np.stack([batch["responses"], (batch["responses"] + 1) % V], axis=-1)
    expected = jax.jit(partial(passes, params=params, specs=specs, settings=ForwardSettings()))(
        batch
    )
    mesh = make_mesh(**WITH_DATA)
    layout = train_layout(mesh, num_kv_heads=2)
    settings = ForwardSettings(layout=layout)
    placed = [
        jax.device_put(of_one, shardings(spec.axes, spec.params, mesh, layout.rules))
        for spec, of_one in zip(specs, params, strict=True)
    ]
    run = partial(passes, params=placed, specs=specs, settings=settings)
    rows = Packed(row_tokens=27, group=2, num_replicas=2)
    for parts in (rows, Padded()):
        found = fetch(jax.jit(partial(parts.join, run))(make_global(batch, batch_sharding(mesh))))
        for name, value in expected.items():
            mask = {1: 1.0, 2: batch["mask"], 3: batch["mask"][..., None]}[value.ndim]
            np.testing.assert_allclose(found[name] * mask, value * mask, rtol=1e-5, atol=2e-5)
            assert np.abs(found[name]).max() > 0.1, name


def test_whole_rows_come_back_in_their_order():
    spec = model_spec(CONFIGS["llama"])
    params = random_params(spec.params, seed=0)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 19)).astype(np.int32)
    run = partial(row_logprobs, spec=spec)
    expected = jax.jit(partial(run, settings=ForwardSettings()))(params, tokens)
    mesh = make_mesh(sequence=4, tensor=2)
    settings = ForwardSettings(layout=train_layout(mesh, num_kv_heads=2))
    placed = jax.device_put((params, tokens), replicated(mesh))
    close(fetch(jax.jit(partial(run, settings=settings))(*placed)), expected, "log-probs")


def test_causal_work_is_balanced():
    assert token_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    layout = train_layout(make_mesh(sequence=4), num_kv_heads=2)
    spec = model_spec(CONFIGS["qwen2_window"])  # one layer of each kind, with a window of 4

    @jax.jit
    def work_of(tokens):
        rows = whole_rows(tokens)
        parts = spread(rows, layout)
        work = attention_work(rows, spec, ForwardSettings(layout=layout))
        return parts.visible_pairs(None), parts.visible_pairs(3), list(work.values())

    pairs, in_window, (largest, mean) = work_of(np.zeros((1, 64), np.int32))
    assert pairs.tolist() == [[16 * 65 / 2] * 4]
    # The first and the last eight tokens of the row are the first device's.
    assert in_window[0].tolist() == [1 + 2 + 3 * 14] + [3 * 16] * 3
    assert (largest, mean) == (520 + 64, 520 + (4 * 64 - 6) / 4)
