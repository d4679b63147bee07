"""Which model a user's path names, and the reason why it names none."""

import json
import re
from pathlib import Path

import pytest
from tiny_models import tiny_config

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.identity import LEARNER, MODELS, TOKENIZER
from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.checkpoint.manager import DIGEST
from jaxrl_llm.config import ConfigError, ModelSettings
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.plan.models import find_model, find_tokenizer
from jaxrl_llm.tokenizer import CharTokenizer

IDENTITY = {MODELS: {}, LEARNER: "actor", TOKENIZER: CharTokenizer().digest()}
LOOP = {"step": 9, "identity": IDENTITY}
LOOP[DIGEST] = digests.text_digest(LOOP)


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run: steps 2 and 9 are whole, the save of step 10 was cut off."""
    folder = tmp_path / "run"
    for step in (2, 9, 10):
        step_folder = folder / "checkpoints" / f"global_step_{step}"
        (step_folder / "loop").mkdir(parents=True)
        (step_folder / "loop" / "metadata").write_text(json.dumps(LOOP))
        if step != 10:
            (step_folder / "_CHECKPOINT_METADATA").touch()
    (folder / "config.json").write_text('{"name": "a run"}')
    (folder / "metrics.jsonl").touch()
    files = folder / "checkpoints" / "huggingface"
    CharTokenizer().save(files)
    write_config(files)
    return folder


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(tiny_config())))
    return folder


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/global_step_9"])
def test_a_run_its_checkpoints_and_a_step_are_models(run, place):
    newest = run / "checkpoints" / "global_step_9"
    found = find_model_path(str(run / place))
    assert found.checkpoint == newest
    assert found.files == str(run / "checkpoints" / "huggingface")
    settings = ModelSettings(path=str(run / place))
    source = find_model(settings, context=1)  # what a config's actor.path does
    assert (source.checkpoint, source.config) == (newest, tiny_config())
    assert isinstance(find_tokenizer("", settings), CharTokenizer)


def test_a_hugging_face_folder_and_a_hub_name_are_models(tmp_path):
    folder = write_config(tmp_path / "hf")
    assert find_model_path(str(folder)).files == str(folder)
    (folder / "model.safetensors").touch()
    (folder / "checkpoints").mkdir()  # of a run that was started in it
    assert find_model_path(str(folder)).checkpoint is None
    assert find_model_path("Owner/Model-1.5B").files == "Owner/Model-1.5B"


@pytest.mark.parametrize(
    "place, reason",
    [
        ("run/checkpoints/global_step_10", "global_step_10 was not written to its end"),
        ("run/checkpoints/global_step_99", "there is no model .*did you mean .*global_step_9"),
        ("run/checkpoints/huggingface", "holds no weights; give .*/run/checkpoints or one step"),
        ("run/config.json", "is a file, and a model is a folder; give .*/run"),
        (
            "new",
            "new holds no checkpoint that was written to its end; give a folder such as",
        ),
        ("empty", "is no model: it holds neither config.json with weights, nor a finished"),
    ],
)
def test_what_is_no_model_is_refused_at_once(tmp_path, run, place, reason):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)  # a run that has saved nothing yet
    (tmp_path / "empty").mkdir()
    for refuse in (find_model_path, lambda path: find_model(ModelSettings(path=path), context=1)):
        with pytest.raises(ConfigError, match=re.compile(reason)):
            refuse(str(tmp_path / place))
