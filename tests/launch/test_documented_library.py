"""The program of docs/library.md and the cells of docs/quickstart.ipynb run as they are written.

Their models and runs are made smaller, which changes no line of the pages.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Before the page's own lines: the packaged configs with a tiny model, and few steps.
SMALLER = """
import jaxrl_llm.config as _c
_load = _c.load_config
_SMALL = {
    "actor.hf_config.hidden_size": 32, "actor.hf_config.intermediate_size": 64,
    "actor.hf_config.num_hidden_layers": 1, "total_steps": 3, "warmup.steps": 3,
    "warmup.batch_size": 16, "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 8,
    "rollout.n": 2, "actor.micro_batch_size": 0, "actor.micro_batch_tokens": 0,
    "data.val_batch_size": 8, "validation.every": 0, "warmup.stop_at": 0,
}
def _smaller(config, overrides=()):
    return _load(_load(config, overrides), _SMALL) if config == "grpo" else _load(config, overrides)
import jaxrl_llm
jaxrl_llm.load_config = _smaller
"""


def program_of_the_page() -> str:
    text = (ROOT / "docs" / "library.md").read_text()
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


def cells_of_the_notebook() -> str:
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    # A notebook shows the last line of each cell, as these programs do.
    return "\n".join(cells) + "\nprint(answers[0].text, report['metrics'], folder)\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "program",
    [cells_of_the_notebook, pytest.param(program_of_the_page, marks=pytest.mark.slow)],
)
def test_the_documented_programs_run(program, tmp_path):
    """As `python -c` and a notebook do: the functions are in no file."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SMALLER + program()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "val-core/val_data/acc/mean@1" in done.stdout
    (folder,) = (file.parent for file in tmp_path.rglob("model.safetensors"))
    assert (folder / "tokenizer.json").is_file() or (folder / "config.json").is_file()


def test_the_notebook_is_stored_with_the_outputs_of_a_run_that_learned():
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    (log,) = (o["text"] for cell in cells for o in cell["outputs"] if o["output_type"] == "stream")
    (accuracy,) = re.findall(r"acc/mean@1  (\S+) -> (\S+)", "".join(log))
    assert float(accuracy[1]) > float(accuracy[0]) + 0.1
