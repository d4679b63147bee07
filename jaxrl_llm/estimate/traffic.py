"""Bytes that one device receives in a stage, by mesh axes. No jax.

They follow the sharding rules. Weights are gathered over `fsdp` and its neighbours for each
micro-batch, and `tensor` moves activations. `sequence` moves keys and values, or what a gated delta
rule reads and gives. `data` sums float32 gradients once an optimizer step, after the last
micro-batch, so nothing hides it. The axis `expert` moves tokens to experts and sums back, and
gathers the weights of all else. A plan that compiles the programs reads the bytes from them
instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.memory import sampled_bytes
from jaxrl_llm.estimate.packing import (
    Rows,
    expert_weights,
    learned_parameters,
    stored_parameters,
)
from jaxrl_llm.estimate.work import Model, Work
from jaxrl_llm.models.expert_dispatch import exchanges_rows, round_rows

WEIGHTS = ("pipeline", "fsdp", "expert", "sequence")  # axes of weights other than tensor
OF_EXPERTS = ("pipeline", "fsdp", "sequence")  # along `expert` they stay where they are
EXPERT = "expert"  # tokens on their way to experts and back
GATHERED = " (weights)"  # moves while matmuls run; a layer waits for activations and keys
LATENCY = 25e-6  # seconds of a small all-reduce inside a host
HOP = 5e-6  # seconds from host to host around a ring; assumed
GATHERS = 2  # gathers of a layer and pass: XLA joins the gathers of its weights
EXCHANGES = 4  # exchanges of a layer and pass: counts of rows, rounds, rows there and back
# A layout switch: arrays of a layer, and seconds of each beyond its bytes. Two H100 took
# 16.7 ms for 1.5B and 51.1 ms for 8B, 2026-11-24.
ARRAYS = 7
ARRAY_SECONDS = 40e-6


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes by axes joined with "+", and seconds of waiting that no byte explains."""

    received: dict[str, float] = field(default_factory=dict)
    latency: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        names = dict.fromkeys((*self.received, *other.received))
        both = {n: self.received.get(n, 0.0) + other.received.get(n, 0.0) for n in names}
        return Traffic(received=both, latency=self.latency + other.latency)

    def times(self, factor: float) -> "Traffic":
        scaled = {name: size * factor for name, size in self.received.items()}
        return Traffic(received=scaled, latency=self.latency * factor)

    def seconds(self, devices: Devices) -> float:
        """Seconds of the collectives that nothing hides."""
        total = self.latency
        for name, size in self.received.items():
            axes = name.partition(" ")[0].split("+")
            if name == EXPERT:  # tokens go to one device each
                total += devices.exchange_seconds(size, axes)
                continue
            exposed = 1.0 - devices.rates.hidden if name.endswith(GATHERED) else 1.0
            total += exposed * devices.seconds(size, axes)
        return total


def update_traffic(model: Model, rows: Rows, devices: Devices) -> Traffic:
    """One update over the rows of a replica."""
    config, mesh = model.config, devices.mesh
    learned = learned_parameters(model)
    experts = expert_weights(config)
    # Weights twice a micro-batch and their gradients once, in the dtype of matmuls: so it is in
    # programs that were compiled for H200s.
    twice, gradient = 2 * model.itemsize, model.itemsize
    received = _weights(
        devices,
        mesh.tensor,
        rows.micro_batches,
        total=twice * stored_parameters(model) + gradient * learned,
        experts=(twice + (0 if model.adapters else gradient)) * experts,
    )
    received |= _tokens(model, rows, devices, update=True)
    again = 1.4 if model.settings.remat == "full" else 1.0
    received |= _activations(model, rows, devices, mesh.tensor, passes=2.5 * again)
    keys = _keys(model, rows, devices, copies=2 * 2 * again + 4)
    rules = _rules(model, rows, devices, passes=2 if model.settings.remat == "none" else 3)
    received["sequence"] = keys + rules
    if mesh.pipeline > 1:
        size = rows.tokens * config.hidden_size * 4 * 2 * mesh.pipeline_rounds
        received["pipeline"] = size / (mesh.sequence * mesh.tensor)
    received["data"] = 2 * 4 * learned / devices.shards * _share(mesh.data)
    passes = rows.micro_batches * (3 if again > 1 else 2)
    waiting = 3 * rows.micro_batches * _ring_seconds(model, devices)
    return _without_zeros(received, waiting + passes * _exchange_latency(model, devices))


