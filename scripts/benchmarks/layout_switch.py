"""The layout switch alone: weights from the training layout to the generation layout."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import Case, CheckFailed
from benchmarks.options import Options
from benchmarks.roofline import H200
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.layout import generation_layout, mesh_of, train_layout
from jaxrl_llm.distributed.reshard import switch_bytes, to_layout
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.models.base import init_sharded, model_spec
from jaxrl_llm.models.config import ModelConfig


class LayoutSwitch(Case):
    """Every weight of a shape, in the dtype of generation."""

    benchmark = "layout_switch"

    def __init__(self, shape: str, model: ModelConfig, config: Config) -> None:
        heads, own = model.num_kv_heads, config.mesh.generation.tensor
        mesh = mesh_of(config.mesh, [heads])
        sizes = {axis: getattr(config.mesh, axis) for axis in ("data", "fsdp", "tensor")}
        others = {"pipeline": config.mesh.pipeline, "sequence": config.mesh.sequence}
        sizes |= {name: n for name, n in (others | {"generation": own}).items() if n > 1}
        self.shape = shape
        self.name = "_".join(["switch", *(f"{axis}{size}" for axis, size in sizes.items())])
        self.spec = model_spec(model, dtype=config.rollout.dtype or config.actor.dtype)
        before, after = train_layout(mesh, heads), generation_layout(mesh, heads, tensor=own)
        layout = partial(shardings, self.spec.axes, self.spec.params, mesh)
        self.before, self.after = layout(before.rules), layout(after.rules)

    def lower(self) -> dict[str, jax.stages.Lowered]:
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self.spec.params,
            self.before,
        )
        switch = jax.jit(lambda params: to_layout(params, self.before, self.after))
        return {"main": switch.lower(abstract)}

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.program = programs["main"]
        self.params = init_sharded(self.spec, jax.random.key(0), self.before)

    def check(self) -> dict[str, float]:
        """Require that every bit arrives on every device."""
        moved = self.run()
        count = jax.jit(lambda old, new: jnp.sum(old != new))
        different = sum(map(int, jax.tree.leaves(jax.tree.map(count, self.params, moved))))
        if different:
            raise CheckFailed(f"{different} values are not those that were there before")
        return {"values changed": float(different)}

    def run(self) -> Any:
        return self.program(self.params)

    def figures(self, seconds: float) -> dict[str, float]:
        received = switch_bytes(self.spec.params, self.before, self.after)
        return {
            "GB received a device": received / 1e9,
            "GB/s into a device": received / seconds / 1e9,
            "fraction of 273 GB/s": received / seconds / H200.link,
        }


def layout_switch_cases(options: Options) -> Sequence[Case]:
    """One case a shape, on the mesh of the config."""
    return [
        LayoutSwitch(shape, model, options.config(shape)) for shape, model in options.shapes.items()
    ]
