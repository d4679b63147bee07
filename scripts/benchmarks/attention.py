"""Attention kernels alone: whole rows, packed rows of uneven lengths, and decoding.

Shape letters: B rows, T tokens of a row, N query heads, K KV heads, H head dim, R checked rows, Q
checked queries of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import decode_cases
from benchmarks.harness import Case, poison, relative_error, require
from benchmarks.options import Options
from benchmarks.roofline import H200
from benchmarks.workloads import packed_groups, packed_lengths
from jaxrl_llm.kernels.flash_attention import Implementation, attention
from jaxrl_llm.kernels.flash_attention.visibility import packed_visibility
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import attention_flops

# Relative L2 errors against float32 on the same bf16 inputs.
MOST_OUTPUT_ERROR = 1e-2
MOST_GRADIENT_ERROR = 1e-2
NUM_CHECKED = 64  # queries of a row, anywhere in it
NUM_CHECKED_ROWS = 4  # the first, the last and between
XLA_LONGEST = 4096  # XLA keeps T * T scores of every head
LONG_ENOUGH_S = 0.05  # seconds of queued calls, so that dispatch is hidden


Who = tuple[str, Implementation]  # a label and its implementation


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows of one case. `starts` [B, T] is the first key that each token sees."""

    rows: int
    tokens: int
    lengths: tuple[int, ...]  # length of every sequence: the useful work
    starts: np.ndarray
    real: tuple[int, ...]  # tokens of each row that are not padding
    segment_ids: np.ndarray | None = None  # [B, T], of packed rows
    prefix_ids: np.ndarray | None = None  # [B, T], where segments also see another segment
    # [B, T, 2]: first key, and one past the last, of the other segment that each token sees.
    prefixes: np.ndarray | None = None
    again: tuple[int, ...] = ()  # prompt tokens that `lengths` counts repeatedly: no useful work
    row_lengths: np.ndarray | None = None  # [B], of padded rows that pass their lengths
    window: int | None = None


class Attention(Case):
    """One implementation on one layout, forward alone or with the backward pass."""

    benchmark = "attention"
    min_seconds = LONG_ENOUGH_S

    def __init__(
        self,
        shape: str,
        name: str,
        who: str,
        model: ModelConfig,
        reference: "Reference",
        implementation: Implementation,
        backward: bool,
    ) -> None:
        self.shape, self.who, self.backward = shape, who, backward
        self.reference, self.layout = reference, reference.layout
        self.name = f"{name}_{'fwdbwd' if backward else 'fwd'}"
        self.model = model
        self.implementation: Implementation = implementation

    def lower(self) -> dict[str, jax.stages.Lowered]:
        arrays = jax.eval_shape(self._arrays)
        main = jax.jit(self._call).lower(*arrays)
        self.results = main.out_info
        return {"main": main, "reference": self.reference.lower(*arrays[:4])}

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.programs = programs
        self.inputs = jax.jit(self._arrays)()

    def check(self) -> dict[str, float]:
        """Compare a few queries of some rows with float32; then require finite results of all.

        The results lie in memory that held NaN, so unwritten values are found.
        """
        errors = self._compare()
        poison(self.results)
        finite = all(bool(jnp.isfinite(x).all()) for x in self.run())
        require("not finite", float(not finite), 0.0)
        return errors

    def _compare(self) -> dict[str, float]:
        """Errors with cotangents for the checked queries only; the others must get no gradient."""
        q, k, v, do, *masks = self.inputs
        rows_R, checked_RQ = self.reference.rows, self.reference.checked
        checked = (rows_R[:, None], checked_RQ)
        sparse = jnp.zeros_like(do).at[checked].set(do[checked])
        poison(self.results)
        out, *gradients = self.programs["main"](q, k, v, sparse, *masks)
        expected, *expected_gradients = self.programs["reference"](q, k, v, do)
        require("output not finite", float(~jnp.isfinite(out).all()), 0.0)
        errors = {"output_error": _worst_error(out[checked], expected)}
        require("output_error", errors["output_error"], MOST_OUTPUT_ERROR)
        for name, ours, theirs in zip("qkv", gradients, expected_gradients, strict=False):
            compared = checked if name == "q" else (rows_R,)
            errors[f"d{name}_error"] = _worst_error(ours[compared], theirs)
            require(f"d{name}_error", errors[f"d{name}_error"], MOST_GRADIENT_ERROR)
            others = jnp.abs(ours.at[compared].set(0)).max()
            require(f"d{name} without a cotangent", float(others), 0.0)
        return errors

    def run(self) -> Any:
        return self.programs["main"](*self.inputs)

    def figures(self, seconds: float) -> dict[str, float]:
        N, H = self.model.num_heads, self.model.head_dim
        lengths = self.layout.lengths
        window = self.layout.window
        useful = attention_flops(N, H, lengths, window=window, backward=self.backward)
        useful -= attention_flops(N, H, self.layout.again, backward=self.backward)
        padded = self.layout.rows * self.layout.tokens
        return {
            "TFLOP/s": useful / seconds / 1e12,
            "fraction of 790 TFLOP/s": useful / seconds / H200.peak,
            "tokens/s": sum(lengths) / seconds,
            "share of tokens that are real": (sum(lengths) - sum(self.layout.again)) / padded,
        }

    def _call(self, q: Any, k: Any, v: Any, do: Any, *masks: Any) -> tuple[jax.Array, ...]:
        settings: dict[str, Any] = {"implementation": self.implementation}
        if self.layout.window is not None:
            settings["window"] = self.layout.window
        if masks:
            packed = self.layout.segment_ids is not None
            settings["visibility" if packed else "lengths"] = masks[0]
        fn = partial(attention, **settings)
        if not self.backward:
            return (fn(q, k, v),)
        out, pull = jax.vjp(fn, q, k, v)
        return (out, *pull(do))

    def _arrays(self) -> tuple[Any, ...]:
        layout, model = self.layout, self.model
        keys = jax.random.split(jax.random.key(layout.tokens + model.num_heads), 4)
        heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
        arrays = tuple(
            jax.random.normal(key, (layout.rows, layout.tokens, n, model.head_dim), jnp.bfloat16)
            for key, n in zip(keys, heads, strict=True)
        )
        if layout.segment_ids is not None:
            # Made once for all layers of a model, so it is not in the time of one.
            ids = (x for x in (layout.segment_ids, layout.prefix_ids) if x is not None)
            return (*arrays, packed_visibility(*map(jnp.asarray, ids)))
        if layout.row_lengths is not None:
            return (*arrays, jnp.asarray(layout.row_lengths, jnp.int32))
        return arrays


