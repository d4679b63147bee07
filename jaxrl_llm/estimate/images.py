"""What images cost a step: pixels, and the work and memory of the encoder.

Every device has the whole encoder. Each prompt counts as if it had `data.max_images` of the largest
images, as far as they fit into it. Nothing here was measured on a GPU.
"""

import math

from jaxrl_llm.config import Config
from jaxrl_llm.estimate.packing import Rows
from jaxrl_llm.estimate.work import BYTES, Model, Samples, Work
from jaxrl_llm.images import PIXELS
from jaxrl_llm.models.config import QwenVision
from jaxrl_llm.models.flops import image_flops
from jaxrl_llm.models.qwen_vision import PATCHES
from jaxrl_llm.plan.models import image_input

# Bytes of a pair of patches and head, in attention that XLA computes whole, without and with a
# gradient.
LOGITS, LOGITS_KEPT = 6, 8


def pixel_bytes(work: Work, samples: Samples) -> float:
    """Bytes of the pixels of samples, uint8: room for the most images of each."""
    images = image_input(work.actor.config.vision, work.config.data)
    return 0.0 if images is None else float(samples.count * math.prod(images.shapes[PIXELS]))


def kept_encoder(model: Model) -> float:
    """Bytes of the encoder that a role keeps; adapters leave it in their base."""
    if model.adapters:
        return 0.0
    kept = float(model.encoder * model.stored_itemsize)
    if model.learns and not model.optimizer.offload:
        moments = model.optimizer.num_moments * BYTES[model.optimizer.moment_dtype]
        kept += model.encoder_learns * moments
    return kept


def encoder_bytes(model: Model, config: Config, rows: Rows, *, update: bool) -> float:
    """Bytes of a pass on a device: the encoder's copy and gradients, and what it computes."""
    vision, size = model.config.vision, model.itemsize
    if vision is None:
        return 0.0
    n, cells, values = _image_shape(model, config)
    learns = update and vision.train == "all"
    patches = _images_at_once(model, config, rows) * n * cells
    W, F = vision.hidden_size, vision.intermediate_size
    widths, logits = (8 * W + 3 * F, LOGITS_KEPT) if learns else (4 * W + 2 * F, LOGITS)
    inner = widths * size + logits * vision.num_heads * n * cells
    again = isinstance(vision, QwenVision)  # layers are computed again in the backward pass
    layers = vision.num_layers if learns and not again else 1
    kept = vision.num_layers * W * size if learns and again else 0
    features = rows.row_tokens * model.config.hidden_size * size * (2 if update else 1)
    cast = 0 if model.settings.dtype == model.settings.param_dtype else model.encoder * size
    gradients = 4 * model.encoder_learns if update else 0
    return cast + gradients + features + patches * (inner * layers + kept + values * (4 + size))


def encoder_flops(
    model: Model, config: Config, samples: Samples, rows: Rows | None, *, update: bool, shared: bool
) -> float:
    """FLOPs of the encoder in a pass over samples, or in their prefills (`rows` is None)."""
    vision = model.config.vision
    if vision is None:
        return 0.0
    n, cells, _ = _image_shape(model, config)
    prompts = len(samples.prompts) if shared or rows is None else samples.count
    images = prompts * min(config.data.max_images, samples.longest_prompt // n)
    if rows is not None and not isinstance(vision, QwenVision):  # empty places are computed too
        images = rows.micro_batches * _images_at_once(model, config, rows)
    times = 1
    if update and vision.train == "all":
        times = 5 if isinstance(vision, QwenVision) else 3
    return times * images * image_flops(model.config, n * cells)


def _image_shape(model: Model, config: Config) -> tuple[int, int, int]:
    """Tokens of an image at most, patches of a token, and values of a patch."""
    images = image_input(model.config.vision, config.data)
    assert images is not None
    _, n, cells, values = images.shapes[PIXELS]
    return n, cells, values


def _images_at_once(model: Model, config: Config, rows: Rows) -> int:
    """Images that a pass computes together."""
    n, cells, _ = _image_shape(model, config)
    places = max(1, rows.row_tokens // n)
    if not model.rows.micro_batch_tokens:  # a sample a row
        samples = rows.row_tokens // config.data.max_row_length
        places = min(places, samples * config.data.max_images)
    if isinstance(model.config.vision, QwenVision):
        return min(places, max(1, PATCHES // (n * cells)))
    return places
