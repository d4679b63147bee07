"""The loss of an offline algorithm: a forward pass over rows, one number a record, a mean.

Shape letters: B records, G groups of rows of a record, R predicted tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.fields import check_metric_name, field_names
from jaxrl_llm.algorithms.offline import (
    REFERENCE,
    OfflineAlgorithm,
    groups_of,
)
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    attention_work,
    response_scores,
    response_statistics,
)
from jaxrl_llm.learner.losses import TAKEN
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.learner.rows import ROWS, SAMPLE_ROWS, Fields, Rows, padded_rows
from jaxrl_llm.learner.train_state import Metrics, Params
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.experts import Routed
from jaxrl_llm.types import IMAGE_FIELDS, OFFLINE_FIELDS, TokenBatch

WEIGHT = "weight of "  # metric names that begin so hold what the metric of that name is divided by
NUM_RECORDS, NUM_TOKENS = "num_records", "num_tokens"
LOSS, TOKEN_LOSS = "record_loss", "nll_loss"  # names of sums; the second is also a metric
_TAKEN = {*TAKEN, LOSS, TOKEN_LOSS, "learning_rate"}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["algorithm", "router"],
    meta_fields=["spec", "settings"],
)
@dataclass(frozen=True, kw_only=True)
class RecordLoss:
    """The loss of a train step on records.

    Its metrics are sums with their weights; `means` divides them once all micro-batches are added.
    """

    algorithm: OfflineAlgorithm
    spec: ModelSpec
    settings: ForwardSettings
    router: RouterLoss = RouterLoss()  # losses of the routers; evaluations leave them out

    @property
    def groups(self) -> list[str]:
        """The groups of rows that the learner sees."""
        return groups_of(self.algorithm.update_reads, self.algorithm.records)

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the loss needs."""
        reads = (name for name in self.algorithm.update_reads if name in OFFLINE_FIELDS)
        return tuple(dict.fromkeys((*self.groups, "weights", "index", *reads)))

    def inputs(self, mini_batch: Any, first: bool | Array = True) -> Fields:
        """Rows, numbers, and the counts of the whole mini-batch, an `OfflineBatch` or its fields.

        `first` changes nothing: no loss on records compares with the parameters before the step.
        """
        fields = row_fields(mini_batch, self.groups)
        for name in ("weights", *self.algorithm.update_reads):
            if name in OFFLINE_FIELDS:
                fields[name] = mini_batch[name]
        return with_record_counts(fields, self.algorithm, self.groups)

    def __call__(self, params: Params, part: Fields) -> tuple[Array, Metrics]:
        """The part's contribution to the loss, and sums of metrics."""
        sums, routed = self._sums(params, part)
        total, router_metrics = jnp.float32(0), {}
        if routed is not None:
            share = self._weights(part).sum() / jnp.maximum(part[NUM_RECORDS][0], 1.0)
            total, router_metrics = self.router(routed, share)
        if self.algorithm.loss is not None:
            total += sums[LOSS] / jnp.maximum(part[NUM_RECORDS][0], 1.0)
        if self.algorithm.token_loss is not None:
            mean = sums[TOKEN_LOSS] / jnp.maximum(part[NUM_TOKENS][0], 1.0)
            total += self.algorithm.token_loss_coef * mean
        rows, _ = _rows(part, len(self.groups))
        work = attention_work(rows, self.spec, self.settings)
        return total, jax.lax.stop_gradient(sums) | work | router_metrics

    def sums(self, params: Params, part: Fields) -> Metrics:
        """Sums over the records of a part: losses, metrics, and their weights (`WEIGHT`)."""
        return self._sums(params, part)[0]

    def _weights(self, part: Fields) -> Array:
        """The weights of the records, 0 for records outside of the part."""
        weights = part["weights"]
        return weights * part[ROWS].included if ROWS in part else weights

    def _sums(self, params: Params, part: Fields) -> tuple[Metrics, Routed | None]:
        algorithm = self.algorithm
        computed, routed = routed_fields(
            params,
            part,
            self.groups,
            algorithm.update_reads,
            spec=self.spec,
            settings=self.settings,
        )
        current, weights = part | computed, self._weights(part)
        sums: Metrics = {}
        if algorithm.loss is not None:
            values, metrics = algorithm.loss(*(current[n] for n in field_names(algorithm.loss)))
            for name in metrics:
                check_metric_name("the loss", name, _TAKEN)
            sums |= weighted_sums({LOSS: values} | metrics, weights)
        if algorithm.token_loss is not None:
            named = field_names(algorithm.token_loss)
            values, counts = algorithm.token_loss(*(current[n] for n in named))
            sums[TOKEN_LOSS] = (values * weights).sum()
            sums[WEIGHT + TOKEN_LOSS] = (counts * weights).sum()
        return sums, routed


def row_fields(batch: Any, groups: Sequence[str]) -> Fields:
    """The rows of `groups` as fields of a forward pass: [B, ...], or [B, G, ...] of several."""
    stacked = [group_fields(batch[group]) for group in groups]
    if len(stacked) == 1:
        return stacked[0]
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *stacked)


def group_fields(rows: TokenBatch) -> Fields:
    """The rows of one group: the first token of a row is its prompt, all others are predicted."""
    return {
        "prompts": rows.tokens[:, :1],
        "prompt_lengths": jnp.minimum(rows.lengths, 1),
        "responses": rows.tokens[:, 1:],
        "response_lengths": jnp.maximum(rows.lengths - 1, 0),
        "mask": rows.loss_mask[:, 1:],
        **{name: x for name in IMAGE_FIELDS if (x := getattr(rows, name)) is not None},
    }


