"""The packaged SmolLM2-135M-Instruct against a golden file that transformers and torch made.

golden/smollm2.npz, all float32, of the chat prompt "What is the capital of France?": `ids` [37],
`logits_last` [49152] after the prompt, `logprob_tokens` [36] of each prompt token after the first,
and the eight tokens of the `greedy` answer.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.flash_attention import attention
from jaxrl_llm.models.base import bind, model_spec
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "smollm2.npz")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Fetched through pip, as a user's first run does."""
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    flags = ["smollm2", f"--output={folder}", "--dtype=float32"]
    subprocess.run([sys.executable, SCRIPTS / "prepare_model.py", *flags], check=True)
    return folder


@pytest.fixture(scope="module")
def model(directory):
    spec = model_spec(load_model_config(directory))
    return spec, import_params(directory, spec)


def test_tokens_of_the_chat_prompt(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode(tokenizer.apply_chat_template(MESSAGES)) == GOLDEN["ids"].tolist()
    assert tokenizer.decode(GOLDEN["greedy"].tolist()) == "The capital of France is Paris."
    assert tokenizer.stop_ids == (2,)
    assert len(tokenizer.encode("12+345")) == 6  # every digit is a token of its own


def test_logits_and_logprobs(model):
    spec, params = model
    ids = jnp.asarray(GOLDEN["ids"])[None]

    def attend(q, k, v, cache, *, window):
        return attention(q, k, v, window=window), cache

    @jax.jit
    def run(params):
        bound = bind(spec, params)
        hidden, _ = bound(ids, jnp.arange(ids.shape[1])[None], attend=attend)
        return bound.logits(hidden)[0]

    logits = run(params)
    np.testing.assert_allclose(logits[-1], GOLDEN["logits_last"], atol=2e-4)
    logprobs = jax.nn.log_softmax(logits[:-1])
    chosen = np.take_along_axis(np.asarray(logprobs), GOLDEN["ids"][1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(chosen, GOLDEN["logprob_tokens"], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answer(directory, dtype):
    spec = model_spec(load_model_config(directory), dtype=dtype)
    params = import_params(directory, spec)
    ids = GOLDEN["ids"]
    output = jax.jit(
        lambda params: generate(
            spec,
            params,
            jnp.asarray(ids)[None],
            jnp.array([len(ids)]),
            jnp.zeros(1, jnp.uint32),
            jax.random.key(0),
            GenerationSettings(
                sampling=SamplingParams(temperature=0.0, stop_token_ids=(2,), max_new_tokens=8)
            ),
        )
    )(params)
    assert np.asarray(output.tokens[0]).tolist() == GOLDEN["greedy"].tolist()
    assert bool(output.finished[0])


def test_export_gives_the_same_file(directory, model, tmp_path):
    spec, params = model
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=directory)
    ours, theirs = (load_file(d / "model.safetensors") for d in (out, directory))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
