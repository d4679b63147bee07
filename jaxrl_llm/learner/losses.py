"""The losses of online RL: a forward pass joined to functions of `algorithms/`.

Counts (`tokens`, `sequences`) are taken over the whole global mini-batch. They travel in the batch
as arrays with one entry a row, because every micro-batch must see the same counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.aggregation import global_counts, prompt_weights, reads_prompts
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.fields import (
    COMPUTED_FROM,
    UPDATE_FIELDS,
    check_metric_name,
    field_names,
    pair_of,
)
from jaxrl_llm.algorithms.kl import masked_kl
from jaxrl_llm.algorithms.sample_masks import learned_tokens
from jaxrl_llm.arguments import is_zero
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    attention_work,
    response_scores,
    response_statistics,
    response_token_scores,
    response_values,
)
from jaxrl_llm.learner.router_losses import ROUTER_METRICS, RouterLoss
from jaxrl_llm.learner.rows import KEPT, SAMPLE_ROWS, Fields, rows_of
from jaxrl_llm.learner.train_state import Metrics, Params
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.media import media_fields

# Metrics of an optimizer step itself; its loss has metrics of its own.
BUBBLE = "pipeline_bubble"  # share of the ticks in which a stage of the pipeline idles
STEP_METRICS = ("grad_norm", "lr", "micro_batches", "row_use", "attention_balance", BUBBLE)
STEP_METRICS += ROUTER_METRICS
NONFINITE = "nonfinite_gradients"  # one bool a parameter; `check_gradients` turns it into names
_OF_STEP = (NONFINITE, *STEP_METRICS)
# Outputs of a user's model, in the names of its loss's parameters.
OWN_OUTPUTS = ("logprobs", "new_scores", "new_token_scores")
TAKEN = {"loss", *_OF_STEP, *(f"{role}/{n}" for role in ("actor", "critic") for n in _OF_STEP)}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["algorithm", "router"],
    meta_fields=[
        *("spec", "settings", "temperature", "own_logprobs", "with_log_ratios"),
        *("replays", "masks"),
    ],
)
@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The actor's loss: policy loss, entropy bonus and KL term, each aggregated the same way.

    `own_logprobs` is for the only step on its samples. The step then computes
    the old log-probs itself. The loss returns them and the entropies, [B, R], with its metrics.
    `with_log_ratios` returns the log-ratios of the policy to the one that the loss compares with.
    """

    algorithm: Algorithm
    spec: ModelSpec
    settings: ForwardSettings
    temperature: float
    own_logprobs: bool = False
    with_log_ratios: bool = False
    router: RouterLoss = RouterLoss()  # losses of the routers of a mixture of experts
    replays: tuple[str, ...] = ()  # fields of a rollout that the forward pass repeats
    masks: bool = False  # samples may be left out

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the loss needs."""
        algorithm = self.algorithm
        reads = _reads(algorithm.policy_loss, algorithm.kl_loss)
        reads = (*reads, *_mask_fields(algorithm, self.masks), *_group_fields(algorithm))
        reads = (*dict.fromkeys(reads), *self.replays, *media_fields(self.spec.config.vision))
        if self.own_logprobs:
            reads = tuple(dict.fromkeys((*reads, "rollout_logprobs")))
            reads = tuple(name for name in reads if name != "old_logprobs")
        return reads

    def inputs(self, mini_batch: Fields, first: bool | Array) -> Fields:
        """The mini-batch with its counts; see `with_counts`."""
        return with_counts(mini_batch, first, prompts=reads_prompts(self.algorithm.aggregate))

    def __call__(self, params: Params, part: Fields) -> tuple[Array, Any]:
        """The part's contribution to the loss, and metrics."""
        algorithm = self.algorithm
        reads = field_names(algorithm.policy_loss)
        rows = rows_of(part, self.settings.align)
        uses_entropy = not is_zero(algorithm.entropy_coef) or "entropy" in reads
        statistics = response_statistics(
            params,
            rows,
            spec=self.spec,
            settings=self.settings,
            temperature=self.temperature,
            with_entropy=uses_entropy or self.own_logprobs,
            candidates=part["teacher_top_ids"] if "top_logprobs" in reads else None,
            kept=part.get(KEPT),
        )
        logprobs, entropy, top = statistics.logprobs, statistics.entropy, statistics.at_candidates
        counts, mask = _counts(part), _loss_mask(part)
        current = part | {"logprobs": logprobs, "mask": mask}
        if entropy is not None:
            current["entropy"] = entropy
        if top is not None:
            current["top_logprobs"] = top
        kl_reads = () if algorithm.kl_loss is None else field_names(algorithm.kl_loss)
        if "old_logprobs" in (*reads, *kl_reads):
            # Before the first update, old and current log-probs are the same function of the same
            # parameters. Two compilations of it may differ in the last bit; the ratio must not.
            # Later mini-batches pack the samples into other rows, which rounds otherwise: without
            # any change of the policy, their ratios are 1 +- 2e-6 in float32.
            own = jax.lax.stop_gradient(logprobs)
            current["old_logprobs"] = (
                own
                if self.own_logprobs
                else jnp.where(part["unchanged"], own, part["old_logprobs"])
            )
        result = algorithm.policy_loss(*(current[name] for name in reads))
        per_token, parts = pair_of("policy_loss", result, mask, metrics=True)
        total = algorithm.aggregate(per_token, mask, **counts)
        metrics = {"actor/pg_loss": total}
        if uses_entropy:
            assert entropy is not None
            bonus = algorithm.aggregate(entropy, mask, **counts)
            total = total - algorithm.entropy_coef * bonus
            metrics["actor/entropy_loss"] = bonus
        if algorithm.kl_loss is not None:
            kl = masked_kl(algorithm.kl_loss, current, mask)
            term = algorithm.aggregate(kl, mask, **counts)
            total = total + algorithm.kl_loss_coef * term
            metrics["actor/kl_loss"] = term
        if statistics.routed is not None:
            share = mask.sum() / jnp.maximum(counts["global_tokens"], 1)
            term, router_metrics = self.router(statistics.routed, share)
            total, metrics = total + term, metrics | router_metrics
        metrics |= attention_work(rows, self.spec, self.settings)
        metrics = _joined(metrics, _token_means(parts, mask, counts["global_tokens"]))
        if self.own_logprobs:
            return total, (metrics, (logprobs, entropy))
        if self.with_log_ratios:
            compared = current["old_logprobs" if "old_logprobs" in reads else "rollout_logprobs"]
            return total, (metrics, jax.lax.stop_gradient(logprobs - compared))
        return total, metrics


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["algorithm"],
    meta_fields=["spec", "settings", "masks", "replays"],
)
@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The critic's loss, aggregated as the policy's is."""

    algorithm: Algorithm
    spec: ModelSpec
    settings: ForwardSettings
    masks: bool = False  # samples may be left out
    replays: tuple[str, ...] = ()  # fields of a rollout that the forward pass repeats

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the loss needs."""
        fields = (*_mask_fields(self.algorithm, self.masks), *_group_fields(self.algorithm))
        fields = (*fields, *self.replays, *media_fields(self.spec.config.vision))
        return tuple(dict.fromkeys((*_reads(self.algorithm.value_loss), *fields)))

    def inputs(self, mini_batch: Fields, first: bool | Array) -> Fields:
        """The mini-batch with its counts; see `with_counts`."""
        return with_counts(mini_batch, first, prompts=reads_prompts(self.algorithm.aggregate))

    def __call__(self, params: Params, part: Fields) -> tuple[Array, Metrics]:
        """The part's contribution to the loss, and metrics."""
        value_loss = self.algorithm.value_loss
        assert value_loss is not None
        rows = rows_of(part)
        new_values = response_values(params, rows, spec=self.spec, settings=self.settings)
        counts, mask = _counts(part), _loss_mask(part)
        current = part | {"new_values": new_values, "mask": mask}
        result = value_loss(*(current[name] for name in field_names(value_loss)))
        per_token, parts = pair_of("value_loss", result, mask, metrics=True)
        total = self.algorithm.aggregate(per_token, mask, **counts)
        means = _token_means(parts, mask, counts["global_tokens"])
        work = attention_work(rows, self.spec, self.settings)
        return total, _joined({"critic/vf_loss": total} | work, means)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["function"],
    meta_fields=["role", "spec", "settings", "temperature", "masks", "replays"],
)
@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """The loss of a user's model that learns: a mean over samples, or over their tokens.

    `function` takes fields by position, and the model's outputs: `logprobs` [B, R] of a language
    model, `new_scores` [B] and `new_token_scores` [B, R] of a scalar one. It returns a loss of
    shape [B] or [B, R], and metrics of the same shape.
    """

    function: Callable[..., Any]
    role: str
    spec: ModelSpec
    settings: ForwardSettings
    temperature: float
    masks: bool = False  # samples may be left out
    replays: tuple[str, ...] = ()  # fields of a rollout that the forward pass repeats

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the loss needs."""
        own = [name for name in field_names(self.function) if name not in OWN_OUTPUTS]
        own += ["sample_mask"] if self.masks else []
        media = media_fields(self.spec.config.vision)
        return tuple(dict.fromkeys((*SAMPLE_ROWS, "mask", *own, *self.replays, *media)))

    def inputs(self, mini_batch: Fields, first: bool | Array) -> Fields:
        """The mini-batch with its counts; see `with_counts`."""
        return with_counts(mini_batch, first)

    def __call__(self, params: Params, part: Fields) -> tuple[Array, Metrics]:
        """The part's contribution to the loss, and metrics."""
        rows, names = rows_of(part, self.settings.align), field_names(self.function)
        how: Any = {"spec": self.spec, "settings": self.settings}
        mask, current = _loss_mask(part), dict(part)
        current["mask"] = mask
        if self.spec.kind == "causal_lm":
            statistics = response_statistics(params, rows, temperature=self.temperature, **how)
            current["logprobs"] = statistics.logprobs
        elif "new_token_scores" in names:
            each = response_token_scores(params, rows, **how)
            last = jnp.maximum(part["response_lengths"] - 1, 0)[:, None]
            current["new_token_scores"] = each
            current["new_scores"] = jnp.take_along_axis(each, last, axis=1)[:, 0]
        else:
            lengths = part["response_lengths"]
            current["new_scores"] = response_scores(params, rows, lengths, **how)
        loss, metrics = self.function(*(current[name] for name in names))
        counts, samples = _counts(part), mask.max(axis=1)
        wholes = {
            mask.shape: (mask, counts["global_tokens"]),
            samples.shape: (samples, counts["global_sequences"]),
        }
        taken, means = f"{self.role}/loss", {}
        for name, x in {taken: loss, **metrics}.items():
            if jnp.shape(x) not in wholes:
                raise ValueError(
                    f"the loss of config.models {self.role} returned {name!r} of shape "
                    f"{jnp.shape(x)}; it must be [B]={samples.shape} or [B, R]={mask.shape}"
                )
            weights, number = wholes[jnp.shape(x)]
            means[name] = jnp.where(weights > 0, x * weights, 0.0).sum() / jnp.maximum(number, 1)
        for name in metrics:
            own = {taken, *(f"{self.role}/{each}" for each in _OF_STEP)}
            check_metric_name(f"the loss of {self.role}", name, TAKEN | own)
        means |= attention_work(rows, self.spec, self.settings)
        return means[taken], means


