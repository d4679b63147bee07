"""Qwen2.5-VL and Qwen3-VL with images: transformers' pixels, sizes, log-probs and greedy tokens.

Gradients and folders too.
Images have several sizes. Samples have two images, one or none. Rows are padded, or packed with one
copy of a prompt.
"""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from PIL import Image
from safetensors.numpy import load_file
from test_transformers_image_models import MODELS, ROPE, TEXT, saved_model
from test_transformers_roundtrip import torch_bits

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.checkpoint.peft import export_adapter, read_lora
from jaxrl_llm.config import DataConfig
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.images import ImageInput, token_grid
from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.models import qwen_vision
from jaxrl_llm.models.base import draw_params, merge_adapters, model_spec
from jaxrl_llm.models.config import QwenVision
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora import Lora, join
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.models.media import Images
from jaxrl_llm.models.qwen_vision_files import QWEN, vision_from_hf
from jaxrl_llm.models.vision import normalised
from jaxrl_llm.plan.models import image_input, write_huggingface_files
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.types import IMAGE_FIELDS

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

P, R, N, GROUP = 36, 5, 8, 2
# Two samples a prompt: two images, none, one, and two that touch.
PROMPTS = [(5, "i", 7, "i", 8), (9, 10, 11), ("i", 12), (13, "i", 14, "i", 16)]
# Three window sizes of tokens: images fill a window in part, whole, or several.
SIZES = [((24, 40), (17, 9)), (), ((40, 24),), ((8, 40), (16, 16))]
DATA = DataConfig(max_images=2, max_image_tokens=20)
CHANGES = {
    "qwen2_5_vl": {
        "vision_config": MODELS["qwen2_5_vl"]["vision_config"]
        | {"depth": 3, "hidden_size": 24, "num_heads": 3, "window_size": 16},
        "text_config": TEXT
        | {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "rope_parameters": ROPE | {"mrope_section": [1, 2, 3]},
        },
    },
}
CHANGES["qwen2_5_vl"]["vision_config"]["out_hidden_size"] = 48
CHANGES["qwen3_vl"] = {
    "vision_config": MODELS["qwen3_vl"]["vision_config"]
    | {"depth": 3, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    "text_config": TEXT
    | {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "rope_parameters": ROPE | {"mrope_section": [3, 2, 1], "mrope_interleaved": True},
    },
}
NAMES = tuple(CHANGES)


@cache
def both(name: str, folder: Path):
    """transformers' model, our spec, and our parameters."""
    theirs = saved_model(folder, name, **CHANGES[name])
    config = load_model_config(folder, images=True)
    assert isinstance(config.vision, QwenVision)
    spec = model_spec(replace(config, vision=replace(config.vision, train="all")))
    return theirs, spec, import_params(folder, spec)


def seen_by(spec) -> ImageInput:
    seen = image_input(spec.config.vision, DATA)
    assert seen is not None
    side = seen.patch * seen.scale
    return replace(seen, min_pixels=4 * side**2)  # Qwen3-VL's own bound is 64 tokens


def images() -> list[tuple]:
    """The images of each prompt; one is black, and one is shrunk."""
    rng = np.random.default_rng(3)
    made = [
        tuple(Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for h, w in sizes)
        for sizes in SIZES
    ]
    made[2] = (made[2][0].resize((240, 400)),)
    made[3] = (made[3][0], Image.new("RGB", (16, 16)))
    return made


def samples(seen: ImageInput):
    """Prompts with the tokens of their images, and the fields of a batch."""
    rng = np.random.default_rng(4)
    pixels = images()
    ids = []
    for prompt, own in zip(PROMPTS, pixels, strict=True):
        marked = [seen.token_id if i == "i" else i for i in prompt]
        seen.check(marked, grids := seen.grids(own))
        ids.append(seen.expanded(marked, iter(grids)))
    of = np.repeat(np.arange(4), GROUP)
    lengths = np.array([R, 3, 4, R, 1, 2, R, 4], np.int32)
    responses = rng.integers(2, 80, (N, R)).astype(np.int32)
    responses[4, 0] = seen.token_id  # a policy may sample it: it is an ordinary token
    prompts = np.zeros((4, P), np.int32)
    for row, prompt in enumerate(ids):
        prompts[row, : len(prompt)] = prompt
    sizes = np.array([len(prompt) for prompt in ids], np.int32)
    fields = sample_fields(prompts[of], sizes[of], responses, lengths)
    fields |= {name: x[of] for name, x in seen.arrays(ids, pixels, P).items()}
    assert fields.keys() >= set(IMAGE_FIELDS)
    return ids, pixels, {name: jnp.asarray(x) for name, x in fields.items()}


def processor(name: str, seen: ImageInput):
    vision = vision_from_hf({}, name)
    size = {"shortest_edge": seen.min_pixels, "longest_edge": seen.max_pixels}
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=seen.patch,
        merge_size=seen.scale,
        size=size,
        image_mean=vision.mean,
        image_std=vision.std,
    )


