"""The gated delta rule by chunks against a loop over tokens, for rows of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrl_llm.kernels import gated_delta as rule
from jaxrl_llm.kernels.gated_delta import (
    Begin,
    Inputs,
    Runs,
    Streams,
    chunking_of,
    chunks,
    convolution,
    scan,
    step,
)
from jaxrl_llm.kernels.gated_delta import runs as cutting
from jaxrl_llm.kernels.gated_delta.scan_kernel import scan_in_kernel
from jaxrl_llm.kernels.gated_delta.step_kernel import step_in_kernel

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the interpreter transposes, and loads from references, from 0.11 on",
)
G, N, H, V, W = 2, 4, 6, 5, 4
# Two prompts of a row with two and three responses, then padding. Several runs share a chunk of 8.
# No prompt ends in the chunk between the last prompt and the last run that answers it.
PROMPTS, RESPONSES = (5, 11), ((3, 7), (2, 17, 4))


def inputs_of(rng, tokens):
    """Streams of one row; decays from strong to nearly none."""

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    shapes = ((G, H), (G, H), (N, V))
    return Inputs(
        streams=Streams(*(normal(1, tokens, *shape) for shape in shapes)),
        kernels=Streams(*(normal(*shape, W) for shape in shapes)),
        log_decay_BTN=-np.exp(2 * normal(1, tokens, N) - 2),
        rate_BTN=1 / (1 + np.exp(normal(1, tokens, N))),
    )


def by_tokens(inputs):
    """The outputs of one sample, token by token in float64, and the last memory."""

    def silu(x):
        return x / (1 + np.exp(-x))

    streams, kernels, log_decay, rate = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)
    length, memory, found = log_decay.shape[1], np.zeros((N, H, V)), []
    for t in range(length):
        seen = [x[0, max(t - W + 1, 0) : t + 1] for x in streams]
        q, k, v = (
            silu(sum(x[-1 - i] * w[..., -1 - i] for i in range(len(x))))
            for x, w in zip(seen, kernels, strict=True)
        )
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        for n in range(N):
            own_k, own_q = k[n // (N // G)], q[n // (N // G)] * H**-0.5
            memory[n] *= np.exp(log_decay[0, t, n])
            change = rate[0, t, n] * (v[n] - memory[n].T @ own_k)
            memory[n] += np.outer(own_k, change)
            found.append(memory[n].T @ own_q)
    return np.array(found).reshape(length, N, V), memory


def packed(prompts=PROMPTS, every=RESPONSES):
    """Runs of the row, and for each sample the tokens that it consists of."""
    start, begin, end, samples, at = [], [], [], [], 0
    for prompt, responses in zip(prompts, every, strict=True):
        of_prompt = np.arange(at, at + prompt)
        for i, length in enumerate(responses):
            first = at if i == 0 else len(start)
            size = length + (prompt if i == 0 else 0)
            apart = (0, 0) if i == 0 else (at, at + prompt)
            own = np.arange(len(start), len(start) + size)
            samples.append(own if i == 0 else np.concatenate([of_prompt, own]))
            start += [first] * size
            begin += [apart[0]] * size
            end += [apart[1]] * size
        at = len(start)
    padding = 3
    start += [at + padding] * padding
    begin, end = begin + [0] * padding, end + [0] * padding
    return Runs(*(np.array([x], np.int32) for x in (start, begin, end))), samples


def parts_of(inputs, tokens):
    """The inputs of some tokens of the row."""
    streams, kernels, *rates = inputs
    of = [jax.tree.map(lambda x: x[:, tokens], x) for x in (streams, *rates)]
    return Inputs(of[0], kernels, *of[1:])


def test_packed_rows(monkeypatch):
    """Every response continues the state of its own prompt, wherever chunks are cut."""
    monkeypatch.setattr(cutting, "CHUNK", 8)
    runs, samples = packed()
    inputs = inputs_of(np.random.default_rng(0), runs.start_BT.shape[1])
    out = jax.jit(lambda inputs: rule.gated_delta(inputs, chunking_of(runs, W)))(inputs)
    for tokens in samples:
        expected, _ = by_tokens(parts_of(inputs, tokens))
        np.testing.assert_allclose(out[0, tokens], expected, atol=2e-5)


def test_gradients_of_a_shared_prompt(monkeypatch):
    """A packed row has the gradient of its samples in rows of their own."""
    monkeypatch.setattr(cutting, "CHUNK", 8)
    runs, samples = packed()
    rng = np.random.default_rng(1)
    inputs = inputs_of(rng, runs.start_BT.shape[1])
    weights = [rng.normal(size=(len(s), N, V)).astype(np.float32) for s in samples]
    longest = max(map(len, samples))

    def together(inputs):
        out = rule.gated_delta(inputs, chunking_of(runs, W))[0]
        return sum((out[s] * w).sum() for s, w in zip(samples, weights, strict=True))

    def apart(inputs):
        rows = [parts_of(inputs, np.resize(s, longest)) for s in samples]  # padded at the end
        streams, rates = (
            jax.tree.map(lambda *x: jnp.concatenate(x), *(pick(row) for row in rows))
            for pick in (lambda row: row.streams, lambda row: row[2:])
        )
        none = jnp.zeros((len(samples), longest), jnp.int32)
        out = rule.gated_delta(Inputs(streams, inputs.kernels, *rates), chunking_of(Runs(none), W))
        return sum((x[: len(w)] * w).sum() for x, w in zip(out, weights, strict=True))

    found, expected = (jax.jit(jax.grad(f))(inputs) for f in (together, apart))
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("width", [2, 4, 11])  # the last one is more than a chunk
def test_the_convolution_and_its_gradient(monkeypatch, width):
    """Of random rows, with runs of one token: each tap is a matrix of 0 and 1."""
    monkeypatch.setattr(cutting, "CHUNK", 8)
    rng = np.random.default_rng(width)
    prompts = rng.integers(1, 14, 9)
    responses = [rng.integers(1, 9, rng.integers(1, 6)) for _ in prompts]
    runs, samples = packed(prompts, responses)
    length = runs.start_BT.shape[1]
    taps = np.zeros((width, length, length), np.float32)  # [back, token, the one that it takes]
    for sample in samples:
        for back in range(width):
            taps[back, sample[back:], sample[: max(len(sample) - back, 0)]] = 1
    real = runs.start_BT[0] <= np.arange(length)
    x, given = rng.normal(size=(2, 1, length, G * H)).astype(np.float32)
    given *= real[:, None]
    kernel = rng.normal(size=(G * H, width)).astype(np.float32)

    @jax.jit
    def run(x, kernel, given):
        chunking = chunking_of(runs, width)
        out, pull = jax.vjp(lambda *args: convolution.convolved(*args, chunking), x, kernel)
        return out, *pull(given)

    out, of_x, of_kernel = run(x, kernel, given)
    back = kernel[:, ::-1]
    expected = np.einsum("bts,xse,eb->xte", taps, x, back)
    np.testing.assert_allclose(out[:, real], expected[:, real], atol=2e-5)
    expected = np.einsum("bts,xte,eb->xse", taps, given, back)
    np.testing.assert_allclose(of_x, expected, atol=2e-5)
    expected = np.einsum("bts,xse,xte->eb", taps, x, given)[:, ::-1]
    np.testing.assert_allclose(of_kernel, expected, atol=1e-4)


def test_states_and_steps(monkeypatch):
    """A state in the middle of a row, and steps from it, continue the sample.

    The last run begins inside a chunk that the run before it enters.
    """
    monkeypatch.setattr(cutting, "CHUNK", 8)
    start, length = 10, 23
    inputs = inputs_of(np.random.default_rng(2), length)
    runs = Runs(np.array([[0] * 3 + [3] * 7 + [start] * 13], np.int32))
    last = np.array([[-1, 0, start + 2, start + 9]])
    run = jax.jit(lambda inputs: rule.gated_delta_states(inputs, chunking_of(runs, W), last))
    out, states = jax.device_get(run(inputs))
    whole, memory = by_tokens(parts_of(inputs, np.arange(start, length)))
    np.testing.assert_allclose(out[0, start:], whole, atol=2e-5)
    assert not any(np.any(x[0, 0]) for x in jax.tree.leaves(states))
    for i, tokens in ((1, np.arange(1)), (2, np.arange(start, start + 3))):
        _, expected = by_tokens(parts_of(inputs, tokens))
        np.testing.assert_allclose(states.memory[0, i].swapaxes(1, 2), expected, atol=2e-5)
    np.testing.assert_array_equal(states.window[0, 1, :2], 0)  # before the first token
    state, step = jax.tree.map(lambda x: x[0, 3:], states), jax.jit(rule.gated_delta_step)
    for token in range(start + 10, length):
        out, state = step(parts_of(inputs, np.array([token])), state, np.array([True]))
        np.testing.assert_allclose(out[0, 0], whole[token - start], atol=2e-5)
    np.testing.assert_allclose(state.memory[0].swapaxes(1, 2), memory, atol=2e-5)


def test_slots_that_begin_and_free_slots():
    """A slot goes on from its own or its prompt's state. A free one keeps its state and gives 0."""
    inputs = inputs_of(np.random.default_rng(5), 6)
    whole, memory = by_tokens(inputs)
    chunking, last = chunking_of(Runs(np.zeros((1, 6), np.int32)), W), np.array([[3, 4]])
    states = jax.jit(lambda inputs: rule.gated_delta_states(inputs, chunking, last)[1])(inputs)
    prompts = jax.tree.map(lambda x: np.asarray(x[0]), states)
    tokens = [5, 4, 5]
    streams, *rates = jax.tree.map(
        lambda x: x[0, tokens][:, None], (inputs.streams, inputs.log_decay_BTN, inputs.rate_BTN)
    )
    own = jax.tree.map(lambda x: np.full((3, *x.shape[1:]), np.nan, x.dtype), prompts)
    for x, of_prompt in zip(own, prompts, strict=True):
        x[1:] = of_prompt[0]
    for x in (*streams, *rates):
        x[2] = np.nan
    begin = Begin(prompts, first_B=np.array([True, False, True]), rows_B=np.array([1, 0, 0]))
    token = Inputs(streams, inputs.kernels, *rates)
    out, after = jax.jit(rule.gated_delta_step)(token, own, np.array([True, True, False]), begin)
    np.testing.assert_allclose(out[:2, 0], whole[tokens[:2]], atol=2e-5)
    np.testing.assert_allclose(after.memory[0].swapaxes(1, 2), memory, atol=2e-5)
    for x, of_prompt, before in zip(after, prompts, own, strict=True):
        np.testing.assert_allclose(x[1], of_prompt[1], atol=2e-5)
        np.testing.assert_array_equal(x[2], before[2])
    np.testing.assert_array_equal(out[2], 0)


