"""Attention of one new token a slot: XLA and the Hopper kernel (interpreted) against float64.

The new token's key and value are in no page before: there lies garbage.
"""

import operator
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled, on_device

# Public as plgpu.InterpretGPUParams from jax 0.11 on.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrl_llm.kernels import decode_attention
from jaxrl_llm.kernels.decode_attention import (
    DecodeInputs,
    DecodeSchedule,
    decode_schedule,
    prefix_decode_attention,
    prefix_decode_attention_reference,
)
from jaxrl_llm.kernels.decode_attention.pipeline import DecodeTuning, default_tuning


@dataclass
class Case:
    """Random arguments whose unseen entries hold `garbage`, and the answer in float64."""

    prefix_rows: list[int]
    prefix_lengths: list[int]
    lengths: list[int]
    G: int = 3
    K: int = 1
    H: int = 64
    P: int = 128
    R: int = 128
    page: int = 0  # entries of a page; 0 has one page a slot
    window: int | None = None
    garbage: float = np.nan
    seed: int = 0
    cache_dtype: Any = jnp.bfloat16
    sinks: tuple[float, ...] | None = None  # one a query head

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        B, C = len(self.lengths), max(self.prefix_rows) + 1

        def draw(dtype: Any, *shape: int) -> np.ndarray:
            # Through the dtype, so that the answer is computed from what the kernel is given.
            return rng.standard_normal(shape).astype(dtype).astype(np.float64)

        self.q = draw(jnp.bfloat16, B, self.K * self.G, self.H)
        self.prefix = [draw(self.cache_dtype, C, self.K, self.P, self.H) for _ in range(2)]
        self.own = [draw(self.cache_dtype, B, self.K, self.R, self.H) for _ in range(2)]
        longest = np.zeros(C, int)
        np.maximum.at(longest, self.prefix_rows, self.prefix_lengths)
        for part, ends in ((self.prefix, longest), (self.own, self.lengths)):
            for x in part:
                for row, end in enumerate(ends):
                    x[row, :, end:] = self.garbage

    def inputs(self, slots: list[int] | None = None) -> DecodeInputs:
        """The inputs of the chosen slots, in the kernel's dtypes."""
        chosen = np.arange(len(self.lengths)) if slots is None else np.array(slots)
        rows, prefix_lengths, lengths = (
            on_device(np.array(x)[chosen], np.int32)
            for x in (self.prefix_rows, self.prefix_lengths, self.lengths)
        )
        q = on_device(self.q[chosen], jnp.bfloat16)
        newest = np.maximum(np.array(self.lengths), 1) - 1
        slots_B, before = np.arange(len(newest)), [x.copy() for x in self.own]
        for x in before:
            x[slots_B, :, newest] = self.garbage
        pages, *own = self.paged(chosen, before)
        new, prefix, own = (
            on_device(np.stack(keys_and_values, axis=2), self.cache_dtype)
            for keys_and_values in (
                [x[slots_B, :, newest][chosen] for x in self.own],
                self.prefix,
                own,
            )
        )
        return DecodeInputs(q, new, prefix, rows, prefix_lengths, own, pages, lengths)

    def paged(
        self, chosen: np.ndarray, own: list[np.ndarray]
    ) -> tuple[jax.Array, np.ndarray, np.ndarray]:
        """The chosen slots' pages, shuffled, among one that is nobody's; then keys and values.

        A page that a slot does not reach has a number that no page has.
        """
        B, page = len(chosen), self.page or self.R
        T = self.R // page
        places = np.random.default_rng(self.seed).permutation(B * T + 1)[: B * T]
        found = []
        for x in own:
            pages = x[chosen].reshape(B, self.K, T, page, self.H).swapaxes(1, 2)
            among = np.full((B * T + 1, self.K, page, self.H), self.garbage)
            among[places] = pages.reshape(B * T, self.K, page, self.H)
            found.append(among)
        reached = np.arange(T) * page < np.array(self.lengths)[chosen][:, None]
        numbers = np.where(reached, places.reshape(B, T), 1_000_000)
        return on_device(numbers, np.int32), *found

    def schedule(
        self,
        prompt_splits: int = 1,
        slots: list[int] | None = None,
        num_splits: int = 1,
        slots_per_prompt: int = 2,
        tuning: DecodeTuning | None = None,
    ) -> DecodeSchedule:
        inputs = self.inputs(slots)
        return compiled(
            decode_schedule,
            inputs.prefix_rows_B,
            inputs.prefix_lengths_B,
            inputs.own_lengths_B,
            group_size=self.G,
            num_kv_heads=self.K,
            prefix_capacity=self.P,
            own_capacity=self.R,
            slots_per_prompt=slots_per_prompt,
            tuning=tuning or DecodeTuning(),
            num_splits=num_splits,
            prompt_splits=prompt_splits,
        )

    def answer(self, softcap: float = 1e9) -> np.ndarray:
        out = np.zeros_like(self.q)
        for b, (row, p, r) in enumerate(
            zip(self.prefix_rows, self.prefix_lengths, self.lengths, strict=True)
        ):
            for n in range(self.K * self.G):
                head = n // self.G
                k, v = (
                    np.concatenate([x[row, head, :p], y[b, head, :r]])
                    for x, y in zip(self.prefix, self.own, strict=True)
                )
                if self.window is not None:
                    k, v = k[-self.window :], v[-self.window :]
                if len(k):
                    scores = softcap * np.tanh(k @ self.q[b, n] / np.sqrt(self.H) / softcap)
                    weights = np.exp(scores - scores.max())
                    sink = 0.0 if self.sinks is None else np.exp(self.sinks[n] - scores.max())
                    out[b, n] = weights @ v / (weights.sum() + sink)
        return out

    def run(self, implementation: str = "pallas", **options) -> np.ndarray:
        slots = options.pop("slots", None)
        if implementation == "pallas":
            # Small blocks, so that small cases have several.
            given = dict(interpret=InterpretGPUParams(), tuning=DecodeTuning())
            given |= {} if options.get("schedule") else dict(num_splits=1)
            options = given | options
        # The interpreter's callbacks wait for threads that the rest of a program may hold.
        run = compiled if options.pop("one_program", implementation == "xla") else operator.call
        out, own = run(
            prefix_decode_attention,
            self.inputs(slots),
            window=self.window,
            sinks=None if self.sinks is None else on_device(np.array(self.sinks), np.float32),
            implementation=implementation,
            **options,
        )
        assert out.dtype == jnp.bfloat16
        chosen = np.arange(len(self.lengths)) if slots is None else np.array(slots)
        _, *after = self.paged(chosen, self.own)
        written = np.stack(after, axis=2).astype(self.cache_dtype)
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (own, written)))
        return np.asarray(out, np.float32)


