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
from jaxrl_llm.learner.losses import PolicyLoss, ValueLoss
from jaxrl_llm.learner.micro_batches import Parts, Shard
from jaxrl_llm.learner.offline_losses import RecordLoss


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """How the groups of a mesh compute."""

    mesh: Mesh
    axes: tuple[str, ...]  # the parts of `data`
    settings: ForwardSettings  # of a group's forward pass
    shard: Shard = lambda tree: tree  # spreads rows over the devices of a group

    def loss(self, loss: PolicyLoss | ValueLoss | RecordLoss) -> Callable[..., Any]:
        """`loss` as a group computes it."""
        if isinstance(loss, ValueLoss):
            return replace(loss, settings=self.settings)
        router = replace(loss.router, over=self.axes)
        return replace(loss, settings=self.settings, router=router)

    def run(
        self, sums: Callable[..., tuple[Any, Any]], parts: Parts, *others: Any
    ) -> tuple[Any, Any]:
        """The totals of all groups, and what is collected of samples.

        `sums` gives both for the parts of a group. It gets `others` too, which all groups share.
        """
        split, collected = parts.specs(self.axes)

        def of_group(parts: Parts, *others: Any) -> tuple[Any, Any]:
            totals, found = sums(parts.of_group(self.shard), *others)
            return jax.tree.map(lambda x: x[None], totals), found

        one_device = self.settings.layout is None
        totals, found = jax.shard_map(
            of_group,
            mesh=self.mesh,
            in_specs=(split, *(PartitionSpec() for _ in others)),
            out_specs=(PartitionSpec(self.axes), collected),
            axis_names=set(self.mesh.axis_names if one_device else self.axes),
            check_vma=False,
        )(parts, *others)
        return jax.tree.map(lambda x: x.sum(axis=0), totals), found
