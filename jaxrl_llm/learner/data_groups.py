"""The groups of devices along `data`, which sum their gradients once an optimizer step.

Inside a shard_map over `data` each group computes its own rows of every micro-batch, as a mesh
without that axis does. The partitioner alone would sum the whole gradient in each micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.learner.forward import ForwardSettings
from jaxrl_llm.learner.losses import OwnLoss, PolicyLoss, ValueLoss
from jaxrl_llm.learner.micro_batches import Parts, Shard
from jaxrl_llm.learner.offline_losses import RecordLoss

# (parameters, part of a mini-batch) -> (value, metrics). A leaf of the parameters may be a
# `Weight`: a loss reads parameters by `forward.prepare`, or a leaf by `[...]`.
Loss = PolicyLoss | ValueLoss | OwnLoss | RecordLoss


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The groups of a mesh, and their forward pass."""

    mesh: Mesh
    axes: tuple[str, ...]  # the parts of `data`
    settings: ForwardSettings  # the forward pass of one group
    shard: Shard = lambda tree: tree  # spreads rows over the devices of a group

    def loss(self, loss: Loss) -> Loss:
        """`loss` as a group computes it."""
        if isinstance(loss, ValueLoss | OwnLoss):
            return replace(loss, settings=self.settings)
        router = replace(loss.router, over=self.axes)
        return replace(loss, settings=self.settings, router=router)

    def mapped(
        self, sums: Callable[[Parts, Any], tuple[Any, Any]], parts: Parts
    ) -> Callable[[Parts, Any], tuple[Any, Any]]:
        """`sums` of a group's rows, and of what all groups share, as a function of all rows.

        `sums` returns totals, with a leading axis of size 1, and what is collected of samples. The
        result has the totals of all groups along that axis.
        """
        split, collected = parts.specs(self.axes)
        one_device = self.settings.layout is None
        return jax.shard_map(
            sums,
            mesh=self.mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=(PartitionSpec(self.axes), collected),
            axis_names=set(self.mesh.axis_names if one_device else self.axes),
            check_vma=False,
        )