def assert_close(out: np.ndarray, answer: np.ndarray) -> None:
    """To bf16's rounding of weights and output; a NaN fails."""
    np.testing.assert_allclose(out, answer, atol=8e-3, rtol=8e-3)


CASES = {
    # Lengths 0, 1, one past a block, a block, both full; rows shared and out of order.
    "ragged": Case([1, 0, 1, 0, 1, 1], [0, 1, 65, 64, 128, 0], [0, 1, 63, 64, 128, 65], page=64),
    "one query a head": Case([0, 0], [70, 0], [3, 64], G=1, K=2),
    "1.5B": Case([0, 1], [33, 64], [1, 70], G=6, K=2, H=128, P=64),
    "7B": Case([1, 0], [64, 2], [64, 5], G=7, K=2, H=128, P=64, R=64),
    "8B": Case([0, 0], [9, 64], [5, 64], G=8, K=2, H=128, P=64, R=64),
    "pages of two blocks": Case([0, 0], [9, 64], [130, 300], R=384, page=128),
}


def fast_and_slow(cases: dict, *fast: str) -> list:
    """The cases as parameters; only those named run with the ordinary tests."""
    marks = {key: () if key in fast else pytest.mark.slow for key in cases}
    return [pytest.param(case, id=key, marks=marks[key]) for key, case in cases.items()]


@pytest.mark.parametrize("case", fast_and_slow(CASES, "ragged"))
def test_kernel_equals_float64_with_nan_past_every_length(case: Case):
    assert_close(case.run(), case.answer())


@pytest.mark.parametrize("case", fast_and_slow(CASES, "ragged", "one query a head"))
def test_xla_equals_float64_with_finite_garbage(case: Case):
    finite = Case(**{**case_fields(case), "garbage": 300.0})
    assert_close(finite.run("xla"), finite.answer())


def case_fields(case: Case) -> dict:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


