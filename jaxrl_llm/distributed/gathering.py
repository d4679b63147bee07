"""What happens to all parameters before a training pass uses them, under a layout."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.distributed.layout import Layout, constrained
from jaxrl_llm.distributed.reshard import to_layout
from jaxrl_llm.distributed.sharding import shardings

Gather = Callable[[Any], Any]


def gathering(layout: Layout, axes: Any, shapes: Any) -> Gather:
    """Gathers the vocabulary tables over fsdp before a training pass uses them.

    `axes` and `shapes` are trees of all parameters.

    A lookup in the stored layout of the embedding makes the partitioner move activations in every
    later layer. With a gathered table it gathers each weight where it is used, as ZeRO stage 3
    does. Gathering all weights here would hold them all at once. The sharded optimizer state
    scatters the gradients back to the stored layout.
    """
    if layout.mesh.size == 1:
        return lambda params: params
    use = shardings(axes, shapes, layout.mesh, layout.rules.replace(embed=None))

    def gather(names: tuple[str, ...], sharding: Any, param: jax.Array) -> jax.Array:
        if "vocab" not in names:
            return param
        # Without the barrier the partitioner gathers float32, as it was before the cast.
        return constrained(jax.lax.optimization_barrier(param), sharding)

    def gathered(params: Any) -> Any:
        names, places = (_part_of(tree, params) for tree in (axes, use))
        return jax.tree.map(gather, names, places, params, is_leaf=lambda x: isinstance(x, tuple))

    return gathered


def switch_and_gather(source: Layout, target: Layout, axes: Any, shapes: Any) -> Gather:
    """Brings all parameters from `source` to `target`, then gathers as `gathering` does."""
    before, after = (
        shardings(axes, shapes, layout.mesh, layout.rules) for layout in (source, target)
    )
    gather = gathering(target, axes, shapes)

    def switch(params: Any) -> Any:
        places = (_part_of(tree, params) for tree in (before, after))
        return gather(to_layout(params, *places))

    return switch


def _part_of(tree: Any, params: Any) -> Any:
    """The leaves of `tree` that `params` has: merged weights have no adapters."""
    return {
        name: _part_of(tree[name], value) if isinstance(value, dict) else tree[name]
        for name, value in params.items()
    }
