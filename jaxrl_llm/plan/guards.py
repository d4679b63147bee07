"""Guards of a run, on by default: finite gradients, memory that suffices, no hidden copies."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.learner.train_step import NONFINITE
from jaxrl_llm.plan.dataflow import Segment

SHOWN = 5
VALIDATION = "validation"  # name of the program of held-out evaluation


class NonFiniteGradients(RuntimeError):
    """A gradient was NaN or infinite; the state holds the parameters before it.

    `parameters` are the names of those whose gradient is not finite, with their role.
    """

    parameters: tuple[str, ...] = ()


def check_gradients(
    metrics: dict[str, Any], params: Mapping[str, Any], step: int, what: str = "step"
) -> None:
    """Take the flags of the train step out of `metrics`; raise NonFiniteGradients if any is set.

    `params` gives the parameter tree of each prefix of the metric names.
    """
    for prefix, tree in params.items():
        name = f"{prefix}/{NONFINITE}" if prefix else NONFINITE
        flags = metrics.pop(name, None)
        if flags is not None and np.asarray(flags).any():
            _stop(np.asarray(flags), tree, step, what, prefix or "model")


def _stop(flags: np.ndarray, params: Any, step: int, what: str, role: str) -> None:
    names = [name for name, bad in zip(_names(params), flags, strict=True) if bad]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    error = NonFiniteGradients(
        f"{what} {step}: the gradient of the {role} is not finite in {', '.join(names[:SHOWN])}"
        f"{more}. That update was not applied, and no checkpoint has weights that are not finite. "
        "Lower the learning rate, or train in float32, and start again to resume."
    )
    error.parameters = tuple(f"{role}.{name}" for name in names)
    raise error


def nonfinite_values(params: Mapping[str, Any]) -> list[str]:
    """The parameters, as role.name, that hold a NaN or an infinity. Every process must call it."""

    @jax.jit
    def bad(leaves: list[jax.Array]) -> list[jax.Array]:
        return [~jnp.isfinite(leaf).all() for leaf in leaves]

    found = []
    for role, tree in params.items():
        flags = fetch(bad(jax.tree.leaves(tree)))
        found += [f"{role}.{name}" for name, flag in zip(_names(tree), flags, strict=True) if flag]
    return found


def _names(params: Any) -> tuple[str, ...]:
    """Dotted names of the leaves of a parameter tree, in tree order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths)


class OutOfMemory(RuntimeError):
    """A program did not fit in a device's memory. Checkpoints are unchanged."""


@contextmanager
def memory_guard(segment: Segment | None) -> Iterator[None]:
    """Name the program that ran out of memory inside, the memory in use, and what needs less.

    None stands for held-out evaluation. Raises OutOfMemory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # A kernel that asks for too much shared memory says RESOURCE_EXHAUSTED as well.
        if not re.match(r"RESOURCE_EXHAUSTED.*out of memory", str(error), re.I | re.S):
            raise
        first_line = str(error).partition("\n")[0]
        program = VALIDATION if segment is None else segment.name
        raise OutOfMemory(
            f"{program} does not fit in the memory of a device. {first_line}{_in_use()}\n"
            f"What needs less, the cheapest first: {'; '.join(_remedies(segment))}.\n"
            "Start again with one of these; the run goes on from its last checkpoint, if any."
        ) from None


def _in_use() -> str:
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return ""
    names = ("bytes_in_use", "bytes_limit", "largest_free_block_bytes")
    in_use, limit, piece = (stats.get(name, 0) / 2**30 for name in names)
    text = f" In use were {in_use:.1f} of {limit:.1f} GiB"
    # What a program asks for is one piece, so it may fail where the sum would fit.
    return f"{text}; the largest free piece had {piece:.1f}." if piece else f"{text}."


def _remedies(segment: Segment | None) -> list[str]:
    devices, room = "more devices on config.mesh.fsdp", "smaller config.rollout.cache_tokens or"
    if segment is None:
        return [f"{room} num_slots, or config.data.val_batch_size", devices]
    found = []
    if segment.generates:
        found += [
            f"{room} num_slots",
            "config.rollout.quantization=float8 with algorithm.rollout_is=token",
        ]
    if segment.updated:
        found.append("remat=projections or full of that model (config.actor, config.critic, ...)")
    if not all(stage.generates for stage in segment.stages):
        found.append("smaller micro_batch_tokens or micro_batch_size there, or in config.warmup")
    if segment.updated:
        found.append("optimizer.moment_dtype=bfloat16 or optimizer.offload=true there")
    return [*found, devices]


@contextmanager
def transfer_guard() -> Iterator[None]:
    """Refuse hidden copies: a numpy array or Python number given to a compiled program, or an
    argument on the wrong devices. Explicit jax.device_put and device_get are allowed.

    Requires: the program was traced before. Tracing makes constants, which are such copies too.
    """
    with (
        jax.transfer_guard_host_to_device("disallow"),
        jax.transfer_guard_device_to_device("disallow"),
    ):
        yield
