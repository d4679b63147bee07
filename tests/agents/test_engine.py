"""The loop with the engine and a tiny model: slots and the order of arrival change no bit."""

import jax
import numpy as np
from agents.fake_engine import prompt_of
from tiny import model_config

from jaxrl_llm.agents.driver import Sample
from jaxrl_llm.agents.setup import open_driver
from jaxrl_llm.config import load_config
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.tokenizer import CharTokenizer

CHAR = CharTokenizer()
CONTEXT, NUMBER = 96, 8


def trajectories(order, **settings):
    """Samples of two prompts, with a random model that guesses."""
    spec = model_spec(model_config(vocab_size=CHAR.vocab_size, max_position_embeddings=CONTEXT))
    params = init_params(spec, jax.random.key(3))
    keys = {
        "rollout.environment": "guess",
        "rollout.max_turn_tokens": 40,
        "data.max_prompt_length": 16,
        "data.max_response_length": 70,
    }
    driver = open_driver(load_config("ppo", keys), CHAR, max_context=CONTEXT)
    stops = (*driver.stop_ids(plain=True), *CHAR.encode("0123456789abcdefghijk"))
    engine = Engine(
        spec,
        params,
        EngineSettings(
            max_context=CONTEXT,
            cache_tokens=4 * CONTEXT,
            stop_ids=stops,
            sampling=SamplingParams(max_new_tokens=70),
            **settings,
        ),
    )
    key = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(7), 2)))
    samples = [
        Sample(
            prompt=prompt_of(CHAR, f"guess {i // 4}:\n", ground_truth=20),
            step=2,
            sample=i,
            group=i // 4,
            options={"seed_key": key, "sample_id": i},
        )
        for i in range(NUMBER)
    ]
    done = driver.run(engine, [samples[i] for i in order])
    assert engine.counts() == {"queued": 0, "running": 0, "waiting": 0}
    return sorted(done, key=lambda t: t.sample)


def test_slots_and_the_order_of_arrival_change_no_bit():
    """Log-probs are compared too; in float32, others in the batch change no bit."""
    first = trajectories(range(NUMBER), num_slots=3, steps=4)
    again = trajectories(reversed(range(NUMBER)), num_slots=6, steps=16)
    assert first == again
    assert max(len(t.turns) for t in first) > 2
    assert len({t.response_ids for t in first}) == NUMBER
    for trajectory in first:
        mask = np.array(trajectory.mask)
        assert len(trajectory.response_ids) == len(mask) == len(trajectory.logprobs)
        assert (np.array(trajectory.logprobs)[mask == 1] < 0).all()
        assert (np.array(trajectory.logprobs)[mask == 0] == 0).all()
        for turn in trajectory.turns:
            assert mask[turn.start : turn.end].all()
