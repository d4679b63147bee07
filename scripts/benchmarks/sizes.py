"""Models and lengths to measure: named shapes, and a user's own from files. No jax."""

import json
from collections import Counter
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.estimate.lengths import lengths_in
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.models.shapes import SHAPES
from jaxrl_llm.references import nearest

Shapes = dict[str, ModelConfig]


def read_shapes(text: str) -> Shapes:
    """The models of --shape=NAME_OR_PATH[,NAME_OR_PATH], by name.

    A path is a Hugging Face folder or its config.json; only the sizes are read. Its name is the
    folder's, with "local-" in front where a named shape has that name.
    ConfigError for a name that is unknown and a file that describes no supported model.
    """
    models = []
    for word in filter(None, text.split(",")):
        if word in SHAPES:
            models.append((word, SHAPES[word]))
            continue
        path = Path(word)
        if not path.exists():
            raise ConfigError(
                f"--shape={word} is unknown{nearest(word, list(SHAPES))}; there are "
                f"{', '.join(SHAPES)}, or the path of a Hugging Face folder or config.json"
            )
        file = path / "config.json" if path.is_dir() else path
        name = (file.parent if file.name == "config.json" else file.with_suffix("")).resolve().name
        models.append((f"local-{name}" if name in SHAPES else name, _read_model(file)))
    if not models:
        raise ConfigError(f"--shape: name one or more of {', '.join(SHAPES)}")
    twice = [name for name, count in Counter(name for name, _ in models).items() if count > 1]
    if twice:
        raise ConfigError(f"--shape: {twice[0]} is there twice; rename a folder")
    return dict(models)


def read_lengths(file: Path, groups: tuple[int, int] | None) -> tuple[tuple[int, int], ...]:
    """Prompt and response tokens of each sample: a line "PROMPT,RESPONSE" each.

    With `groups` (prompts, samples), as many consecutive lines as a prompt has samples share it.
    ConfigError names the line that is wrong.
    """
    lengths = lengths_in(file)
    prompts, samples = groups or (len(lengths), 1)
    if not lengths or len(lengths) != prompts * samples:
        raise ConfigError(
            f"--lengths={file} has {len(lengths)} samples; "
            f"--groups={len(lengths) // samples or 1}x{samples} needs that many"
        )
    for start in range(0, len(lengths), samples):
        if len({prompt for prompt, _ in lengths[start : start + samples]}) > 1:
            raise ConfigError(
                f"{file}: the {samples} samples from sample {start + 1} on share a prompt, so "
                "their first numbers must be equal; drop --groups for prompts of their own"
            )
    return tuple(lengths)


def _read_model(file: Path) -> ModelConfig:
    try:
        return config_from_hf(json.loads(file.read_text()))
    except OSError as error:
        raise ConfigError(f"--shape: {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"--shape: {file} describes no model to measure: {error}") from None
