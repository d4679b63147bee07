"""Sessions of the engine: against the batch loop, a full forward pass, and each other."""

from functools import partial

import jax
import numpy as np
import pytest
from further import further
from test_generation import VOCAB, P, R, full_logits_jit, model, prompts, run

from jaxrl_llm.generation import session
from jaxrl_llm.generation.filters import kept_of_rows, kept_tokens
from jaxrl_llm.generation.page_pool import PagePool
from jaxrl_llm.generation.sampler import RowSampling, SamplingParams, sample, sample_rows
from jaxrl_llm.generation.sequence import Sampling
from jaxrl_llm.generation.session import Engine, EngineSettings

STOPS = (1, 2, 5)
KEY = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(7), 2)))
CONTEXT, TURNS, TURN = 40, 3, 6


def engine_of(family="qwen2", **settings):
    defaults = {
        "max_context": P + R,
        "cache_tokens": 3 * (P + R),
        "stop_ids": STOPS,
        "entries": 4,
        "sampling": SamplingParams(max_new_tokens=R),
    }
    return Engine(*model(family), EngineSettings(**defaults | settings))


def answer(engine, *, shared=False, order=range(7)):
    """One turn of each prompt, in the order of the prompts."""
    tokens, lengths, ids = prompts(7)
    sequences = {}
    for i in order:
        prompt = tokens[i, : lengths[i]].tolist()
        beginning = engine.beginning(prompt) if shared else None
        sequences[i] = engine.add(
            prompt, limit=R, seed_key=KEY, sample_id=int(ids[i]), beginning=beginning
        )
    while engine.has_work:
        for sequence in engine.step():
            if sequence.status == "waiting":
                engine.finish(sequence)
    return [sequences[i] for i in range(7)]


@pytest.mark.parametrize("family", further(["qwen2", "gpt_oss"]))
@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"num_slots": 3, "steps": 4}, False),
        ({"num_slots": 4, "steps": 5, "num_beginnings": 3, "beginning_tokens": P}, True),
        ({"num_slots": 4, "steps": 16, "sampling": None, "fixed_shapes": False}, False),
    ],
)
def test_a_turn_has_the_tokens_of_the_batch_loop(family, settings, shared):
    tokens, lengths, ids = prompts(7)
    whole = run(tokens, lengths, ids, num_slots=0, family=family)
    sequences = answer(engine_of(family, **settings), shared=shared)
    for i, sequence in enumerate(sequences):
        expected = whole.tokens[i][whole.mask[i] == 1].tolist()
        assert sequence.response == expected
        logprobs = np.array(sequence.logprobs[lengths[i] :])
        np.testing.assert_allclose(logprobs, whole.logprobs[i][: len(expected)], atol=1e-5)
        assert sequence.stop_reason == ("stop" if whole.finished[i] else "length")


def test_calls_of_any_size_have_few_shapes(monkeypatch):
    """Each shape is a program that the first caller waits for."""
    seen, extend = set(), session._extend

    def recorded(*arguments, **options):
        given = arguments[3]
        seen.add((given.tokens_AL.shape, given.pages_AT.shape, *options.values()))
        return extend(*arguments, **options)

    monkeypatch.setattr(session, "_extend", recorded)
    monkeypatch.setattr(session, "on_gpu", lambda: True)
    monkeypatch.setattr(session, "FEWEST_EXTENDED", 2)
    monkeypatch.setattr(session, "COMPUTED", 8)
    engine = engine_of(num_slots=32, max_context=64, cache_tokens=2048, fixed_shapes=False)
    waiting, added = [], 0
    for number in (1, 2, 3, 5, 9, 14, 20):
        for sequence in waiting[:number]:
            engine.append(sequence, [7, 8, 9, 10], limit=2)
        waiting = waiting[number:]
        for _ in range(number):
            waiting.append(
                engine.add([added % 20, 8, 9, 10, 11], limit=2, seed_key=KEY, sample_id=added)
            )
            added += 1
        while engine.has_work:
            engine.step()
    assert added > 50 and {sees for *_, sees in seen} == {False, True}
    assert len(seen) <= 7, seen


