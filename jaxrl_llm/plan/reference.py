"""The reference model: a copy of the policy, made at the start and, by choice, every few steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.arguments import seed_of
from jaxrl_llm.distributed.multihost import make_global
from jaxrl_llm.distributed.sharding import replicated
from jaxrl_llm.distributed.transfer import call, moved
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.frozen import dequantized
from jaxrl_llm.plan.roles import Role


@dataclass(frozen=True)
class Making:
    """Makes a role's parameters from another role's, where the role keeps its own."""

    make: Callable[..., Params]
    role: Role

    def __call__(self, params: Params, seed: int | None = None) -> Params:
        """The parameters of the role. Every process calls it. `make` also gets the seed, if any."""
        role = self.role
        (here,) = {x.sharding.mesh for x in jax.tree.leaves(params)}
        seeds = () if seed is None else (make_global(seed_of(seed), replicated(here)),)
        if here == role.mesh:
            return call(self._in_place, (params, *seeds), role.mesh)
        return jax.tree.map(moved, self._elsewhere(params, *seeds), role.param_shardings)

    @cached_property
    def _in_place(self) -> Any:
        return jax.jit(self.make, out_shardings=self.role.param_shardings)

    @cached_property
    def _elsewhere(self) -> Any:
        return jax.jit(self.make)


def copying(role: Role) -> Making:
    """Copies the policy's parameters as the reference stores them."""
    return Making(partial(_copy, role.spec), role)


def _copy(spec: ModelSpec, params: Params) -> Params:
    # Without the copy, what is not cast would be the same buffers.
    dense = dequantized(params, spec.dtype)
    return jax.tree.map(jnp.copy, cast(dense, spec.dtype, spec.float32_head))


@dataclass(frozen=True)
class Refresh:
    """Moves the reference towards the policy: alpha * policy + (1 - alpha) * reference.

    TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656; TRL's `sync_ref_model`.
    """

    role: Role  # the reference
    alpha: float

    def __call__(self, reference: Params, policy: Params) -> Params:
        """The new reference; the old one is consumed where both are mixed."""
        copy = self._copying(policy)
        if self.alpha == 1.0:
            return copy
        return call(self._mixing, (reference, copy), self.role.mesh)

    @cached_property
    def _copying(self) -> Making:
        return copying(self.role)

    @cached_property
    def _mixing(self) -> Any:
        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            old32, new32 = old.astype(jnp.float32), new.astype(jnp.float32)
            return ((1.0 - self.alpha) * old32 + self.alpha * new32).astype(old.dtype)

        return jax.jit(
            partial(jax.tree.map, one),
            donate_argnums=(0,),
            out_shardings=self.role.param_shardings,
        )