def test_inverse_of_equal_keys():
    """Equal tokens without decay: sums of powers of this matrix would lose all digits."""
    below = np.tril(np.ones((64, 64), np.float32), -1)
    gradient = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)

    @jax.jit
    def run(below, gradient):
        inverse, pull = jax.vjp(chunks.unit_lower_inverse, below)
        return inverse, pull(gradient)[0]

    inverse, found = run(below, gradient)
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))
    exact = np.linalg.inv(np.eye(64) + np.tril(np.ones((64, 64)), -1))
    np.testing.assert_allclose(found, -exact.T @ gradient @ exact.T, atol=1e-4)


def test_inverses_of_two_short_rows():
    """Programs of jax 0.10 for a CPU crashed on these dims."""
    below = np.tril(np.random.default_rng(5).normal(size=(1, 2, 3, 16, 16)), -1) / 10
    found = jax.jit(chunks.unit_lower_inverse)(below.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(16) + below), atol=1e-6)


def test_each_gradient_of_the_states():
    """Of all that the recurrence reads, against jax's own gradient of the scan over chunks."""
    rng = np.random.default_rng(4)
    X, B, heads, P, C = 3, 2, 2, 2, 4
    shapes = ((C, H), (C, H), (P, C), (P, C), (P, P), (C, V))
    moves = scan.Moves(
        *(rng.normal(size=(X, B, heads, *shape)).astype(np.float32) / 2 for shape in shapes)
    )

    @jax.jit
    def run(moves):
        states, pull = jax.vjp(scan.scan_chunks, moves)
        plain, pull_plain = jax.vjp(scan._run, moves)
        given = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)), states)
        return (states, pull(given)), (plain, pull_plain(given))

    found, expected = run(moves)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@interpreted
