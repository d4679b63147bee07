"""Seconds of each stage on one device, from FLOPs, bytes and the rates of the hardware.

A pass takes the sum of its matmuls, its attention, what reads and writes memory between them, and
the part of its collectives that nothing hides.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.images import encoder_flops
from jaxrl_llm.estimate.memory import slots_of
from jaxrl_llm.estimate.packing import (
    Rows,
    active_weights,
    expert_rows,
    head_weights,
    layer_weights,
    learned_parameters,
    read_weights,
    rows_of,
    wide_weights,
)
from jaxrl_llm.estimate.traffic import (
    Traffic,
    decoding_traffic,
    pass_traffic,
    switch_traffic,
    update_traffic,
)
from jaxrl_llm.estimate.work import BYTES, Job, Model, Samples, Work
from jaxrl_llm.generation.engine import FEWEST_WITHOUT_TRITON
from jaxrl_llm.kernels.grouped_matmul import TILE
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import attended_dim, kv_bytes_per_token, state_bytes_per_slot
from jaxrl_llm.models.shapes import copied_elements, expert_matmuls

# Bytes a token and layer that are neither matmul nor attention, for each element of the hidden and
# the intermediate size: norms, rope, activations, residual sums, and their gradients.
ELEMENTWISE_UPDATE = 54
ELEMENTWISE_FORWARD = 15
# Shares of a forward pass that are computed twice.
RECOMPUTED = {"none": 0.0, "projections": 0.0, "attention": 0.45, "full": 0.6}
NARROW = 60  # matmuls of this hidden size a device run at half of the rate
# A grouped matmul with so many rows of an expert runs at half of the rate: 373 TFLOP/s with 256,
# and 631 to 660 with 2,048 and more, on an H100.
GROUPED_ROWS = 200
COPIED = 6  # bytes a forward pass moves for an element of a token's copies: sorted, and summed
HEAD_PASSES = 4  # logits are computed twice, and have two gradients
ADAPTED = 12  # bytes of an element of activations that the gradients of adapters read
BACKWARD = 2.5  # attention, in forward passes
FEW_KEYS = 380  # attention to so many tokens, in the mean, runs at half of the rate
DECODE_LAYER = 29e-6  # seconds of a layer's kernels in a decode step, whatever the batch
ROUTING = 130e-6  # the same of a layer of experts on top: its router, its sort, three more kernels
ADAPTED_FEATURE = 0.95e-9  # seconds of a decode step for a feature in or out of adapters apart
DEQUANTIZED = 0.65  # share of the memory rate: bf16 copies of float8 weights, float8 experts
# Seconds of a token in a gated delta rule, for each value head of a layer: of 128 x 128.
RULE_FORWARD, RULE_BACKWARD = 21e-9, 43e-9
STATE_PASSES = 2.6  # bytes that a decode step moves for a byte of a slot's states
SHARED_PROMPT = 2.0  # reading a prompt for several samples, in reads for one
FEW_ROWS = 30  # matmuls of a decode step with so many sequences run at half of the rate
SAMPLING_BYTES = 12  # bytes a logit: three passes over the float32 logits
# A pass through a pipeline takes 1 + this / hidden size of one without: its layers are in a loop.
# Measured on a step with hidden size 896, and one with 2,048.
PIPELINE_LOOP = 400
SCAN = 1.17  # a pass with scan_layers, in passes without: 1.12 at 7B, 1.23 at 0.5B
PREFILL_SHARE = 0.87  # share of the rate of large matmuls
OPTIMIZER_BYTES = 8  # bytes that AdamW reads and writes for a weight, moments apart


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Predicted seconds of one stage, and what they are made of."""

    stage: str
    role: str
    compute: float
    exchange: float  # collectives that nothing hides
    bubble: float  # share of `compute` in which pipeline stages idle
    traffic: Traffic
    flops: float  # work of the step's samples on one device

    @property
    def seconds(self) -> float:
        return self.compute / (1.0 - self.bubble) + self.exchange