def _worst_error(ours: jax.Array, expected: jax.Array) -> float:
    """The largest of the rows' relative errors."""
    return max(relative_error(*pair) for pair in zip(ours, expected, strict=True))


class Reference:
    """A few queries of some of a layout's rows in float32, written out; compiled once a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        rng = np.random.default_rng(0)
        chosen = np.unique(np.linspace(0, layout.rows - 1, NUM_CHECKED_ROWS).astype(int))
        self.rows = np.array([row for row in chosen if layout.real[row]])
        count = min(NUM_CHECKED, *(layout.real[row] for row in self.rows))
        self.checked = np.stack(
            [np.sort(rng.choice(layout.real[row], count, replace=False)) for row in self.rows]
        )
        self._lowered: jax.stages.Lowered | None = None

    def lower(self, *arrays: Any) -> jax.stages.Lowered:
        """The program (q, k, v, do) -> output, dq, dk, dv of the checked rows."""
        if self._lowered is None:
            self._lowered = jax.jit(self._run).lower(*arrays)
        return self._lowered

    def _run(self, q: Any, k: Any, v: Any, do: Any) -> tuple[jax.Array, ...]:
        def one_row(which: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row, checked, starts, prefixes = which
            return self._run_row((q[row], k[row], v[row], do[row]), checked, starts, prefixes)

        rows_R1, prefixes = self.rows[:, None], self.layout.prefixes
        if prefixes is None:
            prefixes = np.zeros((*self.layout.starts.shape, 2), np.int32)
        of_rows = (self.layout.starts[rows_R1, self.checked], prefixes[rows_R1, self.checked])
        return jax.lax.map(one_row, tuple(map(jnp.asarray, (self.rows, self.checked, *of_rows))))

    def _run_row(
        self, arrays: tuple[Any, ...], checked_Q: Any, starts_Q: Any, prefixes_Q2: Any
    ) -> tuple[jax.Array, ...]:
        q, k, v, do = arrays
        q_QNH, k_TKH, v_TKH = (x.astype(jnp.float32) for x in (q[checked_Q], k, v))
        key = jnp.arange(k.shape[0])
        visible_QT = (starts_Q[:, None] <= key) & (key <= checked_Q[:, None])
        visible_QT |= (prefixes_Q2[:, :1] <= key) & (key < prefixes_Q2[:, 1:])
        groups = q.shape[1] // k.shape[1]

        def fn(q_QNH: Any, k_TKH: Any, v_TKH: Any) -> jax.Array:
            k_TNH, v_TNH = (jnp.repeat(x, groups, axis=1) for x in (k_TKH, v_TKH))
            scores = jnp.einsum("QNH,TNH->NQT", q_QNH, k_TNH, precision="highest")
            scores = jnp.where(visible_QT, scores / math.sqrt(q.shape[2]), -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
            return jnp.einsum("NQT,TNH->QNH", weights, v_TNH, precision="highest")

        out, pull = jax.vjp(fn, q_QNH, k_TKH, v_TKH)
        return (out, *pull(do[checked_Q].astype(jnp.float32)))


def attention_cases(options: Options) -> Sequence[Case]:
    """Every workload on every shape, the kernels of ours and, with --baseline, cuDNN and XLA."""
    cases: list[Case] = []
    for shape in options.shapes:
        if "dense" in options.workloads:
            cases += _dense_cases(options, shape)
        if "packed" in options.workloads:
            cases += _packed_cases(options, shape)
        if "decode" in options.workloads:
            cases += decode_cases(options, shape)
    return cases


def own_implementation() -> Implementation:
    """Our kernels on a GPU; the choice of `auto` on a CPU, where ours do not run."""
    ours: Any = "pallas"
    return ours if jax.default_backend() == "gpu" and ours in get_args(Implementation) else "auto"


def _peers(options: Options, tokens: int) -> list[Implementation]:
    if not options.baseline:
        return []
    peers: list[Implementation] = ["cudnn"] if jax.default_backend() == "gpu" else []
    if tokens <= XLA_LONGEST:
        peers.append("xla")
    return peers


def _dense_cases(options: Options, shape: str) -> list[Case]:
    cases: list[Case] = []
    name = _name("dense", options)
    for rows, tokens in options.batches_of(shape, "dense"):
        window = options.window or tokens
        layout = Layout(
            rows=rows,
            tokens=tokens,
            lengths=(tokens,) * rows,
            starts=np.tile(np.maximum(np.arange(tokens) + 1 - window, 0), (rows, 1)),
            real=(tokens,) * rows,
            window=options.window,
        )
        who: list[Who] = [("ours", own_implementation())]
        for peer in _peers(options, tokens):
            who.append((peer, peer))
        cases += _both(options, shape, f"{name}_{rows}x{tokens}", layout, who)
    return cases


def _packed_cases(options: Options, shape: str) -> list[Case]:
    """Sequences one after the other, then groups whose responses share a prompt.

    The peers get each sequence, prompt and response, as a row of its own.
    """
    cases: list[Case] = []
    for rows, tokens in options.batches_of(shape, "packed"):
        for name, packed in (
            ("packed", _packed_layout(packed_lengths(shape, rows, tokens), tokens)),
            ("packed_shared", _shared_layout(packed_groups(options, shape, rows, tokens), tokens)),
        ):
            name = f"{_name(name, options)}_{rows}x{tokens}"
            cases += _both(options, shape, name, packed, [("ours", own_implementation())])
            cases += _padded_cases(options, shape, name, packed)
    return cases


def _padded_cases(options: Options, shape: str, name: str, packed: Layout) -> list[Case]:
    cases: list[Case] = []
    lengths = packed.lengths
    longest = max(lengths)
    for peer in _peers(options, longest):
        padded = Layout(
            rows=len(lengths),
            tokens=longest,
            lengths=lengths,
            starts=np.zeros((len(lengths), longest), np.int32),
            real=lengths,
            again=packed.again,
        )
        cases += _both(options, shape, name, padded, [(f"{peer}_padded", peer)])
        if peer == "cudnn":
            with_lengths = replace(padded, row_lengths=np.asarray(lengths))
            cases += _both(options, shape, name, with_lengths, [("cudnn_lengths", peer)])
    return cases


def _packed_layout(packed: Sequence[Sequence[int]], tokens: int) -> Layout:
    """Sequences one after the other; the end of a row is padding, which sees nothing."""
    ids, starts = np.zeros((2, len(packed), tokens), np.int32)
    for row, starts_of_row, lengths in zip(ids, starts, packed, strict=True):
        first = np.cumsum([0, *lengths])
        row[: first[-1]] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        starts_of_row[: first[-1]] = np.repeat(first[:-1], lengths)
    return Layout(
        rows=len(packed),
        tokens=tokens,
        lengths=tuple(length for row in packed for length in row),
        starts=starts,
        real=tuple(sum(row) for row in packed),
        segment_ids=ids,
    )


def _shared_layout(packed: Sequence[Sequence[tuple[int, list[int]]]], tokens: int) -> Layout:
    """A prompt, then its responses, each of which sees it and itself; then the next prompt."""
    ids, prefix_ids, starts = np.zeros((3, len(packed), tokens), np.int32)
    prefixes = np.zeros((len(packed), tokens, 2), np.int32)
    used = []
    for r, row in enumerate(packed):
        at, segment = 0, 0
        for prompt, responses in row:
            first, leader = at, segment + 1
            for number, length in enumerate((prompt, *responses)):
                segment += 1
                here = slice(at, at + length)
                ids[r, here] = segment
                prefix_ids[r, here] = leader if number else 0
                starts[r, here] = at
                prefixes[r, here] = (first, first + prompt) if number else 0
                at += length
        used.append(at)
    groups = [group for row in packed for group in row]
    return Layout(
        rows=len(packed),
        tokens=tokens,
        lengths=tuple(prompt + length for prompt, responses in groups for length in responses),
        starts=starts,
        real=tuple(used),
        segment_ids=ids,
        prefix_ids=prefix_ids,
        prefixes=prefixes,
        again=tuple(prompt for prompt, responses in groups for _ in responses[1:]),
    )


def _name(workload: str, options: Options) -> str:
    parts = [workload]
    parts += [] if options.head_dim is None else [f"d{options.head_dim}"]
    parts += [] if options.window is None else [f"w{options.window}"]
    return "_".join(parts)


def _both(
    options: Options, shape: str, name: str, layout: Layout, who: Sequence[Who]
) -> list[Case]:
    reference, model = Reference(layout), options.heads_of(shape)
    return [
        Attention(shape, name, label, model, reference, implementation, backward)
        for label, implementation in who
        for backward in (False, True)
    ]
