"""Images of rows: every form that a row may have, their tokens, and their pixels by hand."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from jaxrl_llm.data.collating import collate_records, offline_records, prompt_batch
from jaxrl_llm.data.dataset import RowRules, Sources, load_examples, load_prompts, load_unpaired
from jaxrl_llm.data.formats import row_images
from jaxrl_llm.data.tasks import task_rows
from jaxrl_llm.images import ImageInput, opened, see_images, with_image_parts
from jaxrl_llm.tokenizer import CharTokenizer

SEEN = ImageInput(token_id=100, size=8, patch=2, scale=2, most=2)  # four tokens an image


def picture(value: int = 9) -> Image.Image:
    return Image.new("RGB", (8, 8), (value, 2, 3))


def png(value: int = 9) -> bytes:
    file = io.BytesIO()
    picture(value).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def tokenizer():
    tokenizer = CharTokenizer()
    see_images(tokenizer, SEEN)
    return tokenizer


def loaded(rows, tokenizer, load=load_prompts, **rules):
    return load(Sources(rows=rows), tokenizer, RowRules(max_length=40, **rules))


def test_every_form_of_an_image_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    forms = [
        picture(),
        png(),
        {"bytes": png(), "path": None},
        {"image": str(tmp_path / "a.png")},
        {"image": picture()},
        {"path": f"file://{tmp_path / 'a.png'}"},
        str(tmp_path / "a.png"),
        url,
        {"image_url": {"url": url}},
        {"image": picture().convert("RGBA")},
    ]
    for form in forms:
        assert np.asarray(opened(form)).tolist() == np.asarray(picture()).tolist(), form


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"\x89PNG broken", "cannot be read"),
        (png()[:45], "cannot be read"),
        ("nowhere.png", "cannot be read"),
        ("https://a.b/c.png", "training fetches nothing"),
        ("data:image/png;base64,?", "no base64"),
        ({"width": 3}, "none of"),
        (7, "neither bytes nor a path"),
    ],
)
def test_a_broken_image_makes_a_bad_row(tokenizer, image, reason):
    rows = [{"prompt": "<image>a", "images": [x]} for x in (png(), image)]
    with pytest.raises(ValueError, match=reason):
        loaded(rows, tokenizer)
    assert len(loaded(rows, tokenizer, max_bad_fraction=0.5).bad_rows) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "1 images and 0 marks"),
        ({"prompt": "<image><image>a"}, "1 images and 2 marks"),
        ({"prompt": "a<image>"}, "ends in an image"),
        ({"prompt": "<image><image><image>a", "images": [png()] * 3}, "raise .*max_images=2"),
        ({"prompt": "<image>a", "videos": ["b"]}, "'videos' is filled"),
        ({"prompt": "<image>" + "a" * 40}, "44 tokens are more than the limit of 40"),
    ],
)
def test_other_bad_rows(tokenizer, row, reason):
    with pytest.raises(ValueError, match=reason):
        loaded([{"images": [png()]} | row], tokenizer, truncation="left")


def test_a_model_of_text_refuses_images():
    for row in ({"prompt": "a", "image": png()}, {"prompt": "<image>a", "images": [png()]}):
        with pytest.raises(ValueError, match="set config.data.max_images"):
            loaded([row], CharTokenizer())


def test_a_prompt_has_the_tokens_of_its_images_and_their_places(tokenizer):
    rows = [{"prompt": "a<image>b<image>c", "images": [png(), png(5)]}, {"prompt": "no image"}]
    prompts = loaded(rows, tokenizer).items
    a, b, c = tokenizer.encode("abc")
    assert prompts[0].token_ids == (a, *[100] * 4, b, *[100] * 4, c)
    assert prompts[0].text == "a<image>b<image>c" and prompts[0].columns["images"] == [
        png(),
        png(5),
    ]
    batch = prompt_batch(
        dict(enumerate(prompts)), np.arange(4), n=2, max_prompt_length=13, pad_id=0, images=SEEN
    )
    assert batch.image_places[0].tolist() == [-1, 0, 1, 2, 3, -1, 4, 5, 6, 7, -1, -1, -1]
    assert (batch.image_places[2:] == -1).all() and (batch.images[2:] == 0).all()
    assert batch.images.shape == (4, 2, 4, 4, 12)
    assert batch.images[1, 1, 0, 0].tolist() == [5, 2, 3] * 4


def test_a_mismatched_completion_keeps_the_images_of_its_prompt(tokenizer):
    rows = [
        {"prompt": "<image>a", "completion": "b", "label": True, "images": [png()]},
        {"prompt": "c", "completion": "de", "label": False, "images": []},
    ]
    items = loaded(rows, tokenizer, load_unpaired).items
    records = offline_records(items)
    batch = collate_records(records, length=12, pad_id=0, mismatched=True, images=SEEN)
    assert batch.mismatched is not None and batch.completion is not None
    for name in ("image_places", "images"):
        own, other = (getattr(x, name) for x in (batch.completion, batch.mismatched))
        np.testing.assert_array_equal(own, other)


def test_an_answer_has_no_image(tokenizer):
    row = {"prompt": "a", "completion": "<image>b", "images": [png()]}
    with pytest.raises(ValueError, match="an answer has an image"):
        loaded([row], tokenizer, load_examples)


def test_supervised_rows_have_images_too(tokenizer):
    rows = [{"prompt": "<image>a", "completion": "b", "images": [png()]}]
    (example,) = loaded(rows, tokenizer, load_examples).items
    assert example.token_ids == (100, 100, 100, 100, *tokenizer.encode("ab"), tokenizer.eos_id)
    assert example.loss_mask == (0, 0, 0, 0, 0, 1, 1) and example.images == (png(),)


def test_patches_of_a_token_stand_together():
    """Values are 16 row + column: token (0, 1) has columns 4 to 7 of rows 0 to 3."""
    values = (16 * np.arange(8)[:, None] + np.arange(8)).astype(np.uint8)
    image = Image.fromarray(np.stack([values] * 3, axis=-1))
    pixels = SEEN.arrays([[100] * 4], [[image]], 4)["images"][0, 0]
    # Patches are in rows; a patch is column by column.
    assert pixels[1, :, ::3].tolist() == [
        [4, 20, 5, 21],
        [6, 22, 7, 23],
        [36, 52, 37, 53],
        [38, 54, 39, 55],
    ]


def test_messages_become_parts():
    text = [{"role": "user", "content": "a<image>b"}, {"role": "assistant", "content": "c"}]
    image = {"type": "image"}

    def part(text):
        return {"type": "text", "text": text}

    assert with_image_parts(text, 1)[0]["content"] == [part("a"), image, part("b")]
    # As in TRL, without a mark they come before the first text of the user.
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    assert with_image_parts(system, 2)[1]["content"] == [image, image, part("ab")]
    content = [{"type": "image_url", "image_url": {"url": "u"}}, image, part("t")]
    row = {"prompt": [{"role": "user", "content": content}]}
    assert row_images(row) == ({"image_url": {"url": "u"}},)
    assert row_images(row | {"images": ["x"]}) == ("x",)


def test_the_tokens_around_an_image_are_the_tokenizer_s():
    added = {
        "<image>": (7, True),
        "<fake_token_around_image>": (8, True),
        "<global-img>": (9, True),
    }

    class Fake:
        added_tokens, vocab_size = added, 10

    see_images(Fake, ImageInput(token_id=7, size=8, patch=2, scale=2, most=1))
    assert Fake.images.expanded([1, 7, 2], iter([(2, 2)])) == [1, 8, 9, 7, 7, 7, 7, 8, 2]
    with pytest.raises(ValueError, match="image_token_id=6 of the model is not the id of <image>"):
        see_images(Fake, ImageInput(token_id=6, size=8, patch=2, scale=2, most=1))


# Tokens of 4 x 4 pixels; an image has 4 to 12 of them.
OWN_SIZE = ImageInput(token_id=100, patch=2, scale=2, most=2, max_pixels=12 * 16, min_pixels=4 * 16)


def test_images_of_several_sizes(tokenizer):
    see_images(tokenizer, OWN_SIZE)
    wide, small, large = (Image.new("RGB", size, (9, 2, 3)) for size in ((12, 8), (3, 3), (60, 40)))
    rows = [
        {"prompt": "abc<image>defg", "images": [wide]},
        {"prompt": "<image>a<image>b", "images": [small, large]},
        {"prompt": "no image"},
    ]
    prompts = loaded(rows, tokenizer).items
    counts = [sum(i == 100 for i in prompt.token_ids) for prompt in prompts]
    assert counts == [2 * 3, 2 * 2 + 2 * 4, 0]
    batch = prompt_batch(
        dict(enumerate(prompts)), np.arange(3), n=1, max_prompt_length=16, pad_id=0, images=OWN_SIZE
    )
    assert batch.images.shape == (3, 2, 12, 4, 12)
    assert batch.image_grids.tolist() == [[[2, 3], [0, 0]], [[2, 2], [2, 4]], [[0, 0], [0, 0]]]
    assert batch.image_places[0].tolist() == [-1] * 3 + [*range(6)] + [-1] * 7
    assert batch.image_places[1, :13].tolist() == [*range(4), -1, *range(12, 20)]
    assert batch.images[0, 0, :6].reshape(-1, 3).tolist() == [[9, 2, 3]] * 96
    assert not batch.images[0, 0, 6:].any() and not batch.images[2].any()
    positions = np.arange(16)[:, None] + batch.image_offsets[0]
    # Three of text, an image of 2 x 3, then text behind its longer side.
    time = [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9, 10, 11, 12]
    assert positions[:, 0].tolist() == time
    assert positions[:, 1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, *time[9:]]
    assert positions[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, *time[9:]]
    assert not batch.image_offsets[2].any()


@pytest.mark.parametrize(
    ("size", "reason"),
    [((2000, 9), "one side is over 200 times larger"), ((200, 1), "raise .*max_image_tokens=12")],
)
def test_an_image_of_no_fitting_size_is_a_bad_row(tokenizer, size, reason):
    see_images(tokenizer, OWN_SIZE)
    with pytest.raises(ValueError, match=reason):
        loaded([{"prompt": "<image>a", "images": [Image.new("RGB", size)]}], tokenizer)


def test_qwen_s_marks_stand_around_an_image():
    class Fake:
        added_tokens, vocab_size = {"<|image_pad|>": (100, True)}, 200

    see_images(Fake, OWN_SIZE)
    assert Fake.images.text == "<|vision_start|><|image_pad|><|vision_end|>"
    with pytest.raises(ValueError, match=r"is not the id of <\|image_pad\|> in its tokenizer, 100"):
        see_images(Fake, replace(OWN_SIZE, token_id=7))


def test_dots_can_be_counted():
    """The number of separate dark regions is the answer."""
    for row in task_rows("count_dots", split="train", size=30):
        image = np.asarray(opened(row["images"][0])).astype(int)
        dark = {tuple(at) for at in np.argwhere(image.min(axis=-1) < 200)}
        regions = 0
        while dark:
            regions, left = regions + 1, [dark.pop()]
            while left:
                y, x = left.pop()
                near = {(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & dark
                dark -= near
                left += near
        assert str(regions) == row["ground_truth"]