@pytest.mark.parametrize(("states", "reverse"), [(1, False), (2, True)])
def test_the_kernel_of_the_states(states, reverse):
    """Three chunks against a loop in float64. A factor counts with 17 bits."""
    rng = np.random.default_rng(states)
    X, B, heads, C, keys, values = 3, 1, 1, 64, 64, 32

    def array(*shape):
        return rng.normal(size=(X, B, heads, *shape)).astype(np.float32)

    moves = scan.Moves(
        left_XBNCH=array(C, keys) / 8,
        right_XBNCH=array(C, keys) / 8,
        enters_XBNPC=array(states, C),
        leaves_XBNPC=array(states, C),
        keeps_XBNPQ=array(states, states),
        own_XBNCV=array(C, values),
    )
    added = array(keys, states, values) if reverse else None
    run = jax.jit(lambda moves, added: scan_in_kernel(*moves, added, InterpretGPUParams()))
    starts, found = run(moves, added)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), moves)
    state = np.zeros((B, heads, keys, states, values))
    for x in range(X)[:: -1 if reverse else 1]:
        left, right, enters, leaves, keeps, own = (each[x] for each in exact)
        np.testing.assert_allclose(starts[x], state, atol=1e-4 * max(1, np.abs(state).max()))
        read = np.einsum("bnpc,bnch,bnhpv->bncv", enters, left, state)
        np.testing.assert_allclose(found[x], own + read, atol=1e-4 * max(1, np.abs(read).max()))
        write = np.einsum("bnch,bnpc,bncv->bnhpv", right, leaves, own + read)
        state = np.einsum("bnpq,bnhqv->bnhpv", keeps, state) + write
        state += added[x] if reverse else 0


