"""A model family in a user's file, as docs/add-a-model.md shows it, outside of the clone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from jaxrl_llm.models import families
from jaxrl_llm.models.families import OwnFamily, find_architecture, use_family

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
SMALL = ["total_steps=1", "warmup.steps=2", "data.train_batch_size=8", "rollout.n=2"]
SMALL += ["actor.ppo_mini_batch_size=8", "data.val_tasks.0.size=8", "log.tensorboard=false"]


@pytest.fixture
def file(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_model.py").write_text(code)
    return tmp_path / "my_model.py"


@pytest.fixture
def registered(monkeypatch):
    for table in ("FAMILIES", "ARCHITECTURES"):
        monkeypatch.setattr(families, table, dict(getattr(families, table)))


def test_a_family_reads_and_writes_its_own_config(file, registered):
    hf = {"vocab_size": 24, "width": 32, "depth": 2, "heads": 4, "context": 64}
    with pytest.raises(ValueError, match=r"family=my_file.py:family \(docs/add-a-model.md\)"):
        find_architecture({"model_type": "blocks"})
    own = use_family(f"{file}:family")
    config = families.config_from_hf(hf | {"model_type": "blocks"})
    assert (config.family, config.head_dim, config.qk_norm) == ("blocks", 8, True)
    written = families.to_hf_config(config)
    assert written["architectures"] == ["BlocksForCausalLM"]
    assert families.config_from_hf(written) == config
    assert find_architecture(written) == ("blocks", "causal_lm")
    names = {tensor.name for tensor in families.hf_names(config, "causal_lm").values()}
    assert {"wte.weight", "blocks.1.self_attn.q_norm.weight", "last_norm.weight"} <= names
    with pytest.raises(ValueError, match="blocks has no scalar model"):
        families.check_kind(config, "scalar")
    assert use_family(f"{file}:family") is own  # again, as each role does


@pytest.mark.parametrize("name", ["llama", "LlamaForCausalLM"])
def test_a_family_has_no_name_of_ours(tmp_path, registered, name):
    other = {"model_type": "mine", "architecture": "MineForCausalLM"}
    other["model_type" if name == "llama" else "architecture"] = name
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.models.families import OwnFamily\n"
        f"family = OwnFamily(model_type={other['model_type']!r}, read=None, write=None,\n"
        f"    architectures={{'causal_lm': {other['architecture']!r}}})\nnumber = 3\n"
    )
    with pytest.raises(ValueError, match=f"{name} is a family of ours; rename yours"):
        use_family(f"{tmp_path / 'mine.py'}:family")
    with pytest.raises(ValueError, match="is a int, not an OwnFamily"):
        use_family(f"{tmp_path / 'mine.py'}:number")
    assert OwnFamily not in map(type, families.FAMILIES.values())


@pytest.mark.nightly
def test_the_page_runs_from_a_folder_of_its_own(file):
    """Train, export, generate with the export, and train the export."""
    commands = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    train, export, generate = re.findall(r"jaxrl (.*)", commands.replace("\\\n", " "))
    small = " ".join(f"--config.{change}" for change in SMALL)

    def jaxrl(words: str) -> str:
        done = subprocess.run(
            f"{sys.executable} -m jaxrl_llm {words}",
            shell=True,
            cwd=file.parent,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    jaxrl(f"{train} {small}")
    jaxrl(export)
    written = json.loads((file.parent / "blocks" / "config.json").read_text())
    assert (written["model_type"], written["width"]) == ("blocks", 32)
    with safe_open(file.parent / "blocks" / "model.safetensors", framework="numpy") as tensors:
        assert "blocks.0.self_attn.q_proj.weight" in tensors.keys()
    jaxrl(f"{generate} --max_new_tokens=4")
    again = train.replace("runs/blocks", "runs/again").partition("--config.actor.hf_config")[0]
    jaxrl(f"{again} {small} --config.actor.path=blocks --config.warmup=null")