def stage_time(job: Job, work: Work, devices: Devices, in_place: bool = False) -> StageTime:
    """Seconds of a stage. With `in_place` generation moves no weights to its layout."""
    if job.does == "generate":
        return _generation(job, work, devices, in_place)
    return _trained(job, work, devices)


# ------------------------------------------------------------------------- passes and updates


def _trained(job: Job, work: Work, devices: Devices) -> StageTime:
    model, update = work.models[job.role], job.does == "update"
    samples = work.samples.share(devices.replicas(job.does)).mini_batch(job.mini_batches)
    rows = rows_of(model, samples, share_prompts=work.share_prompts)
    split = devices.mesh.sequence * devices.tensor(job.does)
    compute, flops = _computing(model, rows, devices, split, update)
    traffic = (update_traffic if update else pass_traffic)(model, rows, devices)
    exchange = traffic.seconds(devices)
    if devices.mesh.pipeline > 1:
        compute *= 1 + PIPELINE_LOOP / model.config.hidden_size
    elif model.settings.scan_layers:
        compute *= SCAN
    images = encoder_flops(
        model,
        work.config,
        samples,
        rows,
        update=update,
        shared=work.share_prompts and _packed(model),
    )
    compute += _encoder_seconds(model, images, devices)
    flops += images
    if update:
        compute += _optimizer_seconds(model, devices)
    repeats = job.epochs * job.mini_batches
    return StageTime(
        stage=job.stage,
        role=job.role,
        compute=compute * repeats,
        exchange=exchange * repeats,
        bubble=_bubble(devices),
        traffic=traffic.times(repeats),
        flops=flops * repeats,
    )


def _computing(
    model: Model, rows: Rows, devices: Devices, split: int, update: bool
) -> tuple[float, float]:
    """Seconds and FLOPs of one pass over the rows of a replica that `split` devices share."""
    config, rates = model.config, devices.rates
    layers = 2.0 * config.num_layers * active_weights(config) * rows.tokens
    head = 2.0 * head_weights(model) * (rows.targets if _packed(model) else rows.tokens)
    attention = (
        4.0 * config.num_attention_layers * config.num_heads * attended_dim(config) * rows.pairs
    )
    again = RECOMPUTED[model.settings.remat]
    if update:
        frozen = bool(model.adapters)  # weights without a gradient
        matmuls = layers * (3 - frozen + again) + head * (HEAD_PASSES - frozen)
        attending = attention * (1 + BACKWARD + (again > 0.5))
        elementwise = ELEMENTWISE_UPDATE + ELEMENTWISE_FORWARD * (again > 0)
        elementwise += ADAPTED * frozen
    else:
        matmuls, attending, elementwise = layers + head, attention, ELEMENTWISE_FORWARD
    matmuls += _grouped(model, rows, devices, split, 3 + again if update else 1.0)
    width = config.hidden_size + config.active_size
    scale = model.itemsize / 2
    moved = elementwise * width * rows.tokens * config.num_layers * scale
    copied = COPIED * ((4 if again else 3) if update else 1)
    moved += copied * copied_elements(config) * rows.tokens * config.num_expert_layers * scale
    if model.float8 and not model.generates_merged:  # each pass makes its weights in bf16
        made = config.num_layers * layer_weights(config) * (1 + model.itemsize)
        moved += made * rows.micro_batches * (1 + update) / DEQUANTIZED
    rate = rates.matmul * config.hidden_size / (config.hidden_size + NARROW * split) / scale
    head_share = min(config.head_dim, 128) / 128
    attended = rows.pairs / rows.tokens
    keys_share = attended / (attended + FEW_KEYS)
    attending_seconds = attending / (rates.attention * head_share * keys_share)
    seconds = matmuls / rate + attending_seconds + moved / rates.memory
    rule_passes = RULE_FORWARD
    if update:
        rule_passes += RULE_BACKWARD + RULE_FORWARD * (model.settings.remat != "none")
    seconds += rule_passes * _rule_heads(config) * rows.tokens
    return seconds / split, (matmuls + attending) / split