@pytest.mark.parametrize(
    "window", [*(pytest.param(x, marks=pytest.mark.slow) for x in (1, 64, 70, 500)), 65]
)
def test_window_trims_the_prompt_first(window: int):
    """Across both parts, within one, within a block, wider than all, and with an empty slot."""
    fields = dict(
        prefix_rows=[0, 1, 0, 0],
        prefix_lengths=[100, 128, 30, 0],
        lengths=[65, 10, 128, 0],
        window=window,
        page=64,
    )
    case = Case(**fields)
    assert_close(case.run(num_splits=2 if window == 70 else 1), case.answer())
    finite = Case(**fields, garbage=-200.0)
    assert_close(finite.run("xla"), finite.answer())


def test_entries_before_the_window_do_not_count():
    case = Case([0], [128], [40], window=50)
    for part in case.prefix:
        part[0, :, : 128 - 10] = 1e4  # finite, but enormous were it seen
    assert_close(case.run(), case.answer())


@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("ragged", 9), *(pytest.param("ragged", n, marks=pytest.mark.slow) for n in (2, 16))],
)
def test_split_equals_float64(name: str, num_splits: int, monkeypatch: pytest.MonkeyPatch):
    """Also where a slot has fewer blocks than parts, or none; more than eight merge differently."""
    few_ctas(monkeypatch)
    case, slots = CASES[name], [0, 2, 4]
    assert_close(case.run(num_splits=num_splits, slots=slots), case.answer()[slots])


