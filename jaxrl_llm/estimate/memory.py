"""Bytes on one device: what roles keep, and what each stage needs on top.

The sums were compared with measured peaks and with programs that were compiled for H200s:
`docs/planner.md`.
"""

import math
from dataclasses import replace

from jaxrl_llm.distributed.hardware import FILLED
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.images import encoder_bytes, kept_encoder, pixel_bytes
from jaxrl_llm.estimate.packing import (
    Rows,
    gathered_weights,
    head_weights,
    layer_outputs,
    layer_weights,
    learned_parameters,
    rows_of,
    stored_parameters,
    wide_weights,
)
from jaxrl_llm.estimate.work import BYTES, Job, Model, Samples, Work
from jaxrl_llm.generation.memory import GB, Replica, fitted, generation_bytes, rule_bytes
from jaxrl_llm.kernels.hopper import compiling_for_hopper
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import copied_elements
from jaxrl_llm.plan.generating import replica_of

STEP = 1e7  # bytes to which the memory of slots and cache is rounded down
LOGITS_COPIES = 0.5  # copies of float32 logits: the head computes them in parts
LOGITS_MOST = 3 * 2**30  # bytes of these parts, however many tokens there are
# What a pipeline keeps for its backward pass, which runs in a loop: this many of what a plain pass
# keeps, and the residual of each layer once more.
PIPELINE_COPIES = 1.1
PIPELINE_FLOATS = 2.5  # float32 copies of norms and activation that it keeps without recomputation
GATHERED_LAYERS = 3  # layers that a mesh has in flight
GATHERED = 6  # bytes of a weight in flight: gathered in bf16, its gradient in float32
GATHERED_FROZEN = 2  # layers of a model below adapters, which has no gradient
BUFFERS = 0.8e9  # bytes of collectives
SCATTERED = 1.25  # bytes of a weight: gradients of a micro-batch, in bf16, that wait for their sum
SCALE = 4  # bytes of an output of a float8 projection
# What a layer of a gated delta rule keeps for the backward pass, and what that pass has at once, as
# multiples of `rule_bytes`.
RULE_KEPT, RULE_GRADIENTS = 0.87, 0.7


def kept(model: Model, devices: Devices) -> float:
    """Bytes that a role keeps on a device from step to step: weights, moments if it learns."""
    size = model.stored_itemsize
    if model.learns and not model.optimizer.offload:
        size += model.optimizer.num_moments * BYTES[model.optimizer.moment_dtype]
    # The base below adapters is a role of its own.
    kept = learned_parameters(model) * size
    if model.float8 and not model.adapters:
        saved = layer_weights(model.config) * (size - 1) - layer_outputs(model.config) * SCALE
        kept -= model.config.num_layers * saved
    return kept / devices.shards + kept_encoder(model)


def temporary(job: Job, work: Work, devices: Devices, in_place: bool = False) -> float:
    """Bytes of a stage on a device beyond what roles keep.

    With `in_place` a rollout keeps the weights in the layout of generation already.
    """
    model = work.models[job.role]
    samples = work.samples.share(devices.replicas(job.does))
    if job.does == "generate":
        return _generation(work, devices, in_place) + pixel_bytes(work, samples)
    ids = _kept_ids(work, samples) + pixel_bytes(work, samples)
    part = samples.mini_batch(job.mini_batches)
    rows = rows_of(model, part, share_prompts=work.share_prompts)
    images = encoder_bytes(model, work.config, rows, update=job.does == "update")
    if job.does == "pass":
        return ids + images + _forward(model, rows, devices)
    if job.mini_batches > 1:
        ids += _kept_ids(work, part) + pixel_bytes(work, part)
    return ids + images + _update(model, rows, devices)


def _kept_ids(work: Work, samples: Samples) -> float:
    """Bytes of the ids that filters kept, int32, which the batch has until its update."""
    return 4.0 * samples.count * samples.longest_response * work.kept_tokens


def slots_of(work: Work, samples: Samples) -> int:
    """Sequences that a replica decodes at once."""
    asked = 0 if work.settings is None else work.settings.num_slots
    return min(asked or samples.count, samples.count)


def with_room(work: Work, devices: Devices, held: float, in_place: bool = False) -> Work:
    """`work` with the slots and cache tokens that fit next to `held` bytes of other arrays.

    Its config says how much memory they were found for. `devices` generate; `in_place` is as in
    `temporary`.
    """
    if work.settings is None:
        return work
    rollout = work.config.rollout
    own = 0.0 if in_place else _weights(work, devices)
    memory_gb = room_gb(devices, held + own, rollout.memory_gb)
    rollout = replace(rollout, memory_gb=memory_gb)
    with compiling_for_hopper():
        settings = fitted(work.settings, replica_in(work, devices), memory_gb * GB)
    return replace(work, config=replace(work.config, rollout=rollout), settings=settings)


