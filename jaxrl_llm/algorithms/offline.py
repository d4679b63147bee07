"""The record of an offline algorithm, and the batch fields that its functions may name.

Positional parameters are fields and keyword-only parameters are settings. A kind of record has
groups of rows. Each group gives fields with one number a record, [B]:

| field | meaning |
|---|---|
| `<group>_logprobs` | log-prob of the completion, summed over its tokens |
| `<group>_lengths` | tokens of the completion, including its end token |
| `<group>_row_logprobs`, `<group>_row_lengths` | the same over prompt and completion |
| `<group>_scores` | score of a scalar model at the last token |
| `reference_<group>_logprobs` | `<group>_logprobs` under the reference model |

Further fields are the numbers of the kind, `weights` (0 for a record that only fills a batch) and
`baseline`. A field that no function names is not computed: without a `reference_...` field no
reference model is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.references import nearest

REFERENCE = "reference_"
BASELINE = "baseline"
LOGPROBS, SCORES = "_logprobs", "_scores"
LANGUAGE = (LOGPROBS, "_lengths", "_row_logprobs", "_row_lengths")  # fields of a language model


@dataclass(frozen=True, kw_only=True)
class RecordKind:
    """A kind of training record: its groups of rows and its numbers."""

    name: str  # as data/formats.py has it
    groups: tuple[str, ...]
    numbers: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that a function over records of this kind may name."""
        computed = [group + end for group in self.groups for end in (*LANGUAGE, SCORES)]
        reference = [REFERENCE + group + LOGPROBS for group in self.groups]
        return (*computed, *reference, *self.numbers, "weights", BASELINE)


PAIR = ("chosen", "rejected")

# If the fields of a function fit several kinds, the first is taken.
RECORD_KINDS = (
    RecordKind(name="examples", groups=("completion",)),
    RecordKind(name="preferences", groups=PAIR, numbers=("margins",)),
    RecordKind(name="unpaired", groups=("completion", "mismatched"), numbers=("labels",)),
    RecordKind(name="ratings", groups=("completion",), numbers=("ratings",)),
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "token_loss", "token_loss_coef", "baseline", "judge_pairs"],
    meta_fields=["by_sample"],
)
@dataclass(frozen=True, kw_only=True)
class OfflineAlgorithm:
    """The loss of an offline step, and the functions that it needs.

    It is the mean of `loss` over the records of the whole batch, plus `token_loss_coef` times the
    mean of `token_loss` over their tokens. Positional parameters of each function are fields.
    """

    # fields -> (loss [B], metrics). A metric is [B], or ([B], weights [B]) for a weighted mean
    loss: Callable[..., Any] | None = None
    # (<group>..._logprobs, <group>..._lengths) -> (loss summed over the tokens [B], tokens [B])
    token_loss: Callable[..., Any] | None = None
    token_loss_coef: float = 1.0
    # fields -> the field `baseline` [B]: over the whole batch, before the update, without gradient
    baseline: Callable[..., Any] | None = None
    # For a loss on labelled completions with pairs as held-out data: log-probs of both completions
    # under policy and reference -> additional metrics
    judge_pairs: Callable[..., Any] | None = None
    # Whether a record changes the loss of no other one of its micro-batch: see `Algorithm`.
    by_sample: bool = False

    def __post_init__(self) -> None:
        if self.loss is None and self.token_loss is None:
            raise ValueError("an OfflineAlgorithm needs a loss, a token_loss, or both")
        check_offline_fields(self.reads)
        if (BASELINE in self.reads) != (self.baseline is not None):
            raise ValueError(
                f"the field '{BASELINE}' is written by the function baseline and read by the loss: "
                "give both, or leave both out"
            )
        if self.baseline is not None and BASELINE in field_names(self.baseline):
            raise ValueError("baseline cannot read the field that it writes")
        if any(name.endswith(LANGUAGE) for name in self.reads) and self.model_kind == "scalar":
            raise ValueError(
                "the loss names scores and log-probs: a scalar model gives the first, a language "
                "model the second, and a run trains one of them"
            )
        if self.judge_pairs is not None:
            self._check_judge(self.judge_pairs)

    def _check_judge(self, judge: Callable[..., Any]) -> None:
        if self.records.name != "unpaired":
            raise ValueError(
                f"judge_pairs with a loss on {self.records.name}: it is for one on labelled "
                "completions (the field labels), which sees no pairs; leave it out"
            )
        own = [group + LOGPROBS for group in PAIR]
        known = [*own, *(REFERENCE + name for name in own)] if self.reads_reference else own
        unknown = [name for name in field_names(judge) if name not in known]
        if unknown:
            raise ValueError(
                f"judge_pairs asks for '{unknown[0]}'; it is given {', '.join(known)}"
                + ("" if self.reads_reference else ", and no loss of this run reads a reference")
            )

    @property
    def reads_reference(self) -> bool:
        """True if a function names a log-prob of the reference model."""
        return any(name.startswith(REFERENCE) for name in self.reads)

    @property
    def update_reads(self) -> tuple[str, ...]:
        """The fields of the losses; those that the learner computes have a gradient."""
        functions = [fn for fn in (self.loss, self.token_loss) if fn is not None]
        return tuple(dict.fromkeys(name for fn in functions for name in field_names(fn)))

    @property
    def reads(self) -> tuple[str, ...]:
        """Every field that a function names."""
        baseline = () if self.baseline is None else field_names(self.baseline)
        return tuple(dict.fromkeys((*self.update_reads, *baseline)))

    @property
    def records(self) -> RecordKind:
        """The kind of records to learn from: the first that has all fields."""
        return _kind_of(self.reads)

    @property
    def model_kind(self) -> Literal["causal_lm", "scalar"]:
        """The model to train: a scalar model for scores, else a language model."""
        return "scalar" if any(name.endswith(SCORES) for name in self.reads) else "causal_lm"


def groups_of(names: tuple[str, ...], kind: RecordKind, *, reference: bool = False) -> list[str]:
    """The groups whose rows the learner, or the reference, must read to compute `names`."""
    prefix = REFERENCE if reference else ""
    ends = (LOGPROBS,) if reference else (*LANGUAGE, SCORES)
    return [g for g in kind.groups if any(prefix + g + end in names for end in ends)]


def check_offline_fields(names: tuple[str, ...]) -> None:
    """Check that `names` are fields, and that one kind of record has all of them.

    Raises ValueError with the nearest field, before any device is touched.
    """
    known = list(dict.fromkeys(name for kind in RECORD_KINDS for name in kind.fields))
    for name in names:
        if name not in known:
            raise ValueError(
                f"the algorithm asks for the field '{name}', which offline records do not have"
                f"{nearest(name, known)}\nThe fields are {', '.join(known)}. A setting must be "
                "keyword-only (after *)."
            )
    _kind_of(names)


def _kind_of(names: tuple[str, ...]) -> RecordKind:
    for kind in RECORD_KINDS:
        if set(names) <= set(kind.fields):
            return kind
    shown = "; ".join(f"{k.name} has {', '.join((*k.groups, *k.numbers))}" for k in RECORD_KINDS)
    raise ValueError(f"no kind of record has all of the fields {', '.join(names)}: {shown}")
