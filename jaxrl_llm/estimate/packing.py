"""The work of a pass: micro-batches, tokens and attention of one replica's samples. No jax."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from jaxrl_llm.estimate.work import Model, Samples
from jaxrl_llm.learner.row_length import row_length
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import (
    expert_matmuls,
    experts_hit,
    num_parameters,
    shared_matmuls,
    wide_matmuls,
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one replica in one pass over its samples."""

    micro_batches: int
    tokens: int  # computed by the layers, padding included
    targets: int  # tokens for which the head computes logits
    pairs: float  # (query, key) pairs of causal attention, padding included
    row_tokens: int  # tokens of one micro-batch


def rows_of(model: Model, samples: Samples, *, share_prompts: bool) -> Rows:
    """Cut samples by a model's settings: packed rows, or a padded row for each sample."""
    if row := model.rows.micro_batch_tokens:
        longest = samples.longest_prompt + samples.longest_response
        return _packed(samples, row_length(row, samples.count * longest), share_prompts)
    return _padded(samples, model.rows.micro_batch_size)


def _padded(samples: Samples, rows: int) -> Rows:
    """Each sample in a row of the longest prompt and response."""
    length = samples.longest_prompt + samples.longest_response
    rows = min(rows or samples.count, samples.count)
    return Rows(
        micro_batches=math.ceil(samples.count / rows),
        tokens=samples.count * length,
        targets=samples.count * samples.longest_response,
        pairs=samples.count * length**2 / 2,
        row_tokens=rows * length,
    )


def _packed(samples: Samples, row: int, share: bool) -> Rows:
    """Samples in their order, in rows of `row` tokens; a prompt stands once where it is shared."""
    prompts = tuple(samples.prompts.tolist())
    return _packed_lengths(prompts, samples.responses.astype(int).tobytes(), row, share)


@cache  # the layouts of a search share few numbers of replicas
def _packed_lengths(prompts: tuple[int, ...], responses: bytes, row: int, share: bool) -> Rows:
    by_prompt = np.frombuffer(responses, int).reshape(len(prompts), -1).tolist()
    rows, used, pairs = 1, 0, 0.0
    for prompt, lengths in zip(prompts, by_prompt, strict=True):
        here = False
        for response in lengths:
            needed = response + (0 if here else prompt)
            if used + needed > row:
                rows, used, here = rows + 1, 0, False
                needed = response + prompt
            used += needed
            pairs += prompt * response + response**2 / 2 + (0 if here else prompt**2 / 2)
            here = share
    return Rows(
        micro_batches=rows,
        tokens=rows * row,
        targets=sum(map(sum, by_prompt)),
        pairs=pairs,
        row_tokens=row,
    )


def layer_weights(config: ModelConfig, experts: float | None = None) -> float:
    """Parameters of the matmuls of a layer, their mean; with so many of its experts, or all."""
    if experts is None:
        experts = 0 if config.mixture is None else config.mixture.num_experts
    chosen = experts * expert_matmuls(config)
    alike = config.delta is None and not config.num_leading_layers
    if alike:
        return shared_matmuls(config, 0) + chosen
    every = sum(shared_matmuls(config, i) for i in range(config.num_layers))
    return (every + config.num_expert_layers * chosen) / config.num_layers


def wide_weights(config: ModelConfig) -> float:
    """`layer_weights` that generation in float8 has in the model's dtype."""
    return sum(wide_matmuls(config, i) for i in range(config.num_layers)) / config.num_layers


def expert_rows(config: ModelConfig, tokens: float) -> float:
    """Rows of each expert in a grouped matmul over so many tokens, with even loads."""
    mixture = config.mixture
    return tokens * mixture.experts_per_token / mixture.num_experts if mixture else 0.0


def gathered_weights(config: ModelConfig, experts: int) -> float:
    """`layer_weights` that a device gathers where `experts` devices share the experts."""
    shared = layer_weights(config, 0)
    return shared + (layer_weights(config) - shared) / experts


def layer_outputs(config: ModelConfig) -> float:
    """Features that the projections of a layer have as outputs, their mean; each expert's too."""
    heads = config.num_heads + 2 * config.num_kv_heads
    outputs = heads * config.head_dim + 2.0 * config.intermediate_size + 2.0 * config.hidden_size
    mixture = config.mixture
    if mixture is None:
        return outputs
    each = 2.0 * mixture.expert_size + config.hidden_size
    return outputs + mixture.num_experts * each * config.num_expert_layers / config.num_layers


def expert_weights(config: ModelConfig) -> float:
    """Parameters of the experts of all layers; 0 without a mixture."""
    mixture = config.mixture
    if mixture is None:
        return 0.0
    size = 3.0 * config.hidden_size * mixture.expert_size
    return config.num_expert_layers * mixture.num_experts * size


def active_weights(config: ModelConfig) -> float:
    """`layer_weights` that one token is multiplied with."""
    mixture = config.mixture
    return layer_weights(config, None if mixture is None else mixture.experts_per_token)


def read_weights(config: ModelConfig, tokens: float) -> float:
    """`layer_weights` that a step of so many tokens reads, with tokens spread over all experts."""
    mixture = config.mixture
    return layer_weights(config, None if mixture is None else experts_hit(mixture, tokens))


def head_weights(model: Model) -> float:
    """Parameters of the head's matmul."""
    rows = model.config.vocab_size if model.kind == "causal_lm" else 1
    return rows * model.config.hidden_size


def learned_parameters(model: Model) -> float:
    """The parameters that an update changes."""
    return model.adapters or stored_parameters(model)


def stored_parameters(model: Model) -> float:
    """All parameters of a model: layers, embedding and head; without adapters."""
    config = model.config
    if model.kind == "causal_lm":
        return num_parameters(config)
    return num_parameters(replace(config, tie_word_embeddings=True)) + head_weights(model)
