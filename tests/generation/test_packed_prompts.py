"""Prompts packed into the rows of a prefill, against a loop over prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.generation.packed_prompts import (
    RowSizes,
    pack_prompts,
    prefill_rows,
    row_sizes,
)


def packed_by_hand(lengths, sizes):
    """Rows of (prompt, position) pairs."""
    rows, prompts = [], []
    for prompt, length in enumerate(lengths):
        fits = rows and len(rows[-1]) + length <= sizes.tokens
        if not fits or len(prompts[-1]) == sizes.prompts:
            rows.append([])
            prompts.append([])
        prompts[-1].append(prompt)
        rows[-1] += [(prompt, position) for position in range(length)]
    return rows, prompts


pack_jit = jax.jit(pack_prompts, static_argnums=2)
rows_jit = jax.jit(prefill_rows, static_argnums=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rows", "tokens", "prompts"), [(1, 7, 1), (2, 7, 4), (3, 20, 5), (4, 64, 99)]
)
def test_rows_equal_a_loop_over_prompts(rows, tokens, prompts, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    absent = 44 - count if seed else 0  # one length, so that few programs are compiled
    lengths = rng.integers(0, 8, count)
    lengths[rng.random(count) < 0.2] = 0
    sizes = RowSizes(rows=rows, tokens=tokens, prompts=prompts)
    expected, of_rows = packed_by_hand(lengths, sizes)

    given = jnp.array(np.append(lengths, np.zeros(absent)), jnp.int32)
    packed = pack_jit(given, jnp.int32(count), sizes)
    seen = 0
    for number in range(-(-len(expected) // rows)):
        found = rows_jit(packed, sizes, jnp.int32(number))
        mine = slice(number * rows, (number + 1) * rows)
        assert found.num_prompts == sum(map(len, of_rows[mine]))
        for row, tokens_of_row in enumerate(expected[mine]):
            real = np.asarray(found.real_AL[row])
            assert real.sum() == len(tokens_of_row) and real[: len(tokens_of_row)].all()
            pairs = np.stack([found.prompt_AL[row], found.position_AL[row]], axis=1)[real]
            assert [tuple(pair) for pair in pairs] == tokens_of_row
            np.testing.assert_array_equal(np.asarray(found.place_AL[row])[real], pairs[:, 0] - seen)
        assert not found.real_AL[len(expected[mine]) :].any()
        seen += int(found.num_prompts)
    assert seen == count
    after = rows_jit(packed, sizes, jnp.int32(number + 1))
    assert not after.real_AL.any() and after.num_prompts == 0


@pytest.mark.parametrize(
    ("attention", "width", "wanted", "most", "rows", "tokens", "prompts"),
    [
        ("pallas", 512, 128, 128, 4, 2048, 16),  # 8,192 tokens, as many prompts of 128
        ("pallas", 512, 128, 32, 4, 2048, 8),  # rows of the cache are to be few
        ("pallas", 512, 128, 1, 4, 2048, 4),  # but as many as there may be long prompts
        ("pallas", 512, 2, 9, 1, 1024, 8),  # no more long ones than the slots take
        ("pallas", 512, 5, 5, 2, 1536, 3),  # not 8 in two rows
        ("pallas", 4096, 128, 128, 2, 4096, 4),
        ("pallas", 20_000, 128, 128, 1, 20_000, 4),
        ("xla", 512, 128, 128, 16, 512, 4),  # every pair of tokens of a row is computed
        ("cudnn", 512, 128, 128, 16, 512, 1),  # takes no packed rows
        ("xla", 6, 3, 3, 3, 6, 1),
        ("xla", 0, 1, 1, 1, 1, 1),
    ],
)
def test_sizes_of_a_prefill(attention, width, wanted, most, rows, tokens, prompts):
    sizes = row_sizes(width, wanted, most=most, attention=attention)
    assert sizes == RowSizes(rows=rows, tokens=tokens, prompts=prompts)