def _encoder_seconds(model: Model, flops: float, devices: Devices) -> float:
    """Seconds of FLOPs of the image encoder, which no devices share."""
    if (vision := model.config.vision) is None:
        return 0.0
    rate = devices.rates.matmul * vision.hidden_size / (vision.hidden_size + NARROW)
    return flops / rate * model.itemsize / 2


def _rule_heads(config: ModelConfig) -> int:
    """Value heads of all layers of a gated delta rule."""
    rules = config.num_layers - config.num_attention_layers
    return 0 if config.delta is None else rules * config.delta.value_heads


def _grouped(model: Model, rows: Rows, devices: Devices, split: int, passes: float) -> float:
    """FLOPs that the matmuls of experts could do in the time that few rows cost them."""
    config = model.config
    if config.mixture is None:
        return 0.0
    flops = 2.0 * config.num_expert_layers * config.mixture.experts_per_token
    flops *= expert_matmuls(config) * rows.tokens * passes
    rows_of_expert = expert_rows(config, rows.row_tokens * devices.mesh.expert / split)
    return flops * GROUPED_ROWS / rows_of_expert


def _packed(model: Model) -> bool:
    return bool(model.rows.micro_batch_tokens)


def _optimizer_seconds(model: Model, devices: Devices) -> float:
    """One optimizer step: everything is read and written once."""
    optimizer = model.optimizer
    moments = 2 * optimizer.num_moments * BYTES[optimizer.moment_dtype]
    parameters = learned_parameters(model) / devices.shards + model.encoder_learns
    on_device = parameters * (2 * OPTIMIZER_BYTES + moments) / devices.rates.memory
    return on_device + (parameters * moments / devices.rates.host if optimizer.offload else 0.0)


def _bubble(devices: Devices) -> float:
    """Share of a pass in which a pipeline stage idles."""
    mesh = devices.mesh
    idle = mesh.pipeline - 1
    return idle / (mesh.pipeline * mesh.pipeline_micro_batches * mesh.pipeline_rounds + idle)


# ------------------------------------------------------------------------- generation


def _generation(job: Job, work: Work, devices: Devices, in_place: bool) -> StageTime:
    model = work.models[job.role]
    samples = work.samples.share(devices.replicas("generate"))
    tensor = devices.tensor("generate")
    live, cached = _decoding(samples, slots_of(work, samples))
    decoding, flops = _decode_seconds(work, model, samples, devices, live, cached)
    prompt_flops = _prefill_flops(model, samples) / tensor
    prefill = prompt_flops / (devices.rates.matmul * PREFILL_SHARE)
    prefill += RULE_FORWARD * _rule_heads(model.config) * float(samples.prompts.sum()) / tensor
    images = encoder_flops(model, work.config, samples, None, update=False, shared=True)
    prefill += _encoder_seconds(model, images, devices)
    switch = Traffic() if in_place else switch_traffic(model, work, devices)
    steps = decoding_traffic(model, live, devices)
    exchange = switch.seconds(devices) + steps.seconds(devices)
    return StageTime(
        stage=job.stage,
        role=job.role,
        compute=decoding + prefill,
        exchange=exchange,
        bubble=0.0,
        traffic=switch.plus(steps),
        flops=flops + prompt_flops + images,
    )


