"""Latent attention with a cache of small vectors: a decode step gives what a whole row gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_config

from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.models.attention import Kept
from jaxrl_llm.models.config import Latent, Mixture
from jaxrl_llm.models.flops import forward_flops, kv_bytes_per_token
from jaxrl_llm.models.latent_attention import LatentAttention
from jaxrl_llm.models.layers import rope_tables
from jaxrl_llm.models.lora import Adapter, Lora
from jaxrl_llm.models.rope import YarnRope
from jaxrl_llm.models.shapes import SHAPES, active_parameters, num_parameters

LATENT = Latent(kv_rank=7, query_rank=5, rope_dim=4, value_dim=6)
CONFIG = tiny_config(
    "deepseek_v3",
    hidden_size=12,
    num_heads=3,
    num_kv_heads=3,
    head_dim=10,
    latent=LATENT,
    interleaved_rope=True,
    rope_scaling=YarnRope(
        factor=4.0, original_max_position_embeddings=4, mscale=0.7, mscale_all_dim=1.3
    ),
    mixture=Mixture(
        num_experts=2,
        experts_per_token=1,
        expert_size=4,
        normalized=False,
        scores="sigmoid",
        shared_size=4,
    ),
)
ADAPTED = Lora(rank=2, alpha=3.0, modules=frozenset({"kv_b_proj"}))
T = 6


def attend(q, k, v, cache, /, *, window):
    """Whole rows, or one token after a cache's, which holds what it is given."""
    assert q.shape[-1] in (9, 10, 11, 256)
    if cache is None:
        return attention_reference(q, k, v), None
    if isinstance(cache, Kept):
        return attention_reference(q, k, v), (cache.keys, cache.values)
    keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(cache, (k, v), strict=True))
    scores = jnp.einsum("BTNH,BSH->BNTS", q, keys[:, :, 0]) / np.sqrt(q.shape[-1])
    out = jnp.einsum("BNTS,BSH->BTNH", jax.nn.softmax(scores, axis=-1), values[:, :, 0])
    return out, (keys, values)


WIDE = replace(CONFIG, head_dim=134)  # whole rows are computed in heads of 256
ODD = replace(CONFIG, head_dim=9)  # 5 dims without rope and 4 with it


@pytest.mark.parametrize(
    ("config", "adapted"), [(CONFIG, False), (CONFIG, True), (WIDE, False), (ODD, False)]
)
def test_a_decode_step_equals_the_whole_row(config, adapted):
    kind = config.layer_kinds[0]
    layer = LatentAttention(config, LATENT, kind=kind, form="separate", dtype="float32")
    if adapted:
        kernel = layer.kv_b.kernel
        layer.kv_b.adapter = Adapter(kernel.shape, kernel.get_metadata()["axes"], 1, ADAPTED)
    graphdef, state = nnx.split(layer)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    x = jnp.asarray(rng.normal(size=(2, T, 12)), jnp.float32)
    rope = rope_tables(config, jnp.arange(T)[None])

    @jax.jit
    def run(state, x):
        bound = nnx.merge(graphdef, state)
        whole, _ = bound(x, rope, None, attend)
        first, cache = bound(x[:, :-1], [table[:, :-1] for table in rope], (), attend)
        last, cache = bound(x[:, -1:], [table[:, -1:] for table in rope], cache, attend)
        return whole, jnp.concatenate([first, last], axis=1), cache

    whole, by_steps, cache = run(state, x)
    np.testing.assert_allclose(by_steps, whole, rtol=1e-4, atol=1e-4)
    assert [entry.shape for entry in cache] == [(2, T, 1, 11)] * 2
    assert CONFIG.cache_heads == (1, 11)


def test_the_published_shape_has_the_published_numbers():
    shape = SHAPES["deepseek-v3"]
    assert num_parameters(shape) == 671_026_419_200
    assert round(active_parameters(shape) / 1e9, 2) == 37.55  # of which 0.93 embed a token
    assert kv_bytes_per_token(shape, 2) == 61 * 2 * (512 + 64) * 2
    # A query and key of 192 and a value of 128: 160 for both matmuls.
    pairs = 1000**2 - 999**2
    added = forward_flops(shape, [1000]) - forward_flops(shape, [999]) - forward_flops(shape, [1])
    np.testing.assert_allclose(added, 61 * 2 * 128 * 160 * (pairs - 1), rtol=1e-9)
