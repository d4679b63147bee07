"""Idefics3 and SmolVLM with images: transformers' log-probs, gradients and greedy tokens.

Samples have two images, one or none. Rows are padded, or packed with one copy of a prompt.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from test_transformers_image_models import MODELS, saved_model
from test_transformers_roundtrip import torch_bits

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.config import DataConfig
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.images import ImageInput
from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.image_files import READ_WHOLE, SIGLIP
from jaxrl_llm.models.media import Images
from jaxrl_llm.models.qwen_vision_files import QWEN
from jaxrl_llm.models.vision import normalised
from jaxrl_llm.plan.models import image_input, write_huggingface_files
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.types import IMAGE_FIELDS

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

NAMES = ("idefics3", "smolvlm")
DATA = DataConfig(max_images=2)
P, R, N, GROUP = 14, 5, 8, 2
# Two samples a prompt: two images, none, one, and one again.
PROMPTS = [(5, "i", 7, "i", 8), (9, 10, 11), ("i", 12), (13, 14, "i", 15, 16)]
VISION = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 3,
    "layer_norm_eps": 1e-5,
}


@cache
def both(name: str, folder: Path):
    """transformers' model, our spec, and our parameters."""
    theirs = saved_model(folder, name, vision_config=VISION)
    config = load_model_config(folder, images=True)
    assert config.vision is not None and config.vision.image_shape == (4, 4, 27)
    spec = model_spec(config)
    return theirs, spec, import_params(folder, spec)


def images(seen: ImageInput) -> list[tuple]:
    """The images of each prompt; one is larger than the model's, and one is black."""
    rng = np.random.default_rng(3)

    def image(size: int):
        return Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))

    big = image(12).resize((30, 21))
    return [(image(12), big), (), (Image.new("RGB", (12, 12)),), (image(12),)]


def samples(seen: ImageInput):
    """Prompts with the tokens of their images, and the fields of a batch."""
    rng = np.random.default_rng(4)
    marked = [[seen.token_id if i == "i" else i for i in prompt] for prompt in PROMPTS]
    pixels = images(seen)
    grids = [seen.grids(own) for own in pixels]
    ids = [seen.expanded(p, iter(own)) for p, own in zip(marked, grids, strict=True)]
    for prompt, own in zip(marked, grids, strict=True):
        seen.check(prompt, own)
    of = np.repeat(np.arange(4), GROUP)
    lengths = np.array([R, 3, 4, R, 1, 2, R, 4], np.int32)
    responses = rng.integers(2, 80, (N, R)).astype(np.int32)
    responses[4, 0] = seen.token_id  # a policy may sample it: it is an ordinary token
    prompts = np.zeros((4, P), np.int32)
    for row, prompt in enumerate(ids):
        prompts[row, : len(prompt)] = prompt
    sizes = np.array([len(prompt) for prompt in ids], np.int32)
    fields = sample_fields(prompts[of], sizes[of], responses, lengths)
    arrays = seen.arrays(ids, pixels, P)
    return (
        ids,
        pixels,
        {k: jnp.asarray(v) for k, v in fields.items()}
        | {name: jnp.asarray(x[of]) for name, x in arrays.items()},
    )