def converse(engine, *, shared=False, order=range(7)):
    """Three turns of each prompt, with observations between them."""
    rng, (tokens, lengths, ids) = np.random.default_rng(3), prompts(7)
    observed = rng.integers(6, VOCAB, (7, TURNS - 1, 5)).tolist()
    sizes = rng.integers(1, 6, (7, TURNS - 1))
    sequences, turn = {}, {}
    for i in order:
        prompt = tokens[i, : lengths[i]].tolist()
        beginning = engine.beginning(prompt) if shared else None
        sequences[i] = engine.add(
            prompt, limit=TURN, seed_key=KEY, sample_id=int(ids[i]), beginning=beginning
        )
        turn[sequences[i]] = (i, 0)
    while engine.has_work:
        for sequence in engine.step():
            if sequence.status != "waiting":
                continue
            i, number = turn[sequence]
            if number == TURNS - 1:
                engine.finish(sequence)
                continue
            turn[sequence] = (i, number + 1)
            engine.append(sequence, observed[i][number][: sizes[i, number]], limit=TURN)
    return [sequences[i] for i in range(7)]


@pytest.mark.parametrize(("family", "fixed"), further([("qwen2", True), ("gpt_oss", False)]))
def test_turns_have_the_log_probs_of_a_full_forward_pass(family, fixed, monkeypatch):
    """However observations are computed: at once, in decode steps, after a shared prompt."""
    settings = {"max_context": CONTEXT, "cache_tokens": 4 * CONTEXT, "steps": 5}
    seen = []
    for fewest, shared, slots in ((0, False, 8), (2, True, 3), (100, False, 4)):
        monkeypatch.setattr(session, "FEWEST_EXTENDED", fewest)
        rows = {"num_beginnings": 3, "beginning_tokens": P} if shared else {}
        engine = engine_of(family, num_slots=slots, fixed_shapes=fixed, **settings, **rows)
        sequences = converse(engine, shared=shared)
        assert engine._pool.num_free == engine._pool.num_pages
        seen.append([x.tokens for x in sequences])
        for each in sequences:
            padded = np.zeros(P + R if len(each.tokens) <= P + R else CONTEXT, np.int32)
            padded[: len(each.tokens)] = each.tokens
            logits = np.asarray(full_logits_jit(family, model(family)[1], padded), np.float64)
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for place in np.flatnonzero(each.sampled):
                expected = logprobs[place - 1, each.tokens[place]]
                assert each.logprobs[place] == pytest.approx(expected, abs=1e-5)
            assert not any(each.sampled[: each.num_prompt])
    assert seen[0] == seen[1] == seen[2]