@pytest.mark.parametrize("num_splits", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bits_do_not_depend_on_batch_index_or_neighbours(
    num_splits: int, monkeypatch: pytest.MonkeyPatch
):
    few_ctas(monkeypatch)
    case = CASES["ragged"]
    whole = case.run(num_splits=num_splits)
    part = case.run(num_splits=num_splits, slots=[5, 4, 2])
    np.testing.assert_array_equal(part, whole[[5, 4, 2]])
    assert_close(whole, case.answer())


SHARED = {
    # Two slots a prompt tile. Rows out of order, two lengths of one row, three slots of one prompt,
    # one slot alone, slots without a prompt, with nothing of their own, and with nothing at all.
    "ragged": Case(
        [1, 0, 1, 0, 1, 1, 0, 1, 1, 9],
        [65, 0, 65, 64, 65, 64, 64, 128, 65, 0],
        [0, 1, 63, 64, 128, 65, 3, 0, 2, 0],
        G=30,
        page=64,
    ),
    "1.5B": Case(
        [0, 1, 0, 1, 0, 0], [190, 1, 190, 1, 190, 0], [5, 64, 1, 9, 0, 70], G=6, K=2, H=128, P=192
    ),
    "8B": Case([0] * 9, [100] * 9, [1, 0, 64, 65, 3, 128, 1, 2, 9], G=8, K=2, H=128),
}


@pytest.mark.parametrize("case", fast_and_slow(SHARED, "ragged"))
@pytest.mark.parametrize("num_splits", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_shared_prompts_equal_float64_with_nan_past_every_length(
    case: Case, num_splits: int, monkeypatch: pytest.MonkeyPatch
):
    """With as many parts of the prompts; the second number has parts without a block."""
    few_ctas(monkeypatch)
    assert_close(case.run(schedule=case.schedule(num_splits)), case.answer())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("slots_per_prompt", "cache_dtype"),
    [
        *(pytest.param(n, jnp.bfloat16, marks=pytest.mark.slow) for n in (1, 2)),
        (2, jnp.float8_e4m3fn),
    ],
)
def test_a_cta_goes_through_several_tile_jobs(
    monkeypatch: pytest.MonkeyPatch, slots_per_prompt: int, cache_dtype: Any
):
    """More jobs than a whole round, fewer than all splits of all slots.

    Splits that the schedule does not list are never written, and not merged."""
    few_ctas(monkeypatch)
    sizes = dict(G=3, K=2, P=64, R=256, page=64, cache_dtype=cache_dtype)
    case = Case([0, 1, 0, 0], [33, 64, 33, 0], [1, 200, 0, 130], **sizes)
    schedule = case.schedule(4, slots_per_prompt=slots_per_prompt, num_splits=4)
    assert 4 < int(schedule.jobs.num_jobs[0]) < 16
    assert_close(case.run(schedule=schedule), case.answer())


def races_but_for_new_entries(printed: str) -> list[str]:
    """What the interpreter reports as races, without a new entry's with its own block.

    A CTA writes it to its page while it loads the block, and replaces the row in what was
    loaded, whatever came (`Pipeline.write_newest`). Only jax 0.11 sees that.
    """
    races = printed.split("RACE DETECTED")[1:]
    assert interpret_pallas_call.get_races().races_found == bool(races)

    def of_a_new_entry(race: str) -> bool:
        one_cta = len(set(re.findall(r" from Warpgroup\((.*?)\)", race))) == 1
        writes = re.findall(r"write of .*\(Pipeline\.(\w+)", race)
        reads = re.findall(r"read of .*\(Pipeline\.(\w+)", race)
        return one_cta and (writes, reads) == (["write_newest"], ["load"])

    return [race for race in races if not of_a_new_entry(race)]


def few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three, so that small cases have several tile jobs per CTA.

    The interpreter also takes half as long as with a CTA for each.
    """
    monkeypatch.setattr(decode_attention.kernel, "SMS", 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_slot_does_not_depend_on_who_shares_its_prompt(num_splits: int):
    """Alone, with others, at another place of the prompt tile, in another order.

    To one rounding: a row of the CPU's products, not of the card's, depends on its place by a bit.
    """
    case = SHARED["ragged"]
    whole = case.run(schedule=case.schedule(num_splits, num_splits=num_splits))
    for slots in ([4], [8, 5, 4, 3]):
        schedule = case.schedule(num_splits, slots, num_splits=num_splits)
        part = case.run(schedule=schedule, slots=slots)
        np.testing.assert_allclose(part, whole[slots], rtol=2**-7, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("G", "slots_per_prompt"),
    [
        (3, 2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((20, 2), (3, 1), (12, 1), (12, 2))),
    ],
)
def test_no_race_between_tile_jobs(
    G: int,
    slots_per_prompt: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A CTA's loads for its next tile job do not meet reads of the one before.

    Slots' own queries as rows, as columns with rows, and as columns alone. The interpreter does
    not model the waits for stores and the fences before them, so none of those is tested here.
    """
    few_ctas(monkeypatch)
    rows, prefix_lengths, lengths = [0, 1, 0, 1], [250, 70, 250, 70], [130, 0, 1, 64]
    case = Case(rows, prefix_lengths, lengths, G=G, K=1 if G > 3 else 2, P=256, R=192)
    interpret = InterpretGPUParams(detect_races=True)
    schedule = case.schedule(2, slots_per_prompt=slots_per_prompt)
    out = case.run(schedule=schedule, tuning=DecodeTuning(stages=2), interpret=interpret)
    assert_close(out, case.answer())
    assert not races_but_for_new_entries(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("G", "shared"),
    [
        (17, False),
        # 16 shared: in test_blocks_at_head_dim_64
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((16, True), (16, False), (17, True))),
        *(pytest.param(63, x, marks=pytest.mark.slow) for x in (False, True)),
    ],
)
def test_many_queries_a_head(G: int, shared: bool):
    """The most that are taken as columns, and more, which are rows."""
    case = Case([0, 1, 0], [65, 0, 65], [1, 0, 100], G=G, page=64)
    assert_close(case.run(schedule=case.schedule(2) if shared else None), case.answer())


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_tokens_of_one_sequence_see_those_before_them(implementation: str):
    """Three slots have one list of pages, in which none of their new entries is yet."""
    garbage = np.nan if implementation == "pallas" else 300.0
    case = Case([0, 0, 0, 1], [70, 70, 70, 5], [63, 64, 65, 2], page=64, garbage=garbage)
    for x in case.own:
        x[:2] = x[2]
    inputs = case.inputs()
    pages_BT = inputs.page_table_BT.at[:2].set(inputs.page_table_BT[2])
    own_OK2RH = inputs.own_OK2RH.at[pages_BT[2, 0], :, :, 62:].set(garbage)
    how = {"schedule": case.schedule(2), "tuning": DecodeTuning()}
    run = compiled if implementation == "xla" else operator.call
    out, own = run(
        prefix_decode_attention,
        inputs._replace(page_table_BT=pages_BT, own_OK2RH=own_OK2RH),
        shared_pages=True,
        implementation=implementation,
        **({} if implementation == "xla" else how | {"interpret": InterpretGPUParams()}),
    )
    assert_close(np.asarray(out, np.float32), case.answer())
    for number, x in enumerate(case.own):
        stored = np.asarray(own[pages_BT[2, 0], :, number], np.float64)
        np.testing.assert_array_equal(stored, x[2, :, :64])


