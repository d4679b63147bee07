"""The simple peer of generation: a dense cache, one `lax.while_loop`, XLA attention.

Reads the work as JSON from stdin and prints a JSON object a case; scripts/benchmark.py generation
--baseline runs it. No kernels, no slots, no sharing of prompts: every row decodes until the longest
response is done. The prompts are prefilled in parts of PREFILL_ROWS rows. Qwen2 and Llama without
rope scaling. Nothing of jaxrl_llm is imported.

Shape letters: B rows, T tokens, D hidden, N query heads, K KV heads, G = N / K, H head dim,
S cache length, V vocabulary.
"""

import functools
import importlib.metadata
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
from jax import lax

BF16 = jnp.bfloat16
PREFILL_ROWS = 16


def main() -> None:
    work = json.load(sys.stdin)
    model = work["hf_config"]
    params = jax.jit(functools.partial(init, model))(jax.random.key(0))
    for case in work["cases"]:
        found: dict[str, Any] = {"peer": "naive_jax", "case": case["case"]}
        try:
            found |= measure(model, params, case, work["repeats"])
        except jax.errors.JaxRuntimeError as error:
            found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(found), flush=True)


def init(model: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Random weights; the three input projections and gate with up as one matrix each."""
    D, F, V = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    N, K, H = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]
    keys = iter(jax.random.split(key, 4 * model["num_hidden_layers"] + 2))

    def weight(*shape: int) -> jax.Array:
        return (0.02 * jax.random.normal(next(keys), shape)).astype(BF16)

    layers = [
        {
            "norm1": jnp.ones(D, BF16),
            "qkv": weight(D, (N + 2 * K) * H),
            "bias": jnp.zeros((N + 2 * K) * H, BF16),
            "out": weight(N * H, D),
            "norm2": jnp.ones(D, BF16),
            "gate_up": weight(D, 2 * F),
            "down": weight(F, D),
        }
        for _ in range(model["num_hidden_layers"])
    ]
    embed = weight(V, D)
    head = embed if model["tie_word_embeddings"] else weight(V, D)
    return {"layers": layers, "norm": jnp.ones(D, BF16), "embed": embed, "head": head}


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)).astype(BF16) * scale


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    angle = positions_BT[..., None, None] * theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(BF16)


def attend(q_BTNH: Any, k_BKSH: Any, v_BKSH: Any, positions_BT: Any) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=jnp.float32)
    visible = jnp.arange(S) <= positions_BT[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores * H**-0.5, -1e30), -1).astype(BF16)
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights, v_BKSH).reshape(B, T, N * H)


def forward(
    model: dict[str, Any], params: Any, tokens_BT: Any, cache: Any, first: Any
) -> tuple[jax.Array, Any]:
    """Logits of the last token, and the caches with the tokens' keys and values from `first` on."""
    N, K, H = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]
    B, T = tokens_BT.shape
    theta = model.get("rope_theta") or model["rope_parameters"]["rope_theta"]
    positions_BT = jnp.broadcast_to(first + jnp.arange(T), (B, T))
    x = params["embed"][tokens_BT]
    new_cache = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        h = norm(x, layer["norm1"], model["rms_norm_eps"]) @ layer["qkv"] + layer["bias"]
        q, k, v = jnp.split(h.reshape(B, T, N + 2 * K, H), [N, N + K], axis=2)
        q, k = rope(q, positions_BT, theta), rope(k, positions_BT, theta)
        start = (0, 0, first, 0)
        keys = lax.dynamic_update_slice(keys, k.swapaxes(1, 2), start)
        values = lax.dynamic_update_slice(values, v.swapaxes(1, 2), start)
        new_cache.append((keys, values))
        x = x + attend(q, keys, values, positions_BT) @ layer["out"]
        gate, up = jnp.split(
            norm(x, layer["norm2"], model["rms_norm_eps"]) @ layer["gate_up"], 2, -1
        )
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    last = norm(x[:, -1], params["norm"], model["rms_norm_eps"])
    logits = jnp.einsum("BD,VD->BV", last, params["head"], preferred_element_type=jnp.float32)
    return logits, new_cache


def draw(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = jnp.argmax(logits + jax.random.gumbel(key, logits.shape), -1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, -1)


def measure(model: Any, params: Any, case: Any, repeats: int) -> dict[str, Any]:
    """Seconds of each repeat after a warm-up, prefill included."""
    rows, prompt, longest = len(case["limits"]), case["prompt_length"], max(case["limits"])
    K, H = model["num_key_value_heads"], model["head_dim"]
    part = next(size for size in range(min(PREFILL_ROWS, rows), 0, -1) if rows % size == 0)

    @jax.jit
    def generate(params: Any, prompts: jax.Array, key: jax.Array) -> Any:
        shape = (part, K, prompt + longest, H)

        def prefill(tokens: jax.Array) -> Any:
            empty = [(jnp.zeros(shape, BF16), jnp.zeros(shape, BF16)) for _ in params["layers"]]
            return forward(model, params, tokens, empty, 0)

        parts = lax.map(prefill, prompts.reshape(-1, part, prompt))
        logits, cache = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), parts)
        token, logprob = draw(logits, jax.random.fold_in(key, 0))
        tokens = jnp.zeros((rows, longest), jnp.int32).at[:, 0].set(token)
        logprobs = jnp.zeros((rows, longest)).at[:, 0].set(logprob)

        def body(state: Any) -> Any:
            step, cache, token, tokens, logprobs = state
            logits, cache = forward(model, params, token[:, None], cache, prompt + step - 1)
            token, logprob = draw(logits, jax.random.fold_in(key, step))
            tokens, logprobs = tokens.at[:, step].set(token), logprobs.at[:, step].set(logprob)
            return step + 1, cache, token, tokens, logprobs

        first = (jnp.int32(1), cache, token, tokens, logprobs)
        return lax.while_loop(lambda state: state[0] < longest, body, first)[3:]

    distinct = jax.random.randint(
        jax.random.key(1), (case["prompts"], prompt), 0, model["vocab_size"], jnp.int32
    )
    prompts = jnp.repeat(distinct, case["samples"], axis=0)
    compiled = generate.lower(params, prompts, jax.random.key(0)).compile()
    jax.block_until_ready(compiled(params, prompts, jax.random.key(0)))
    seconds = []
    for repeat in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, prompts, jax.random.key(repeat + 1)))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "versions": {"jax": importlib.metadata.version("jax")}}


if __name__ == "__main__":
    main()