def with_record_counts(
    fields: Fields, algorithm: OfflineAlgorithm, groups: Sequence[str]
) -> Fields:
    """The fields of a whole batch with its counts, one entry a record, for its micro-batches."""
    weights = fields["weights"]
    tokens = jnp.float32(0)
    if algorithm.token_loss is not None:
        named = field_names(algorithm.token_loss)
        known = _lengths(fields, groups)
        _, counts = algorithm.token_loss(*(known.get(name, weights) for name in named))
        tokens = (counts * weights).sum()
    return fields | {
        NUM_RECORDS: jnp.full_like(weights, weights.sum()),
        NUM_TOKENS: jnp.full_like(weights, tokens),
    }


def record_fields(
    params: Params,
    fields: Fields,
    groups: Sequence[str],
    names: Sequence[str],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Fields:
    """A model's results for the rows of `groups`: `<group>_logprobs` and the like, [B] each.

    A scalar model gives scores, a language model sums of log-probs. Sums over whole rows are
    computed only where `names` ask for them.
    """
    return routed_fields(params, fields, groups, names, spec=spec, settings=settings)[0]


def routed_fields(
    params: Params,
    fields: Fields,
    groups: Sequence[str],
    names: Sequence[str],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> tuple[Fields, Routed | None]:
    """`record_fields`, and what the routers of a language model with experts did."""
    rows, flat = _rows(fields, len(groups))
    if spec.kind == "scalar":
        lengths = flat["response_lengths"]
        scores = response_scores(params, rows, lengths, spec=spec, settings=settings)
        return _by_group(scores, groups, "_scores"), None
    computed = response_statistics(params, rows, spec=spec, settings=settings)
    logprobs = computed.logprobs
    sums = _by_group((logprobs * flat["mask"]).sum(axis=1), groups, "_logprobs")
    if any(name.endswith("_row_logprobs") for name in names):
        whole = (logprobs * _row_mask(flat)).sum(axis=1)
        sums |= _by_group(whole, groups, "_row_logprobs")
    return sums | _lengths(fields, groups), computed.routed


def weighted_sums(metrics: dict[str, Any], weights: Float[Array, " B"]) -> Metrics:
    """Sums of metrics, each one value a record or (values, weights), and of their weights."""
    sums: Metrics = {}
    for name, metric in metrics.items():
        values, share = metric if isinstance(metric, tuple) else (metric, jnp.ones_like(weights))
        share *= weights
        # Where nothing counts, the value may be anything, also not finite.
        sums[name] = jnp.where(share > 0, values * share, 0.0).sum()
        sums[WEIGHT + name] = share.sum()
    return sums


def means(algorithm: OfflineAlgorithm, sums: dict[str, Any]) -> dict[str, Any]:
    """`weighted_means` of `RecordLoss.sums` that were added up; `loss` comes first."""
    out: dict[str, Any] = {"loss": 0.0} | weighted_means(sums)
    coefs = {LOSS: 1.0, TOKEN_LOSS: algorithm.token_loss_coef}
    out["loss"] = sum(coef * out[name] for name, coef in coefs.items() if name in out)
    out.pop(LOSS, None)
    if algorithm.loss is None:
        out.pop(TOKEN_LOSS)  # it is the loss
    if "rewards/chosen" in out and "rewards/margins" not in out:
        out["rewards/margins"] = out["rewards/chosen"] - out["rewards/rejected"]
    return out


def weighted_means(sums: dict[str, Any]) -> dict[str, Any]:
    """Weighted means of `weighted_sums` that were added up; other entries stay.

    A metric whose weights sum to 0 is 0, e.g. of the desirable records of a batch without any.
    """
    out: dict[str, Any] = {}
    for name, value in sums.items():
        if not name.startswith(WEIGHT):
            weight = sums.get(WEIGHT + name)
            out[name] = value if weight is None else value / jnp.maximum(weight, 1e-9)
    return out


def reference_fields(logprobs: Fields) -> Fields:
    """`<group>_logprobs` renamed to the reference's fields."""
    return {REFERENCE + name: x for name, x in logprobs.items() if name.endswith("_logprobs")}


def _rows(fields: Fields, num_groups: int) -> tuple[Rows, Fields]:
    """The rows of a part of a batch, and its row fields with one entry a row."""
    media = [name for name in IMAGE_FIELDS if name in fields]
    flat = {name: fields[name] for name in (*SAMPLE_ROWS, "mask", *media)}
    if ROWS in fields:
        return fields[ROWS].with_images(flat), flat
    if num_groups > 1:
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in flat.items()}
    prompts, prompt_lengths, responses, lengths = (flat[name] for name in SAMPLE_ROWS)
    rows = padded_rows(prompts, prompt_lengths, responses, response_lengths=lengths)
    return rows.with_images(flat), flat


def _row_mask(flat: Fields) -> Float[Array, "B R"]:
    """1 for every predicted token of the row; tokens of the prompt are included."""
    position = jnp.arange(flat["responses"].shape[1])
    return (position < flat["response_lengths"][:, None]).astype(jnp.float32)


def _by_group(values: Float[Array, " N"], groups: Sequence[str], end: str) -> Fields:
    by_group = values.reshape(-1, len(groups))
    return {group + end: by_group[:, i] for i, group in enumerate(groups)}


def _lengths(fields: Fields, groups: Sequence[str]) -> Fields:
    lengths = fields["mask"].sum(axis=-1).reshape(-1)
    rows = fields["response_lengths"].astype(jnp.float32).reshape(-1)
    return _by_group(lengths, groups, "_lengths") | _by_group(rows, groups, "_row_lengths")