def their_logits(name, theirs, ids, prompt, pixels, seen):
    """transformers' logits of one row. A sampled image token is an ordinary one."""
    inputs = torch.tensor([list(ids)])
    if not pixels:
        return theirs(input_ids=inputs).logits[0]
    made = processor(name, seen)(images=list(pixels), return_tensors="pt")
    kinds = torch.zeros_like(inputs)
    kinds[0, : len(prompt)] = torch.tensor(prompt) == seen.token_id
    grids = made["image_grid_thw"]
    positions, _ = theirs.model.get_rope_index(inputs, kinds, image_grid_thw=grids)
    seeing = theirs.model.visual(made["pixel_values"], grid_thw=grids)
    at = torch.nonzero(kinds[0])[:, 0]
    embedded = theirs.get_input_embeddings()(inputs)[0].index_put((at,), seeing.pooler_output)
    deep = getattr(seeing, "deepstack_features", None)
    more = {"visual_pos_masks": kinds.bool(), "deepstack_visual_embeds": deep} if deep else {}
    hidden = theirs.model.language_model(
        inputs_embeds=embedded[None], position_ids=positions, **more
    ).last_hidden_state
    return theirs.lm_head(hidden)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen_vision")


KINDS = ("padded", "packed", "scanned")
FIRST = [("qwen2_5_vl", "packed"), ("qwen3_vl", "padded"), ("qwen3_vl", "scanned")]
OTHERS = [(name, kind) for name in NAMES for kind in KINDS if (name, kind) not in FIRST]