def with_counts(fields: Fields, first: bool | Array, *, prompts: bool = False) -> Fields:
    """A mini-batch with its own counts, one entry a row; call it once a mini-batch.

    `first` says that the parameters have not changed since they gave `old_logprobs`. `prompts` adds
    the weights of an aggregation over prompts.
    """
    mask = _loss_mask(fields)
    rows = mask.shape[0]
    tokens, sequences = global_counts(mask)
    weights = {"prompt_weights": prompt_weights(mask, fields["group_ids"])} if prompts else {}
    return (
        fields
        | weights
        | {
            "num_tokens": jnp.full((rows,), tokens),
            "num_sequences": jnp.full((rows,), sequences),
            "unchanged": jnp.full((rows, 1), first),
        }
    )


def _reads(*functions: Callable[..., Any] | None) -> tuple[str, ...]:
    """The fields that a loss takes from the batch: rows, and the names of its functions."""
    named = [name for fn in functions if fn is not None for name in field_names(fn)]
    named += [field for name in named for field in COMPUTED_FROM.get(name, ())]
    return tuple(
        dict.fromkeys((*SAMPLE_ROWS, "mask", *(n for n in named if n not in UPDATE_FIELDS)))
    )


def _mask_fields(algorithm: Algorithm, masks: bool) -> tuple[str, ...]:
    """The fields that leave tokens out. A rejection rule has left out the samples already."""
    if algorithm.rejection is not None:
        return ("loss_mask",)
    return ("sample_mask",) if masks else ()