def _decoding(samples: Samples, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """For each decode step: the live sequences, and the response tokens in their caches.

    A slot takes the next sample when its own has ended.
    """
    return _decoding_of(samples.responses.astype(np.int64).tobytes(), slots)


@cache  # the layouts of a search share few numbers of replicas and slots
def _decoding_of(responses: bytes, slots: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.frombuffer(responses, np.int64)
    ends = np.zeros(slots, np.int64)
    begins = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        slot = int(ends.argmin()) if i >= slots else i
        begins[i], ends[slot] = ends[slot], ends[slot] + length
    total = int(ends.max()) if slots else 0
    # Changes of the number of live sequences, and of the sum of their first steps.
    live, starts = np.zeros(total + 1), np.zeros(total + 1)
    for begin, length in zip(begins, lengths, strict=True):
        live[begin] += 1
        starts[begin] += begin
        live[begin + length] -= 1
        starts[begin + length] -= begin
    live, starts = live.cumsum()[:total], starts.cumsum()[:total]
    return live, live * np.arange(total) - starts


def _decode_seconds(
    work: Work,
    model: Model,
    samples: Samples,
    devices: Devices,
    live: np.ndarray,
    cached: np.ndarray,
) -> tuple[float, float]:
    """Seconds of all decode steps, and their FLOPs on one device."""
    config, rates, rollout = model.config, devices.rates, work.config.rollout
    tensor = devices.tensor("generate")
    itemsize = BYTES[rollout.dtype or model.settings.dtype]
    quantized = rollout.quantization == "float8"
    small = 1 if quantized else itemsize
    layers, head = config.num_layers * active_weights(config), head_weights(model)
    read = config.num_layers * read_weights(config, float(live.mean()) if len(live) else 0.0)
    frozen = model.float8 and not model.generates_merged
    # Triton reads float8 as it is, and so do the grouped matmuls of experts in whole tiles.
    grouped = (frozen or quantized) and _whole_tiles(config, tensor)
    if config.mixture is None:
        copied = frozen and slots_of(work, samples) >= FEWEST_WITHOUT_TRITON
    else:
        copied = (frozen or quantized) and not grouped
    weight_bytes = itemsize if copied else 1 if frozen else small
    wide = config.num_layers * wide_weights(config) if quantized else 0.0
    bytes_read = (read - wide) * weight_bytes / (DEQUANTIZED if grouped else 1.0)
    bytes_read += (wide + head) * itemsize
    weights = bytes_read / tensor / rates.memory
    flops = 2.0 * live * (layers + head) / tensor
    rate = rates.matmul * config.hidden_size / (config.hidden_size + NARROW * tensor)
    rate = rate * live / (live + FEW_ROWS) / (itemsize / 2)
    matmuls = np.maximum(weights, flops / rate)
    if copied:  # a step writes the weights of float8 projections, or experts, before it reads them
        matmuls += read * (1 + itemsize) / tensor / (rates.memory * DEQUANTIZED)
    n = samples.responses.shape[1]
    reads = live if n == 1 else np.minimum(live, SHARED_PROMPT * np.ceil(live / n))
    tokens = reads * float(samples.prompts.mean()) + cached
    parts = min(tensor, config.cache_heads[0])
    cache = tokens * kv_bytes_per_token(config, small) / parts / rates.cache
    cache += live * STATE_PASSES * state_bytes_per_slot(config, itemsize) / tensor / rates.memory
    fixed = config.num_layers * DECODE_LAYER + config.num_expert_layers * ROUTING
    if not model.generates_merged:
        fixed += _adapters_seconds(model, devices)
    sampling = live * config.vocab_size * SAMPLING_BYTES / tensor / rates.memory
    return float((matmuls + cache + fixed + sampling).sum()), float(flops.sum())


def _whole_tiles(config: ModelConfig, tensor: int) -> bool:
    """True if the grouped matmuls read float8 experts as they are; False without experts.

    `tensor` devices have a part of each expert.
    """
    mixture = config.mixture
    return mixture is not None and not (
        config.hidden_size % TILE or mixture.expert_size % (TILE * tensor)
    )


def _adapters_seconds(model: Model, devices: Devices) -> float:
    """The matmuls of adapters in a decode step. Those of experts take the time of their bytes."""
    config, in_experts = model.config, 0.0
    if config.mixture is not None:
        features = 3.0 * (config.hidden_size + config.mixture.expert_size)
        features *= config.num_expert_layers * config.mixture.num_experts
        in_experts = min(model.adapted, features)
    read = in_experts / model.adapted * model.adapters if model.adapted else 0.0
    seconds = read * model.itemsize / devices.rates.memory
    return seconds + (model.adapted - in_experts) * ADAPTED_FEATURE


def _prefill_flops(model: Model, samples: Samples) -> float:
    config = model.config
    dense = 2.0 * config.num_layers * active_weights(config) * samples.prompts.sum()
    squares = (samples.prompts.astype(float) ** 2).sum() / 2
    return float(
        dense
        + 4.0 * config.num_attention_layers * config.num_heads * attended_dim(config) * squares
    )