def test_a_window_uses_no_schedule(monkeypatch: pytest.MonkeyPatch):
    given, kernel = [], decode_attention.decode_attention_mosaic

    def seen(inputs: DecodeInputs, **options: Any) -> tuple[jax.Array, jax.Array]:
        given.append(options["schedule"])
        return kernel(inputs, **options)

    monkeypatch.setattr(decode_attention, "decode_attention_mosaic", seen)
    case = Case([1, 0, 1], [65, 0, 65], [3, 64, 65], G=30, window=70)
    assert_close(case.run(schedule=case.schedule()), case.answer())
    assert given == [None]


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [DecodeTuning(stages=2), DecodeTuning(block=128, stages=4)])
def test_tunings_agree(tuning: DecodeTuning):
    case = replace(CASES["ragged"], page=tuning.block)  # a page holds whole blocks
    assert_close(case.run(tuning=tuning), case.answer())


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.slow), True])
def test_blocks_at_head_dim_64(shared: bool):
    """Never as many entries as a head has dimensions: see `default_tuning`.

    Of the most queries a head that are taken as columns.
    """
    assert default_tuning(64).block == 128
    case = Case([1, 0, 1], [200, 0, 200], [300, 1, 129], G=16, P=256, R=384, page=128)
    tuning = default_tuning(64)
    schedule = case.schedule(2, tuning=tuning) if shared else None
    assert_close(case.run(tuning=tuning, schedule=schedule), case.answer())


@pytest.mark.parametrize(
    ("num_splits", "cache_dtype"),
    [
        pytest.param(1, jnp.bfloat16, marks=pytest.mark.slow),
        (2, jnp.bfloat16),
        pytest.param(1, jnp.float8_e4m3fn, marks=pytest.mark.nightly),
    ],
)
def test_no_race_between_loads_and_reads(
    num_splits: int, cache_dtype: Any, capsys: pytest.CaptureFixture[str]
):
    case = Case([0, 0], [200, 0], [130, 65], P=256, R=192, page=64, cache_dtype=cache_dtype)
    interpret = InterpretGPUParams(detect_races=True)
    tuning = DecodeTuning(stages=2)
    out = case.run(tuning=tuning, num_splits=num_splits, interpret=interpret)
    assert_close(out, case.answer())
    assert not races_but_for_new_entries(capsys.readouterr().out)


def test_row_of_a_slot_without_prompt_is_never_read():
    case = Case([0, 0], [10, 0], [4, 5])
    case.prefix_rows = [0, 1_000_000]
    out = case.run()
    case.prefix_rows = [0, 0]
    assert_close(out, case.answer())


@pytest.mark.parametrize("prompts", [1, 3])
def test_reference_equals_float64_with_nan_past_every_length(prompts: int):
    rows = [0, prompts - 1, 0]
    case = Case(rows, [20, 128, 0], [1, 77, 0], G=2, K=2, page=32, window=90)
    out = compiled(prefix_decode_attention_reference, case.inputs(), window=90)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, case.answer(), atol=1e-5, rtol=1e-4)


FLOAT8 = dict(cache_dtype=jnp.float8_e4m3fn, G=3, K=2, R=192)


@pytest.mark.parametrize(
    ("H", "num_splits"), [pytest.param(64, 1, marks=pytest.mark.slow), (128, 2)]
)
def test_float8_cache_equals_float64_with_nan_past_every_length(
    H: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
):
    few_ctas(monkeypatch)
    case = Case([1, 0, 1], [70, 0, 128], [1, 0, 150], H=H, window=190, **FLOAT8)
    assert_close(case.run(num_splits=num_splits), case.answer())


def test_float8_reference_and_xla():
    case = Case([0, 0], [20, 128], [1, 77], **FLOAT8)
    reference = compiled(prefix_decode_attention_reference, case.inputs())
    np.testing.assert_allclose(reference, case.answer(), atol=1e-5, rtol=1e-4)
    finite = Case([0, 0], [20, 128], [1, 77], garbage=448.0, **FLOAT8)
    assert_close(finite.run("xla"), finite.answer())


