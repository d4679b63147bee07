"""Drafts change how many steps a tail takes, and no token: against decoding one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pieces import Pieces
from test_generation import P, assert_same_tokens, model, prompts, run
from tiny_models import CONFIGS as TINY

from jaxrl_llm.generation.drafts import LONGEST, SHORTEST, Drafting, find_drafts, recorded
from jaxrl_llm.generation.in_graph import InGraphTurns
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import engine_sizes, most_drafts
from jaxrl_llm.generation.slots import DraftRecord, Slots
from jaxrl_llm.generation.stop_strings import stop_strings
from jaxrl_llm.generation.tail import SHORTEST_RESPONSE

R, GROUP, DRAFTS = 40, 4, 5


def repeated(count, group):
    """Prompts of groups, and limits of which a few are long."""
    tokens, lengths, _ = prompts(count)
    tokens, lengths = np.repeat(tokens, group, 0), np.repeat(lengths, group)
    ids = np.arange(count * group, dtype=np.uint32)
    limits = tuple(R if i % 5 == 0 else 2 + i % 7 for i in range(count * group))
    return (tokens, lengths, ids), limits


def with_and_without(tails=(12, 6), group=GROUP, limited=True, **options):
    """The outputs without drafts and with them."""
    rows, limits = repeated(4, group) if group > 1 else repeated(16, 1)
    options |= {"limits_N": limits} if limited else {}
    how = {"num_slots": 16, "group": group, "tail_slots": tails, **options}
    plain = run(*rows, **how)
    drafted = run(*rows, drafts=DRAFTS, **how)
    assert plain.drafts_offered is None
    return plain, drafted


def sampling(**how):
    return SamplingParams(max_new_tokens=R, **how)


STRINGS = stop_strings(("abab", "cbc"), Pieces())
CASES = {
    "greedy": {"sampling": sampling(temperature=0.0)},
    "temperature": {"sampling": sampling(temperature=0.4)},
    "stop tokens": {"sampling": sampling(temperature=0.4, stop_token_ids=(1, 2)), "limited": False},
    "stop strings": {
        "sampling": sampling(temperature=0.5, stop_token_ids=(20,), stop_strings=STRINGS),
        "limited": False,
    },
    "filters": {
        "sampling": sampling(temperature=0.7, top_k=6, top_p=0.9, stop_token_ids=(1,)),
        "record_kept": True,
    },
    "scarce pages": {
        "sampling": sampling(temperature=0.0),
        "tokens_a_page": 5,
        "cache_tokens": 160,
        "limited": False,
    },
    "window": {"family": "mistral", "sampling": sampling(temperature=0.0)},
    "experts": {
        "family": "experts",
        "sampling": sampling(temperature=0.4),
        "record_routes": True,
    },
    "window, sinks and experts": {
        "family": "gpt_oss",
        "sampling": sampling(temperature=0.2),
        "record_routes": True,
    },
    "no group": {"group": 1, "sampling": sampling(temperature=0.4)},
}


FAST = ("stop strings", "window, sinks and experts")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_tokens_are_those_of_decoding_one_by_one(case):
    plain, drafted = with_and_without(**case)
    assert_same_tokens(drafted, plain)
    for name in ("routes", "kept"):
        left, right = getattr(drafted, name), getattr(plain, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right)
    # Every token has a step of its own or is an accepted draft.
    assert drafted.live_slot_steps + drafted.drafts_accepted == plain.live_slot_steps
    assert 0 < drafted.drafts_accepted <= drafted.drafts_offered
    assert drafted.steps <= plain.steps


def test_a_text_that_repeats_itself_takes_few_steps():
    """Greedy answers of a tiny model soon repeat a few tokens."""
    (tokens, lengths, ids), _ = repeated(8, 1)
    lengths[1:] = 0  # seven of the eight slots are free
    how = {"num_slots": 8, "sampling": sampling(temperature=0.0), "tail_slots": (8,)}
    plain, drafted = (run(tokens, lengths, ids, **how, drafts=n) for n in (0, 7))
    assert_same_tokens(drafted, plain)
    assert plain.steps == R and drafted.steps < R / 2
    assert drafted.drafts_accepted == R - drafted.steps


def test_drafts_need_a_tail_of_few_slots_and_no_recurrent_state():
    def of(config, slots, response=SHORTEST_RESPONSE, **how):
        sampling = SamplingParams(max_new_tokens=response)
        settings = GenerationSettings(sampling=sampling, num_slots=slots, drafts=7, **how)
        rows = jax.ShapeDtypeStruct((slots, P), jnp.int32)
        sizes = engine_sizes(settings, rows, "xla")
        return sizes.tails, most_drafts(settings, config, sizes)

    config, hybrid = model()[0].config, TINY["qwen3_5"]
    assert of(config, 512) == ((384, 256, 160, 64), 7)
    assert of(config, 8) == ((8,), 7)
    assert of(config, 8, SHORTEST_RESPONSE - 1) == ((), 0)
    assert of(config, 1024, tail_slots=(512,)) == ((512,), 0)
    assert of(hybrid, 512)[1] == 0
    assert of(config, 512, turns=InGraphTurns(environment=None))[1] == 0


def test_drafts_that_save_nothing_pause():
    """Four live slots; one accepted draft in a step is enough for them."""
    live_S, no, one = np.arange(8) < 4, np.arange(8) < 4, np.arange(8) < 5
    record, resumes = DraftRecord(*[jnp.int32(0)] * 4), []
    step = 0
    for taken in [no] * 7 + [one, no]:
        record = recorded(record, jnp.int32(step), live_S, np.arange(8) < 6, taken)
        resumes.append(int(record.resume) - step - 1)
        step = int(record.resume)
    assert resumes == [0, 0, 1, 3, 7, 15, 15, 0, 0]
    assert (int(record.offered), int(record.accepted)) == (18, 1)


def followed(text, own, sequence, most):
    """The rule of `find_drafts` in plain Python. `own` is where the sample's response is in text.

    The text has -1 where nothing was written.
    """
    runs = []
    for place in range(len(text) - 1):
        run = 0
        while run < LONGEST and run < len(sequence) and place >= run:
            if text[place - run] != sequence[-1 - run]:
                break
            run += 1
        if run >= SHORTEST and text[place + 1] >= 0:
            runs.append((run, place in own, place))
    if not runs:
        return [-1] * most
    run, is_own, place = max(runs)
    text, drafts = list(text), []
    for number in range(most):
        draft = text[place + 1 + number] if place + 1 + number < len(text) else -1
        drafts.append(draft if number < run else -1)
        if is_own:
            text[own[-1] + 1 + number : own[-1] + 2 + number] = [draft]
    return drafts


def test_drafts_are_what_followed_the_longest_equal_run():
    rng = np.random.default_rng(0)
    most, groups, group = 4, 40, 3
    num, width, response = groups * group, 9, 14
    prompt_lengths = np.repeat(rng.integers(1, width + 1, groups), group).astype(np.int32)
    prompt_tokens = np.repeat(rng.integers(0, 2, (groups, width)), group, 0).astype(np.int32)
    counts = rng.integers(0, response, num).astype(np.int32)
    tokens = rng.integers(0, 2, (num, response)).astype(np.int32)
    tokens = np.where(np.arange(response) < counts[:, None], tokens, -1)
    slot_rows = rng.permutation(num)[:50].astype(np.int32)
    zeros = np.zeros(50, np.int32)
    slots = Slots(slot_rows, zeros, zeros, counts[slot_rows], zeros == 0)
    drafting = Drafting(most, prompt_tokens, prompt_lengths, group)
    found = np.asarray(find_drafts(*jax.tree.map(jnp.asarray, (drafting, slots, tokens))))
    for drafts, row in zip(found, slot_rows, strict=True):
        first = row // group * group
        prompt = prompt_tokens[row, : prompt_lengths[row]].tolist()
        text = prompt + [-1] * (width - len(prompt))
        text += tokens[first : first + group].ravel().tolist()
        begin = width + (row - first) * response
        own = range(begin, begin + counts[row])
        assert drafts.tolist() == followed(
            text, own, prompt + tokens[row, : counts[row]].tolist(), most
        )
    assert (found >= 0).any(axis=1).mean() > 0.5 and (found[:, -1] >= 0).any()
