"""Samples whose responses hold further rows, against each row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from learner.test_packing import LAYOUTS, B, R, batch, clean, random_params, spec_of

from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs, row_logprobs
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.rows import ROW_STARTS, rows_of


@pytest.mark.parametrize(
    ("name", "layout"),
    further([("llama", "shared"), ("mistral", "padded"), ("llama", "two replicas")]),
)
def test_a_token_of_a_further_row_sees_this_row_alone(name, layout):
    fields = batch()
    lengths, starts = fields["response_lengths"], np.full((B, R), -1, np.int32)
    for i in range(0, B, 2):  # every other sample has two or three rows
        starts[i, 2 : lengths[i]] = 2
        starts[i, 4 : lengths[i]] = 4
    fields = clean({k: jnp.asarray(x) for k, x in fields.items()}) | {ROW_STARTS: starts}
    spec, settings = spec_of(name, "causal_lm"), ForwardSettings()
    params = random_params(spec)
    parts = Padded(num=2) if layout == "padded" else LAYOUTS[layout]
    found = jax.jit(
        lambda fields: parts.join(
            lambda part: response_logprobs(params, rows_of(part), spec=spec, settings=settings)[0],
            fields,
        )
    )(fields)
    alone = jax.jit(lambda ids: row_logprobs(params, ids[None], spec=spec, settings=settings)[0])
    compared = 0
    for i in range(B):
        prompt = np.asarray(fields["prompts"][i, : fields["prompt_lengths"][i]])
        response = np.asarray(fields["responses"][i, : lengths[i]])
        bounds = [0, *sorted({*starts[i].tolist()} - {-1}), lengths[i]]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            before = len(prompt) if start == 0 else 0
            row = np.concatenate([prompt, response[:end]]) if start == 0 else response[start:end]
            first = max(before, 1)  # nothing predicts the first token of a row
            own = np.asarray(alone(jnp.asarray(row)))[first:] if len(row) > first else row[:0]
            place = start + first - before
            np.testing.assert_allclose(found[i, place:end], own, atol=1e-5)
            compared += len(own)
    assert compared > 40