def test_a_schedule_of_other_caches_is_refused():
    """Its splits would differ from the call's: some would be merged that nothing wrote."""
    case = Case([0, 0], [64, 64], [512, 512], G=8, K=1, P=64, R=512)
    larger = Case([0, 0], [64, 64], [512, 512], G=8, K=1, P=64, R=1024)
    for schedule in (
        larger.schedule(num_splits=2),
        larger.schedule(num_splits=2, slots_per_prompt=1),
    ):
        with pytest.raises(AssertionError):
            case.run(schedule=schedule)
    with pytest.raises(AssertionError):
        case.run(schedule=case.schedule(num_splits=2), tuning=DecodeTuning(block=128))
    with pytest.raises(AssertionError):
        case.run(schedule=case.schedule(slots=[0]))


def test_auto_is_xla_without_a_gpu():
    case = Case([0, 0], [20, 64], [1, 77], garbage=7.0)
    np.testing.assert_array_equal(case.run("auto", one_program=True), case.run("xla"))


@pytest.mark.parametrize(
    ("H", "kernel"), [pytest.param(64, True, marks=pytest.mark.slow), (128, True), (96, False)]
)
def test_auto_on_hopper_is_the_kernel_where_it_can(
    H: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode_attention, "on_hopper", lambda: True)
    case = Case([0], [20], [7], H=H, garbage=7.0)
    interpret = InterpretGPUParams()
    auto = case.run("auto", num_splits=1, interpret=interpret, one_program=not kernel)
    xla = case.run("xla", num_splits=1, interpret=interpret)
    assert (auto != xla).any() == kernel
    if kernel:
        kernel_out = case.run("pallas", interpret=interpret, tuning=default_tuning(H))
        np.testing.assert_array_equal(auto, kernel_out)


def test_auto_on_hopper_is_xla_for_64_queries_a_head(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_attention, "on_hopper", lambda: True)
    case = Case([0], [20], [7], G=64, K=1, garbage=7.0)
    auto, xla = (case.run(x, num_splits=1, one_program=True) for x in ("auto", "xla"))
    np.testing.assert_array_equal(auto, xla)


def test_xla_takes_any_dtype_and_length():
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((2, 4, 24)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, 7, 24)), jnp.float32) for _ in range(2))
    new = jnp.asarray(rng.standard_normal((2, 2, 2, 24)), jnp.float32)
    rows, lengths = jnp.array([1, 0]), jnp.array([7, 3])
    pages = jnp.array([[1], [0]])
    caches = (jnp.stack(pair, axis=2) for pair in ((k, v), (v[:, :, :5], k[:, :, :5])))
    prompts, own = caches
    inputs = DecodeInputs(q, new, prompts, rows, lengths, own, pages, jnp.array([5, 1]))
    out, own_after = compiled(prefix_decode_attention, inputs)
    np.testing.assert_array_equal(own_after, own.at[[1, 0], :, :, [4, 0]].set(new))
    assert out.dtype == jnp.float32
    expected = compiled(prefix_decode_attention_reference, inputs)
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(P=96), "multiples of 64"),
        (dict(R=100), "multiples of 64"),
        (dict(H=96), "head_dim is 96"),
        (dict(G=64), "use 'xla'"),
    ],
)
def test_refusals_name_the_remedy(change: dict, message: str):
    case = Case(**{"prefix_rows": [0], "prefix_lengths": [4], "lengths": [4], **change})
    with pytest.raises(ValueError, match=message):
        case.run()


def test_refuses_other_dtypes():
    inputs = Case([0], [4], [4]).inputs()
    float32 = inputs._replace(q_BNH=inputs.q_BNH.astype(jnp.float32))
    with pytest.raises(ValueError, match="takes bfloat16"):
        prefix_decode_attention(float32, implementation="pallas")


def test_refuses_on_the_card_as_many_entries_a_block_as_a_head_has_dimensions():
    with pytest.raises(ValueError, match=r"use default_tuning\(64\)"):
        Case([0], [4], [4]).run(tuning=DecodeTuning(block=64), interpret=None)


def test_parts_are_of_what_a_window_leaves(monkeypatch: pytest.MonkeyPatch):
    found = {}

    def kernel(
        inputs: DecodeInputs, num_splits: int, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        found[options["window"]] = num_splits
        return inputs.q_BNH, inputs.own_OK2RH

    monkeypatch.setattr(decode_attention, "decode_attention_mosaic", kernel)
    for window in (None, 70):
        case = Case([0], [64], [64], H=128, P=64, R=8192, window=window)
        settings = dict(window=window, implementation="pallas")
        prefix_decode_attention(case.inputs(), **settings)
    assert found == {None: 16, 70: 1}