@pytest.mark.parametrize(("name", "kind"), further([*FIRST, *OTHERS], first=len(FIRST)))
def test_log_probs_and_gradients(folder, name, kind, monkeypatch):
    if kind == "packed":  # three images at once, so the last ones are fewer
        monkeypatch.setattr(qwen_vision, "PATCHES", 3 * 4 * DATA.max_image_tokens)
    theirs, spec, params = both(name, folder / name)
    seen = seen_by(spec)
    ids, pixels, fields = samples(seen)
    parts = Padded() if kind == "padded" else Packed(row_tokens=48, group=GROUP)
    settings = ForwardSettings(scan_layers=kind == "scanned")
    weights = jnp.asarray(np.random.default_rng(5).standard_normal((N, R)), jnp.float32)

    @jax.jit
    def loss(params):
        def forward(part):
            return response_logprobs(params, rows_of(part), spec=spec, settings=settings)[0]

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
        logits = their_logits(name, theirs, row, prompt, pixels[i // GROUP], seen).log_softmax(-1)
        at = torch.arange(len(prompt) - 1, len(row) - 1)
        expected = logits[at, torch.tensor(row[len(prompt) :])]
        np.testing.assert_allclose(found[i, :size], expected.detach().numpy(), atol=1e-4)
        total = total + (expected * torch.tensor(np.asarray(weights[i, :size]))).sum()
    total.backward()
    # In memory their names have the prefixes of transformers 5.
    named = {key.split("model.")[-1]: value.grad for key, value in theirs.named_parameters()}
    for path, tensor in hf_names(spec.config, "causal_lm").items():
        expected, own = tensor.to_ours(named[tensor.name.split("model.")[-1]].numpy()), gradient
        for part in path:
            own = own[part]
        scale = max(np.abs(expected).max(), 1.0)
        np.testing.assert_allclose(own, expected, atol=1e-4 * scale, err_msg=str(path))


@pytest.mark.parametrize("name", NAMES)
def test_whole_model_sees_what_its_parts_see(folder, name):
    """The path of `their_logits` is transformers' own, where no image token was sampled."""
    theirs, spec, _ = both(name, folder / name)
    seen = seen_by(spec)
    ids, pixels, fields = samples(seen)
    made = processor(name, seen)(images=list(pixels[0]), return_tensors="pt")
    inputs = torch.tensor([ids[0]])
    with torch.no_grad():
        kinds = (inputs == seen.token_id).int()
        whole = theirs(input_ids=inputs, mm_token_type_ids=kinds, **made).logits[0]
        ours = their_logits(name, theirs, ids[0], ids[0], pixels[0], seen)
        positions, delta = theirs.model.get_rope_index(
            inputs, kinds, image_grid_thw=made["image_grid_thw"]
        )
    torch.testing.assert_close(whole, ours, atol=1e-5, rtol=1e-5)
    offsets, size = np.asarray(fields["image_offsets"][0]), len(ids[0])
    found = np.arange(size)[:, None] + offsets[:size]
    np.testing.assert_array_equal(found, positions[:, 0].numpy().T)
    assert (offsets[size:] == delta.item()).all()


@pytest.mark.parametrize("name", further(NAMES))
def test_greedy_generation(folder, name):
    theirs, spec, params = both(name, folder / name)
    seen = seen_by(spec)
    ids, pixels, fields = samples(seen)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    settings = GenerationSettings(sampling=sampling, num_slots=3, group=GROUP)
    media = Images(*(fields[name] for name in IMAGE_FIELDS))

    @jax.jit
    def run(params):
        asked = (fields["prompts"], fields["prompt_lengths"], np.arange(N, dtype=np.uint32))
        key = jax.random.key(0)
        return generate(spec, params, *asked, key, settings, images=media)

    out = run(params)
    for i in range(N):
        prompt = ids[i // GROUP]
        row = list(prompt)
        for token, logprob in zip(out.tokens[i].tolist(), out.logprobs[i].tolist(), strict=True):
            with torch.no_grad():
                own = (row, prompt, pixels[i // GROUP], seen)
                logits = their_logits(name, theirs, *own)[-1].log_softmax(-1)
            assert token == int(logits.argmax())
            np.testing.assert_allclose(logprob, logits.max().item(), atol=1e-4)
            row.append(token)


@pytest.mark.parametrize("name", further(reversed(NAMES)))
def test_adapters_of_the_decoder(folder, name, tmp_path):
    """PEFT's model of the exported adapters; the encoder has modules of the same names."""
    peft = pytest.importorskip("peft", reason="pip install -e '.[parity]'")
    theirs, spec, params = both(name, folder / name)
    tensors = [
        x.name for path, x in hf_names(spec.config, "causal_lm").items() if path[0] != "vision"
    ]
    lora = Lora(rank=3, alpha=5.0, modules=chosen_modules(("all-linear",), tensors))
    adapted = model_spec(spec.config, lora=lora)
    own = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        draw_params(adapted, adapted.learned, jax.random.key(3)),
    )
    out = export_adapter(tmp_path / "adapter", adapted, own, base=str(folder / name))
    learned = peft.PeftModel.from_pretrained(copy.deepcopy(theirs), out).base_model.model
    seen = seen_by(spec)
    ids, pixels, fields = samples(seen)
    joined = join(params, own)
    for spec, weights in ((adapted, joined), merge_adapters(adapted, joined)):
        found, *_ = response_logprobs(
            weights, rows_of(fields), spec=spec, settings=ForwardSettings()
        )
        for i in range(0, N, GROUP):
            prompt, size = ids[i // GROUP], int(fields["response_lengths"][i])
            row = [*prompt, *np.asarray(fields["responses"][i, :size]).tolist()]
            with torch.no_grad():
                asked = (row, prompt, pixels[i // GROUP], seen)
                logits = their_logits(name, learned, *asked).log_softmax(-1)
            at = torch.arange(len(prompt) - 1, len(row) - 1)
            expected = logits[at, torch.tensor(row[len(prompt) :])]
            np.testing.assert_allclose(found[i, :size], expected.numpy(), atol=1e-4)
    lora = read_lora(out, spec.config, "causal_lm", dtype="float32", dropout=0.0)
    assert lora.modules == adapted.lora.modules


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(folder, name, tmp_path):
    theirs, spec, params = both(name, folder / name)
    source = folder / name
    like = export(tmp_path / "like", spec, params, tokenizer_files_from=source, image_model=source)
    before, after = (load_file(path / "model.safetensors") for path in (source, like))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    # A model without a folder has transformers' names in memory.
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=source)
    back = type(theirs).from_pretrained(out)
    assert torch_bits(back) == torch_bits(theirs)
    for part in ("text_config", "vision_config"):
        ours, own = (getattr(x.config, part).to_dict() for x in (back, theirs))
        known = {key for key in own if not key.endswith("_token_id")} - {"dtype"}
        known -= {"head_dim", "tie_word_embeddings", "max_window_layers"}  # of text alone
        assert {k: ours[k] for k in known} == {k: own[k] for k in known}
    assert load_model_config(out, images=True) == load_model_config(folder / name, images=True)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_transformers(name):
    """Of images that are kept, enlarged, shrunk and rounded to even."""
    rng = np.random.default_rng(0)
    bounds = {"max_pixels": 20 * 64, "min_pixels": 4 * 64}
    seen = ImageInput(token_id=1, patch=4, scale=2, most=1, **bounds)
    for height, width in [(24, 32), (9, 10), (100, 60), (12, 20), (5, 90), (44, 28), (20, 12)]:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = processor(name, seen)(images=image)
        rows, columns = seen.grids([image])[0]
        assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
        fields = seen.arrays([[1] * (rows * columns)], [[image]], 30)
        found = normalised(fields["images"][0, 0, : rows * columns], vision_from_hf({}, name))
        found = found.reshape(-1, 4, 4, 3).transpose(0, 3, 2, 1)  # patch, channel, row, column
        theirs = expected["pixel_values"].reshape(-1, 3, 2, 4, 4)
        for frame in range(2):
            np.testing.assert_allclose(found, theirs[:, :, frame], atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_processor_of_a_folder_is_read(tmp_path, name):
    """Bounds that are no whole tokens, colours and a filter of its own."""
    saved_model(tmp_path, name, **CHANGES[name])
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        size={"shortest_edge": 300, "longest_edge": 1000},
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.3, 0.5, 0.7],
        resample=2,
    ).save_pretrained(tmp_path)
    theirs = transformers.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    config = load_model_config(tmp_path, images=True)
    seen = image_input(config.vision, DATA)
    assert seen is not None and seen.patch == 4
    rng = np.random.default_rng(0)
    for height, width in [(24, 32), (9, 10), (100, 60), (12, 20), (33, 28)]:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = theirs(images=image)
        rows, columns = seen.grids([image])[0]
        assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
        fields = seen.arrays([[seen.token_id] * (rows * columns)], [[image]], 30)
        found = normalised(fields["images"][0, 0, : rows * columns], config.vision)
        found = found.reshape(-1, 4, 4, 3).transpose(0, 3, 2, 1)
        patches = expected["pixel_values"].reshape(-1, 3, 2, 4, 4)[:, :, 0]
        np.testing.assert_allclose(found, patches, atol=2e-6)
    # A run writes the file again, so that its checkpoints and exports read images alike.
    write_huggingface_files(tmp_path / "run", model_spec(config), CharTokenizer())
    assert load_model_config(tmp_path / "run", images=True) == config
    for key, value in {"patch_size": 7, "do_normalize": False, "min_pixels": 64}.items():
        changed = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {key: value}
        (tmp_path / "run" / "preprocessor_config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"{key}|too small"):
            load_model_config(tmp_path / "run", images=True)


def test_sizes_are_those_of_transformers():
    """Of many images, with the bounds of published models: the tokens of an image follow."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for height, width in rng.integers(20, 3000, (300, 2)).tolist():
        for side, fewest, most in ((28, 3136, 1003520), (28, 9000, 12845056), (32, 65536, 2**24)):
            expected = smart_resize(height, width, side, fewest, most)
            found = token_grid(height, width, side, fewest, most)
            assert (found[0] * side, found[1] * side) == expected


def test_every_model_is_compared():
    assert NAMES == QWEN