def room_gb(devices: Devices, held: float, asked: float = 0.0) -> float:
    """GB of a device next to `held` bytes, at least a step, or `asked` GB.

    More is not given than the device has without a reserve: a config may come from a run on a
    larger one. Where nothing limits its memory, the result is what was asked for.
    """
    limits = devices.rates
    if not math.isfinite(limits.filled):
        return asked
    if 0 < asked * GB <= limits.filled / FILLED - held:
        return asked
    return max(math.floor((limits.filled - held) / STEP), 1) * STEP / GB


def validation_gb(work: Work, devices: Devices, held: float) -> float:
    """`room_gb` while held-out prompts are answered, on the devices of the model that learns.

    A model that is trained in full before its adapters are made keeps moments for all weights.
    """
    model = work.actor
    if model.adapters and work.config.warmup is not None:
        held += stored_parameters(model) * (model.stored_itemsize + 8) / devices.shards
    dtype = work.config.rollout.dtype or work.config.actor.dtype
    copy = sampled_bytes(model, dtype) / devices.tensor("generate")
    return room_gb(devices, held + copy, work.config.validation.memory_gb)


def replica_in(work: Work, devices: Devices) -> Replica:
    """What a replica on these devices generates."""
    samples = work.samples.share(devices.replicas("generate"))
    return replica_of(
        work.config,
        work.actor.config,
        rows=samples.count,
        tensor=devices.tensor("generate"),
    )


def _generation(work: Work, devices: Devices, in_place: bool) -> float:
    assert work.settings is not None
    with compiling_for_hopper():
        used = generation_bytes(work.settings, replica_in(work, devices))
    return used if in_place else _weights(work, devices) + used


def _weights(work: Work, devices: Devices) -> float:
    """Bytes of the weights that generate, on top of what roles keep."""
    model, tensor, rollout = work.actor, devices.tensor("generate"), work.config.rollout
    dtype = rollout.dtype or model.settings.dtype
    # A frozen base is copied only where another layout needs it.
    copies = not model.adapters or model.generates_merged or devices.switches
    weights = sampled_bytes(model, dtype) if copies else 0.0
    if rollout.quantization == "float8":
        weights += float8_bytes(model.config)
    encoder = model.encoder * BYTES[dtype] if copies else 0.0
    return weights / tensor + encoder


def float8_bytes(config: ModelConfig) -> float:
    """Bytes of what generation in float8 makes of the layers' weights: values and scales."""
    weights = layer_weights(config) - wide_weights(config)
    return config.num_layers * (weights + layer_outputs(config) * SCALE)


def sampled_bytes(model: Model, dtype: str) -> float:
    """Bytes of the weights that generate; a base in float8 that is not merged stays in it."""
    size = stored_parameters(model) * BYTES[dtype]
    if model.float8 and not model.generates_merged:
        saved = layer_weights(model.config) * (BYTES[dtype] - 1)
        size -= model.config.num_layers * (saved - layer_outputs(model.config) * SCALE)
    return size


def _forward(model: Model, rows: Rows, devices: Devices) -> float:
    config, tensor = model.config, devices.tensor("pass")
    tokens = rows.row_tokens / (devices.mesh.sequence * tensor)
    widest = max(2 * config.active_size, 4 * config.hidden_size) + copied_elements(config)
    gathered = 2 * gathered_weights(config, devices.mesh.expert) * model.itemsize / tensor
    cast = 0 if devices.shards > 1 else _cast(model)
    return (
        tokens * widest * model.itemsize + gathered + cast + _logits(model, rows, devices, "pass")
    )