@interpreted
@pytest.mark.parametrize("begins", [False, True])
def test_the_kernel_of_a_token(begins):
    """Slots that go on, are free, or begin with a prompt; two value heads share a key head."""
    rng = np.random.default_rng(7)
    slots, keys, values = 3, 64, 64

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    own, prompts = array(slots, 2, values, keys), array(3, 2, values, keys)
    token = array(slots, 1, keys), array(slots, 1, keys), array(slots, 2, values)
    token = (*token, rng.uniform(size=(slots, 2)).astype(np.float32), array(slots, 2))
    source = np.array([0, -1, 3 if begins else 0])
    given = (source, prompts if begins else None)
    run = jax.jit(
        lambda token, own, given: step_in_kernel(*token, own, *given, InterpretGPUParams())
    )
    out, after = run(token, own, given)
    before = np.where((source > 0)[:, None, None, None], prompts[np.maximum(source - 1, 0)], own)
    expected, memory = jax.jit(step._step)(*token, before)
    live = source >= 0
    np.testing.assert_allclose(out[live], expected[live], atol=1e-3)
    np.testing.assert_allclose(after[live], memory[live], atol=1e-4)
    np.testing.assert_array_equal(out[~live], 0)
    np.testing.assert_array_equal(after[~live], own[~live])