def their_logits(theirs, ids, pixels, seen):
    """transformers' logits of one row. Its own image tokens are placed by hand."""
    inputs = torch.tensor([list(ids)])
    if not pixels:
        return theirs(input_ids=inputs).logits[0]
    arrays = []
    for image in pixels:
        if image.size != (seen.size, seen.size):
            image = image.resize((seen.size, seen.size), Image.Resampling.LANCZOS)
        arrays.append(np.asarray(image.convert("RGB")).transpose(2, 0, 1) / 127.5 - 1)
    values = torch.tensor(np.stack(arrays), dtype=torch.float32)
    side = seen.size // seen.patch
    seeing = theirs.model.vision_model(
        pixel_values=values, patch_attention_mask=torch.ones(len(pixels), side, side).bool()
    )
    features = theirs.model.connector(seeing.last_hidden_state).reshape(-1, 24)
    embedded = theirs.get_input_embeddings()(inputs)[0]
    at = [i for i, token in enumerate(ids) if token == seen.token_id][: len(features)]
    embedded = embedded.index_put((torch.tensor(at),), features)
    hidden = theirs.model.text_model(inputs_embeds=embedded[None]).last_hidden_state
    return theirs.lm_head(hidden)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_gradients(folder, name, kind):
    theirs, spec, params = both(name, folder / name)
    seen = image_input(spec.config.vision, DATA)
    spec = model_spec(learning(spec.config))
    ids, pixels, fields = samples(seen)
    parts = {"padded": Padded(), "packed": Packed(row_tokens=24, group=GROUP)}[kind]
    weights = jnp.asarray(np.random.default_rng(5).standard_normal((N, R)), jnp.float32)

    @jax.jit
    def loss(params):
        def forward(part):
            rows = rows_of(part)
            return response_logprobs(params, rows, spec=spec, settings=ForwardSettings())[0]

        if kind == "padded":
            logprobs = parts.join(forward, fields)
            return jnp.sum(logprobs * weights * real), logprobs
        cut = parts.split(fields)
        # The last rows may be empty.
        logprobs = jax.lax.map(lambda i: forward(cut.at(i)), jnp.arange(4)).sum(0)
        return jnp.sum(logprobs * weights * real), logprobs

    real = jnp.arange(R) < fields["response_lengths"][:, None]
    (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    theirs.zero_grad()
    total = torch.zeros(())
    for i in range(N):
        prompt, size = ids[i // GROUP], int(fields["response_lengths"][i])
        row = [*prompt, *np.asarray(fields["responses"][i, :size]).tolist()]
        logits = their_logits(theirs, row, pixels[i // GROUP], seen).log_softmax(-1)
        at = torch.arange(len(prompt) - 1, len(row) - 1)
        expected = logits[at, torch.tensor(row[len(prompt) :])]
        np.testing.assert_allclose(found[i, :size], expected.detach().numpy(), atol=1e-4)
        total = total + (expected * torch.tensor(np.asarray(weights[i, :size]))).sum()
    total.backward()
    named = {key: value.grad for key, value in theirs.named_parameters()}
    for path, tensor in hf_names(spec.config, "causal_lm").items():
        expected, own = tensor.to_ours(named[tensor.name].numpy()), gradient
        for part in path:
            own = own[part]
        scale = max(np.abs(expected).max(), 1.0)
        np.testing.assert_allclose(own, expected, atol=1e-4 * scale, err_msg=str(path))


def learning(config):
    """The config whose image encoder learns."""
    return replace(config, vision=replace(config.vision, train="all"))


@pytest.mark.parametrize("name", NAMES)
def test_whole_model_sees_what_its_parts_see(folder, name):
    """The path of `their_logits` is transformers' own, where no image token was sampled."""
    theirs, spec, _ = both(name, folder / name)
    seen = image_input(spec.config.vision, DATA)
    ids, pixels, _ = samples(seen)
    values = [
        np.asarray(p.resize((12, 12), Image.Resampling.LANCZOS)).transpose(2, 0, 1) / 127.5 - 1
        for p in pixels[0]
    ]
    with torch.no_grad():
        whole = theirs(
            input_ids=torch.tensor([ids[0]]),
            pixel_values=torch.tensor(np.stack(values)[None], dtype=torch.float32),
        ).logits[0]
        ours = their_logits(theirs, ids[0], pixels[0], seen)
    torch.testing.assert_close(whole, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generation(folder, name):
    theirs, spec, params = both(name, folder / name)
    seen = image_input(spec.config.vision, DATA)
    ids, pixels, fields = samples(seen)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    settings = GenerationSettings(sampling=sampling, num_slots=3, group=GROUP)
    media = Images(*(fields[name] for name in IMAGE_FIELDS[:2]))

    @jax.jit
    def run(params):
        asked = (fields["prompts"], fields["prompt_lengths"], np.arange(N, dtype=np.uint32))
        key = jax.random.key(0)
        return generate(spec, params, *asked, key, settings, images=media)

    out = run(params)
    for i in range(N):
        row = list(ids[i // GROUP])
        for token, logprob in zip(out.tokens[i].tolist(), out.logprobs[i].tolist(), strict=True):
            with torch.no_grad():
                logits = their_logits(theirs, row, pixels[i // GROUP], seen)[-1].log_softmax(-1)
            assert token == int(logits.argmax())
            np.testing.assert_allclose(logprob, logits.max().item(), atol=1e-4)
            row.append(token)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(folder, name, tmp_path):
    theirs, spec, params = both(name, folder / name)
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=folder / name)
    before, after = (load_file(path / "model.safetensors") for path in (folder / name, out))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert torch_bits(type(theirs).from_pretrained(out)) == torch_bits(theirs)
    assert load_model_config(out, images=True) == spec.config


@pytest.mark.parametrize("size", [(40, 30), (12, 90), (7, 5), (12, 12)])
def test_pixels_are_those_of_transformers(size):
    processor = partial(
        transformers.Idefics3ImageProcessorPil,
        do_image_splitting=False,
        max_image_size={"longest_edge": 12},
        do_resize=False,
        do_pad=False,
    )()
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
    expected = processor(images=image)["pixel_values"][0][0]
    seen = ImageInput(token_id=1, size=12, patch=3, scale=2, most=1, resample=1)
    found = seen.arrays([[1] * 4], [[image]], 4)["images"][
        0, 0
    ]  # tokens, patches, (column, row, channel)
    squares = expected.reshape(3, 2, 2, 3, 2, 2, 3).transpose(1, 4, 2, 5, 6, 3, 0)
    np.testing.assert_allclose(found / 127.5 - 1, squares.reshape(4, 4, 27), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_processor_of_a_folder_is_read(tmp_path, name):
    """Two resizes, with colours and a filter of its own."""
    theirs, spec, _ = both(name, tmp_path)
    side = spec.config.vision.image_size
    kind = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[name]
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(
        do_image_splitting=False,
        size={"longest_edge": 31},
        max_image_size={"longest_edge": side},
        do_pad=False,
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.3, 0.5, 0.7],
        resample=2,
    )
    processor.save_pretrained(tmp_path)
    config = load_model_config(tmp_path, images=True)
    seen = image_input(config.vision, DataConfig(max_images=1))
    assert seen is not None
    n, s, p = seen.tokens, seen.scale, seen.patch
    rng = np.random.default_rng(0)
    for size in [(40, 30), (12, 90), (7, 5), (side, side)]:
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
        expected = processor(images=image)["pixel_values"][0][0]
        found = seen.arrays([[seen.token_id] * n], [[image]], n)["images"][0, 0]
        found = normalised(found, config.vision)
        rows = side // s // p
        squares = expected.reshape(3, rows, s, p, rows, s, p).transpose(1, 4, 2, 5, 6, 3, 0)
        np.testing.assert_allclose(found, squares.reshape(found.shape), atol=2e-6)
    write_huggingface_files(tmp_path / "run", model_spec(config), CharTokenizer())
    assert load_model_config(tmp_path / "run", images=True) == config


def test_every_whole_model_is_compared():
    assert SIGLIP == NAMES and set(NAMES) < MODELS.keys()
    assert READ_WHOLE == (*NAMES, *QWEN)  # see test_transformers_qwen_vision.py