def _update(model: Model, rows: Rows, devices: Devices) -> float:
    config, mesh = model.config, devices.mesh
    parameters = stored_parameters(model)
    learned = learned_parameters(model)
    adds_up = rows.micro_batches > 1
    # One micro-batch needs no sum of gradients; XLA then keeps them in the dtype of the matmuls.
    size = 4 if adds_up else model.itemsize
    if adds_up and devices.shards > mesh.tensor * mesh.pipeline:
        size += SCATTERED
    gradients = learned * size / devices.shards
    # Cast once where a loop takes them several times, and kept where nothing is computed again.
    keeps = adds_up or model.adapters or model.settings.remat == "none"
    cast = _cast(model) if keeps else 0.0
    tokens = rows.row_tokens / (mesh.sequence * mesh.tensor)
    saved = tokens * (config.num_layers * saved_bytes(model) + _kept_rules(model))
    if model.adapters and not model.merges and mesh.tensor > 1:
        # Compiled programs then keep one more output of the MLP and the gathered inputs of a layer.
        wide = config.active_size + 2 * config.hidden_size
        saved += tokens * config.num_layers * wide * model.itemsize
    if mesh.pipeline > 1:
        # A stage holds some of the layers, and keeps what each tick computes, idle ones too.
        ticks = mesh.pipeline * mesh.pipeline_micro_batches + mesh.pipeline - 1
        token_bytes = config.num_layers * _looped_bytes(model) + _kept_rules(model)
        saved = tokens * token_bytes * ticks / mesh.pipeline
    scanned = model.itemsize * parameters / devices.shards if model.settings.scan_layers else 0.0
    each = GATHERED_FROZEN if model.adapters else GATHERED
    in_flight = GATHERED_LAYERS * each * gathered_weights(config, mesh.expert) / mesh.tensor
    # The heads' axis and a pipeline move activations, and gather no weights of layers.
    gathers = devices.shards > mesh.tensor * mesh.pipeline
    working = BUFFERS + in_flight if gathers else 0.0
    return (
        gradients
        + cast / devices.shards
        + saved
        + scanned
        + tokens * (_layer_bytes(model) + RULE_GRADIENTS * rule_bytes(config))
        + working
        + _logits(model, rows, devices, "update")
    )


def _cast(model: Model) -> float:
    """Weights in the dtype of the matmuls, where they are stored in another, or merged."""
    if model.adapters:
        return stored_parameters(model) * model.itemsize if model.merges else 0.0
    same = model.settings.dtype == model.settings.param_dtype
    return 0.0 if same else stored_parameters(model) * model.itemsize


def _logits(model: Model, rows: Rows, devices: Devices, does: str) -> float:
    if model.kind != "causal_lm":
        return 0.0
    logits = rows.row_tokens * head_weights(model) / model.config.hidden_size * 4
    split = devices.mesh.sequence * devices.tensor(does)
    return min(LOGITS_COPIES * logits, LOGITS_MOST) / split


def saved_bytes(model: Model) -> float:
    """Bytes of one token and layer that the forward pass keeps for the backward pass."""
    config, size = model.config, model.itemsize
    D, F = config.hidden_size, config.active_size
    kv = 2 * config.num_kv_heads * config.head_dim
    queries = config.num_heads * config.head_dim
    residual = D * BYTES[model.settings.residual_dtype]
    share = config.num_attention_layers / config.num_layers  # the others have a gated delta rule
    attention = share * (queries + 4) * size
    mixed = share * (queries * (2 if config.attention_gate else 1) + kv)
    if (delta := config.delta) is not None:
        streams = delta.key_heads * delta.key_dim + delta.value_heads * (delta.value_dim + 1)
        mixed += (1 - share) * 2 * streams
    # A norm behind the MLP reads what its last projection wrote. One behind attention reads what is
    # kept for the residual sum in any case, unless everything is kept: then the sum is.
    behind = 0 if config.norms == "before" else D
    projections = (mixed + 2 * F + copied_elements(config) + behind) * size
    # Heads before their norm, and after.
    normed = share * (queries + kv / 2) if config.qk_norm else 0
    return (
        residual
        + {
            "full": 0.0,
            "attention": attention,
            "projections": attention + projections,
            "none": attention + projections + (F + 2 * D + behind + normed) * size,
        }[model.settings.remat]
    )


def _looped_bytes(model: Model) -> float:
    """`saved_bytes` where the pass is a loop, as in a pipeline.

    Without recomputation the loop also keeps norms and the MLP's activation in float32, which XLA
    computes again elsewhere.
    """
    config = model.config
    copies = PIPELINE_FLOATS if model.settings.remat == "none" else 0.0
    return (
        PIPELINE_COPIES * saved_bytes(model)
        + config.hidden_size * BYTES[model.settings.residual_dtype]
        + copies * (config.hidden_size + config.active_size) * 4
    )


def _kept_rules(model: Model) -> float:
    """Bytes of one token that all gated delta rules keep for the backward pass."""
    config = model.config
    rules = config.num_layers - config.num_attention_layers
    return RULE_KEPT * rules * rule_bytes(config) if model.settings.remat == "none" else 0.0


def _layer_bytes(model: Model) -> float:
    """Bytes of one token while the backward pass is in a layer."""
    config, size = model.config, model.itemsize
    return (4 * config.hidden_size + 3 * config.active_size + 2 * copied_elements(config)) * size