def test_float32_has_the_same_bits_in_any_order_slots_and_steps():
    settings = {"max_context": CONTEXT, "cache_tokens": 4 * CONTEXT}
    first = converse(engine_of(num_slots=8, steps=32, **settings))
    orders = (range(7), [3, 1, 2, 0, 6, 5, 4])
    for slots, steps, order in ((2, 3, orders[1]), (3, 4, orders[0])):
        again = converse(engine_of(num_slots=slots, steps=steps, **settings), order=order)
        for one, other in zip(first, again, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_scarce_pages_make_sequences_wait_and_change_nothing():
    roomy = answer(engine_of(num_slots=7, cache_tokens=1000))
    scarce = engine_of(num_slots=7, cache_tokens=P + R)
    for one, other in zip(roomy, answer(scarce), strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_an_old_sequence_comes_back_when_younger_ones_hold_slots_and_pages():
    """The younger ones wait for pages that are held back for it, and it waits for a slot."""
    engine = engine_of(max_context=40, cache_tokens=56, num_slots=2, stop_ids=())
    add = partial(engine.add, [7, 8, 9], seed_key=KEY)
    old = add(limit=1, sample_id=0)
    engine.step(1)
    young = [add(limit=37, sample_id=i) for i in (1, 2)]
    for _ in range(3):
        engine.step(8)
    engine.append(old, [5], limit=30)
    for _ in range(100):
        for sequence in engine.step(8):
            if sequence.status == "waiting":
                engine.finish(sequence)
    assert [len(x.tokens) for x in (old, *young)] == [35, 40, 40]
    alone = engine_of(max_context=40, cache_tokens=400, num_slots=2, stop_ids=())
    one = alone.add([7, 8, 9], seed_key=KEY, limit=37, sample_id=2)
    while alone.has_work:
        alone.step()
    assert one.tokens == young[1].tokens


def test_without_a_size_the_cache_has_room_for_every_slot():
    """A page is shorter than a response, so the numbers of ids alone would give too few pages."""
    rows = {"num_beginnings": 7, "beginning_tokens": P}
    engine = engine_of(num_slots=7, cache_tokens=0, entries=R - 1, stop_ids=(), **rows)
    tokens, lengths, ids = prompts(7)
    for i in range(7):
        prompt = tokens[i, : lengths[i]].tolist()
        beginning = engine.beginning(prompt)
        engine.add(prompt, limit=R, seed_key=KEY, sample_id=int(ids[i]), beginning=beginning)
    engine.step(enough=7)
    assert engine.counts()["waiting"] == 7 and engine.num_steps == R


def test_an_equal_beginning_is_not_computed_again():
    prompt = np.random.default_rng(0).integers(6, VOCAB, 30).tolist()
    engine = engine_of(max_context=CONTEXT, cache_tokens=4 * CONTEXT, num_slots=2)
    texts = []
    for ending in ([7, 8], [7, 8], [9]):
        before = engine.num_computed
        sequence = engine.add(prompt + ending, limit=4, seed_key=KEY, sample_id=1)
        while engine.has_work:
            engine.step()
        engine.finish(sequence)
        texts.append((engine.num_computed - before, sequence.tokens, sequence.logprobs))
    assert [computed for computed, *_ in texts] == [31, 31 - 28, 30 - 28]
    assert texts[0][1:] == texts[1][1:]


def test_an_equal_beginning_that_comes_at_once_is_not_computed_again():
    """The choices of a request, and another request that begins with half of its prompt."""
    prompt = np.random.default_rng(0).integers(6, VOCAB, 30).tolist()
    prompts = [[*prompt, 7, 8], [*prompt, 7, 8], [*prompt[:16], 9, 9, 9], [*prompt, 7, 8]]

    def answered(together: bool) -> tuple[int, list]:
        engine = engine_of(max_context=CONTEXT, cache_tokens=4 * CONTEXT, num_slots=4)
        sequences = []
        for i, ids in enumerate(prompts):
            sequences.append(engine.add(ids, limit=4, seed_key=KEY, sample_id=i))
            while engine.has_work and not (together and i < 3):
                engine.step()
        return engine.num_computed, [(s.tokens, s.logprobs) for s in sequences]

    computed, sequences = answered(together=True)
    # A page has 4 ids, and the last id of a prompt is decoded.
    assert computed == 31 + 2 * (31 - 28) + (18 - 16)
    assert (computed, sequences) == answered(together=False)


def test_the_experts_of_every_computed_id_are_recorded():
    """Also where an equal prompt was computed before, and where a sequence is computed again."""
    settings = {"max_context": CONTEXT, "record_routes": True, "stop_ids": ()}
    engine = engine_of("experts", num_slots=2, cache_tokens=4 * CONTEXT, **settings)
    prompt = np.random.default_rng(0).integers(6, VOCAB, 30).tolist()
    all_routes = []
    for _ in range(2):
        sequence = engine.add(prompt, limit=4, seed_key=KEY, sample_id=1)
        while engine.has_work:
            engine.step()
        engine.finish(sequence)
        all_routes.append(np.concatenate(sequence.all_routes))
        assert len(all_routes[-1]) == len(sequence.tokens) - 1
    np.testing.assert_array_equal(*all_routes)
    scarce = engine_of("experts", num_slots=2, cache_tokens=56, **settings)
    old = scarce.add([7, 8, 9], limit=1, seed_key=KEY, sample_id=0)
    scarce.step(1)
    young = [scarce.add([7, 8, 9], limit=37, seed_key=KEY, sample_id=i) for i in (1, 2)]
    for _ in range(3):
        scarce.step(8)
    scarce.append(old, [5], limit=30)
    while scarce.has_work:
        for sequence in scarce.step(8):
            if sequence.status == "waiting":
                scarce.finish(sequence)
    for sequence in (old, *young):
        assert len(np.concatenate(sequence.all_routes)) == len(sequence.tokens) - 1


def test_a_sequence_that_waits_for_a_row_lets_readers_of_the_rows_pass():
    """They came later, as environments begin in any order. The run hung here."""
    engine = engine_of(num_slots=1, num_beginnings=1, beginning_tokens=P)
    tokens, lengths, ids = prompts(7)
    two = [tokens[i, : lengths[i]].tolist() for i in (0, 1)]
    rows = [engine.beginning(prompt) for prompt in two]
    added = [
        engine.add(two[i], limit=4, seed_key=KEY, sample_id=n, beginning=rows[i])
        for n, i in enumerate((0, 1, 0))
    ]
    for _ in range(20):
        for sequence in engine.step():
            if sequence.status == "waiting":
                engine.finish(sequence)
    assert [sequence.status for sequence in added] == ["ended"] * 3


def test_an_aborted_sequence_gives_its_pages_back():
    engine = engine_of(num_slots=2)
    sequences = [
        engine.add([7, 8, 9], limit=R, seed_key=KEY, sample_id=i, sampling=Sampling())
        for i in range(3)
    ]
    engine.step(1)
    engine.abort(sequences[0])
    engine.abort(sequences[2])  # it was not begun
    assert [x.stop_reason for x in sequences] == ["aborted", None, "aborted"]
    while engine.has_work:
        engine.step()
    engine.finish(sequences[1])
    assert engine._pool.num_free == engine._pool.num_pages
    assert engine.counts() == {"queued": 0, "running": 0, "waiting": 0}


def test_a_prompt_that_leaves_no_room_is_refused():
    engine = engine_of(num_slots=1)
    with pytest.raises(ValueError, match="18 ids, and a sequence at most 18"):
        engine.add([7] * (P + R), limit=1, seed_key=KEY, sample_id=0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0),
     (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 7, 0.6, 0.05)],
)  # fmt: skip
def test_settings_of_a_row_give_what_they_give_for_all(temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(6, 200)) * 2).astype(np.float32)
    keys = rng.integers(0, 2**32, (6, 2), dtype=np.uint32)
    others = Sampling(temperature=0.5, top_k=3)
    mine = Sampling(temperature, top_k, top_p, min_p)
    chosen = [mine, others, mine, others, mine, mine]
    columns = zip(*((x.temperature, x.top_k, x.top_p, x.min_p) for x in chosen), strict=True)
    arrays = [np.array(x, t) for x, t in zip(columns, ("f4", "i4", "f4", "f4"), strict=True)]
    tokens, logprobs, _ = sample_rows(logits, keys, RowSampling(*arrays), filters=True)
    params = SamplingParams(
        max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    expected = sample(logits, keys, params)
    rows = [0, 2, 4, 5]
    np.testing.assert_array_equal(np.asarray(tokens)[rows], np.asarray(expected.tokens_B)[rows])
    np.testing.assert_allclose(
        np.asarray(logprobs)[rows], np.asarray(expected.logprobs_B)[rows], atol=1e-6
    )


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.5, 0.0), (4, 0.9, 0.1)])
def test_rows_keep_equal_numbers_as_filters_do(top_k, top_p, min_p):
    logits = np.array([[1, 3, 3, 2, 0, 3, -1, 2], [0, 0, 0, 0, 0, 0, 0, 9]], np.float32)
    full = [np.full(2, x, t) for x, t in ((top_k, "i4"), (top_p, "f4"), (min_p, "f4"))]
    rows = kept_of_rows(logits, top_k=full[0], top_p=full[1], min_p=full[2])
    same = kept_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    for one, other in zip(np.asarray(rows.z_BK), np.asarray(same.z_BK), strict=True):
        np.testing.assert_array_equal(sorted(one[one > -9]), sorted(other[other > -9]))


def test_pages_are_found_by_their_tokens_and_taken_when_they_run_out():
    pool = PagePool(4, 2)
    first = pool.take(3)
    assert pool.note(first, [1, 2, 3, 4, 5], 5) == 2
    pool.release(first)
    assert pool.num_free == 4
    held = pool.match([1, 2, 3, 9])
    assert held == first[:1]
    assert pool.take(3) and pool.num_free == 0  # the page of (3, 4) too
    assert pool.match([1, 2, 3, 4]) == first[:1]


def test_a_page_that_is_taken_takes_what_follows_it_out_of_the_tree():
    pool = PagePool(3, 1)
    pages = pool.take(3)
    pool.note(pages, [1, 2, 3], 3)
    pool.release(pages[1:2])
    pool.release(pages[2:])
    assert pool.take(1) == pages[1:2]
    assert pool.match([1, 2, 3]) == pages[:1]
    assert pool.num_free == 1