def pass_traffic(model: Model, rows: Rows, devices: Devices) -> Traffic:
    """One pass without a gradient over the rows of a replica."""
    tensor = devices.tensor("pass")
    received = _weights(
        devices,
        tensor,
        rows.micro_batches,
        total=model.itemsize * stored_parameters(model),
        experts=model.itemsize * expert_weights(model.config),
    )
    received |= _tokens(model, rows, devices, update=False)
    received |= _activations(model, rows, devices, tensor, passes=1)
    keys = _keys(model, rows, devices, copies=2)
    received["sequence"] = keys + _rules(model, rows, devices, passes=1)
    waiting = _ring_seconds(model, devices) + _exchange_latency(model, devices)
    return _without_zeros(received, rows.micro_batches * waiting)


def switch_bytes(model: Model, work: Work, devices: Devices) -> float:
    """Bytes that a device receives so that it has the weights of generation.

    A device already stores one shard of each weight that it needs. The axes of storage split
    another dim than the heads.
    """
    dtype = work.config.rollout.dtype or model.settings.dtype
    needed = sampled_bytes(model, dtype) / devices.tensor("generate")
    return needed * _share(devices.shards // devices.mesh.tensor)


def switch_traffic(model: Model, work: Work, devices: Devices) -> Traffic:
    """The weights on their way to the layout of generation, and only those that are not there.

    A larger `tensor` size than the mesh's is an exchange: devices need other parts of what each
    has. The switch ends before the first token: nothing hides it.
    """
    size, tensor = switch_bytes(model, work, devices), devices.tensor("generate")
    if size == 0.0:
        return Traffic()
    rate = devices.neighbours(devices.shards)
    if tensor > devices.mesh.tensor:
        rate = min(rate, devices.rates.exchange)
    waiting = ARRAYS * ARRAY_SECONDS * model.config.num_layers
    return Traffic(latency=size / rate + waiting)


def decoding_traffic(model: Model, live: np.ndarray, devices: Devices) -> Traffic:
    """All decode steps: two all-reduces a layer over the devices that share the heads."""
    tensor = devices.tensor("generate")
    if tensor == 1:
        return Traffic()
    config = model.config
    sums = 2 * config.num_layers
    size = float(live.sum()) * sums * config.hidden_size * 4 * 2 * _share(tensor)
    hops = 2 * (-(-tensor // devices.per_host) - 1) * HOP  # there and back around a ring of hosts
    waiting = len(live) * sums * (LATENCY + hops)
    return Traffic(latency=waiting + size / devices.neighbours(tensor))


def _activations(
    model: Model, rows: Rows, devices: Devices, tensor: int, *, passes: float
) -> dict[str, float]:
    """Tokens are gathered before the projections, and their sums are scattered: 4 times a layer."""
    config = model.config
    size = 4 * passes * rows.tokens * config.hidden_size * model.itemsize * config.num_layers
    return {"tensor": size / devices.mesh.sequence * _share(tensor)}


def _tokens(model: Model, rows: Rows, devices: Devices, *, update: bool) -> dict[str, float]:
    """Tokens on their way to the experts of a group, and float32 sums on their way back.

    A token goes to every device of the group, with the weights and numbers of its experts. An
    update gathers it again unless it is kept. The gradients of both ways are float32. Where that is
    fewer bytes, each (token, expert) row goes to one device instead, with the number of its expert.
    Even loads need one round.
    """
    mixture, others = model.config.mixture, devices.mesh.expert - 1
    if mixture is None:
        return {}
    size, chosen = model.config.hidden_size, mixture.experts_per_token
    tokens = math.ceil(rows.tokens / devices.mesh.sequence)
    layers = model.config.num_expert_layers
    if exchanges_rows(tokens, chosen, others + 1, model.itemsize):
        in_round = round_rows(tokens * chosen, others + 1)
        forward = 2 * model.itemsize * size + 4
        backward = 3 * model.itemsize * size + 4
        again = 2 if model.settings.remat == "full" else 1
        each = again * forward + backward if update else forward
        return {EXPERT: each * in_round * others * layers}
    there, back = model.itemsize * size + 8 * chosen, 4 * size
    each = there + back
    if update:
        again = there if model.settings.remat != "none" else 0
        each += again + 4 * (size + chosen) + back
    return {EXPERT: each * tokens * others * layers}


def _keys(model: Model, rows: Rows, devices: Devices, *, copies: float) -> float:
    """Bytes of keys and values, which each device of a row gathers."""
    config, mesh = model.config, devices.mesh
    heads = max(1.0, config.num_kv_heads / mesh.tensor)
    size = 2 * copies * rows.tokens * heads * config.head_dim * config.num_attention_layers
    return size * _share(mesh.sequence)


def _rules(model: Model, rows: Rows, devices: Devices, *, passes: int) -> float:
    """Bytes of tokens on their way to the devices of their heads in gated delta rules, and back.

    Key heads that the devices of a row do not divide are sent for each value head. Decays, rates
    and outputs are float32. Their gradients go the same ways.
    """
    config, mesh, delta = model.config, devices.mesh, model.config.delta
    if delta is None:
        return 0.0
    keys, values = delta.key_heads // mesh.tensor, delta.value_heads // mesh.tensor
    if keys % mesh.sequence:
        keys = values = -(-values // mesh.sequence) * mesh.sequence
    there = (2 * keys * delta.key_dim + values * delta.value_dim) * model.itemsize + 2 * 4 * values
    back = 4 * values * delta.value_dim
    rules = config.num_layers - config.num_attention_layers
    device_tokens = rows.tokens / mesh.sequence
    return passes * rules * device_tokens * (there + back) * _share(mesh.sequence)


def _weights(
    devices: Devices, tensor: int, times: int, *, total: float, experts: float
) -> dict[str, float]:
    """`total` bytes of all weights, gathered `times` times; a device needs its own experts only."""
    received: dict[str, float] = {}
    for size, axes in ((total - experts, WEIGHTS), (experts / devices.mesh.expert, OF_EXPERTS)):
        name = _weight_axes(devices, axes)
        share = _share(devices.size(axes))
        received[name] = received.get(name, 0.0) + size / tensor * share * times
    return received


def _weight_axes(devices: Devices, axes: Sequence[str]) -> str:
    """The axes over which weights are gathered, without axes of one device."""
    sizes = devices.mesh.sizes
    return "+".join(axis for axis in axes if sizes[axis] > 1) + GATHERED


def _share(group: int) -> float:
    return (group - 1) / group


def _ring_seconds(model: Model, devices: Devices) -> float:
    """Seconds in which the gathers of one pass go from host to host."""
    hosts = devices.size(WEIGHTS) // devices.on_host(WEIGHTS)
    return (hosts - 1) * HOP * GATHERS * model.config.num_layers


def _exchange_latency(model: Model, devices: Devices) -> float:
    """Seconds in which the exchanges of one pass wait, whatever they carry."""
    if devices.mesh.expert == 1:
        return 0.0
    hosts = devices.mesh.expert // devices.on_host((EXPERT,))
    return model.config.num_expert_layers * EXCHANGES * (LATENCY + (hosts - 1) * HOP)


def _without_zeros(received: dict[str, float], latency: float) -> Traffic:
    return Traffic(received={name: n for name, n in received.items() if n}, latency=latency)
