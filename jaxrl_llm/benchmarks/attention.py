"""Attention kernels by themselves: whole rows, packed rows of uneven lengths, and decoding.

Shape letters: B rows, T tokens of a row, N query heads, K KV heads, H head dim, Q checked queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.benchmarks.decode import decode_cases
from jaxrl_llm.benchmarks.harness import Case, relative_error, require
from jaxrl_llm.benchmarks.options import Options
from jaxrl_llm.benchmarks.workloads import packed_groups, packed_lengths
from jaxrl_llm.kernels.flash_attention import Implementation, attention
from jaxrl_llm.kernels.visibility import packed_visibility
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import attention_flops

# Relative L2 errors against float32 on the same bf16 inputs.
MOST_OUTPUT_ERROR = 1e-2
MOST_GRADIENT_ERROR = 1e-2
NUM_CHECKED = 64  # queries of the first row, anywhere in it
XLA_LONGEST = 4096  # XLA keeps T * T scores of every head
LONG_ENOUGH_S = 0.05  # of queued calls, so that dispatch is hidden


Who = tuple[str, Implementation]  # a label and what it runs


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows of one case. `starts` [T] is the first key that each token of the first row sees."""

    rows: int
    tokens: int
    lengths: tuple[int, ...]  # of every sequence: the useful work
    starts: np.ndarray
    first_row: int  # tokens of the first row that are real
    segment_ids: np.ndarray | None = None  # [B, T], of packed rows
    prefix_ids: np.ndarray | None = None  # [B, T], where segments see another one, too
    # [T, 2], the keys of that one which each token of the first row sees, and one past them.
    prefixes: np.ndarray | None = None
    again: tuple[int, ...] = ()  # what `lengths` have more than once: no useful work
    row_lengths: np.ndarray | None = None  # [B], of padded rows that say so
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
        return {
            "main": jax.jit(self._call).lower(*arrays),
            "reference": self.reference.lower(*arrays[:4]),
        }

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.programs = programs
        self.inputs = jax.jit(self._arrays)()

    def check(self) -> dict[str, float]:
        """A few queries of the first row, and the gradients when only those have a cotangent."""
        q, k, v, do, *given = self.inputs
        checked = self.reference.checked
        sparse = jnp.zeros_like(do).at[0, checked].set(do[0, checked])
        out, *gradients = self.programs["main"](q, k, v, sparse, *given)
        expected, *expected_gradients = self.programs["reference"](q, k, v, do)
        found = {"output_error": relative_error(out[0, checked], expected)}
        require("output_error", found["output_error"], MOST_OUTPUT_ERROR)
        for name, ours, theirs in zip("qkv", gradients, expected_gradients, strict=False):
            ours = ours[0, checked] if name == "q" else ours[0]
            found[f"d{name}_error"] = relative_error(ours, theirs)
            require(f"d{name}_error", found[f"d{name}_error"], MOST_GRADIENT_ERROR)
        return found

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
            "tokens/s": sum(lengths) / seconds,
            "share of tokens that are real": (sum(lengths) - sum(self.layout.again)) / padded,
        }

    def _call(self, q: Any, k: Any, v: Any, do: Any, *given: Any) -> tuple[jax.Array, ...]:
        settings: dict[str, Any] = {"implementation": self.implementation}
        if self.layout.window is not None:
            settings["window"] = self.layout.window
        if given:
            packed = self.layout.segment_ids is not None
            settings["visibility" if packed else "lengths"] = given[0]
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


class Reference:
    """A few queries of a layout's first row in float32, written out; compiled once a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        count = min(NUM_CHECKED, layout.first_row)
        chosen = np.random.default_rng(0).choice(layout.first_row, count, replace=False)
        self.checked = np.sort(chosen)
        self._lowered: jax.stages.Lowered | None = None

    def lower(self, *arrays: Any) -> jax.stages.Lowered:
        """The program (q, k, v, do) -> output, dq, dk, dv."""
        if self._lowered is None:
            self._lowered = jax.jit(self._run).lower(*arrays)
        return self._lowered

    def _run(self, q: Any, k: Any, v: Any, do: Any) -> tuple[jax.Array, ...]:
        checked, starts = self.checked, self.layout.starts[self.checked]
        q_QNH, k_TKH, v_TKH = (x.astype(jnp.float32) for x in (q[0, checked], k[0], v[0]))
        key = np.arange(k.shape[1])
        visible_QT = (starts[:, None] <= key) & (key <= checked[:, None])
        if self.layout.prefixes is not None:
            first_Q1, stop_Q1 = np.split(self.layout.prefixes[checked], 2, axis=1)
            visible_QT |= (first_Q1 <= key) & (key < stop_Q1)
        groups = q.shape[2] // k.shape[2]

        def fn(q_QNH: Any, k_TKH: Any, v_TKH: Any) -> jax.Array:
            k_TNH, v_TNH = (jnp.repeat(x, groups, axis=1) for x in (k_TKH, v_TKH))
            scores = jnp.einsum("QNH,TNH->NQT", q_QNH, k_TNH, precision="highest")
            scores = jnp.where(visible_QT, scores / math.sqrt(q.shape[3]), -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
            return jnp.einsum("NQT,TNH->QNH", weights, v_TNH, precision="highest")

        out, pull = jax.vjp(fn, q_QNH, k_TKH, v_TKH)
        return (out, *pull(do[0, checked].astype(jnp.float32)))


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
    """Our kernels on a GPU; on a CPU, where they do not run, what `auto` takes."""
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
    for rows, tokens in options.batches_of(shape):
        window = options.window or tokens
        layout = Layout(
            rows=rows,
            tokens=tokens,
            lengths=(tokens,) * rows,
            starts=np.maximum(np.arange(tokens) + 1 - window, 0),
            first_row=tokens,
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
    for rows, tokens in options.packed_batches(shape):
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
            starts=np.zeros(longest, np.int32),
            first_row=lengths[0],
            again=packed.again,
        )
        cases += _both(options, shape, name, padded, [(f"{peer}_padded", peer)])
        if peer == "cudnn":
            told = replace(padded, row_lengths=np.asarray(lengths))
            cases += _both(options, shape, name, told, [("cudnn_lengths", peer)])
    return cases


def _packed_layout(packed: Sequence[Sequence[int]], tokens: int) -> Layout:
    """Sequences one after the other; what is left of a row is padding, which sees nothing."""
    ids = np.zeros((len(packed), tokens), np.int32)
    for row, lengths in zip(ids, packed, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    first = np.cumsum([0, *packed[0]])
    starts = np.zeros(tokens, np.int32)
    starts[: first[-1]] = np.repeat(first[:-1], packed[0])
    return Layout(
        rows=len(packed),
        tokens=tokens,
        lengths=tuple(length for row in packed for length in row),
        starts=starts,
        first_row=int(first[-1]),
        segment_ids=ids,
    )


def _shared_layout(packed: Sequence[Sequence[tuple[int, list[int]]]], tokens: int) -> Layout:
    """A prompt, then its responses, each of which sees it and itself; then the next prompt."""
    ids, prefix_ids = np.zeros((2, len(packed), tokens), np.int32)
    starts, prefixes = np.zeros(tokens, np.int32), np.zeros((tokens, 2), np.int32)
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
                if r == 0:
                    starts[here] = at
                    prefixes[here] = (first, first + prompt) if number else 0
                at += length
        used.append(at)
    groups = [group for row in packed for group in row]
    return Layout(
        rows=len(packed),
        tokens=tokens,
        lengths=tuple(prompt + length for prompt, responses in groups for length in responses),
        starts=starts,
        first_row=used[0],
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