def _group_fields(algorithm: Algorithm) -> tuple[str, ...]:
    """The field of an aggregation over prompts."""
    return ("group_ids",) if reads_prompts(algorithm.aggregate) else ()


def _loss_mask(fields: Fields) -> Array:
    """The tokens that count: all sampled ones, or the ones that no rejection rule excludes."""
    if "sample_mask" in fields:
        return learned_tokens(fields["mask"], fields["sample_mask"])
    return fields.get("loss_mask", fields["mask"])


def _counts(fields: Fields) -> dict[str, Array]:
    weights = {name: fields[name] for name in ("prompt_weights",) if name in fields}
    return weights | {
        "global_tokens": fields["num_tokens"][0],
        "global_sequences": fields["num_sequences"][0],
    }


def _joined(ours: Metrics, theirs: Metrics) -> Metrics:
    """Both. ValueError for a name that both have, or that is a metric of the step."""
    for name in theirs:
        check_metric_name("the loss", name, ours.keys() | TAKEN)
    return ours | theirs


def _token_means(metrics: Metrics, mask: Float[Array, "B R"], tokens: Array) -> Metrics:
    """Each per-token array summed over the mask and divided by the global token count."""
    return {name: (x * mask).sum() / jnp.maximum(tokens, 1) for name, x in metrics.items()}
