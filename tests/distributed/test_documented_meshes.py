"""Every row of docs/parallelism.md is accepted, planned and traced, with configs/ppo.py."""

import re
from pathlib import Path

import pytest
from tiny_iteration import even_tokens

from jaxrl_llm.config import load_config
from jaxrl_llm.plan.models import find_tokenizer, open_meshes
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.trainer.rewarding import ArrayReward

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallelism.md").read_text()
ROWS = re.findall(r"^\| [^|]* \| `(--config\.mesh[^`]*)` \|$", PAGE, re.MULTILINE)
FAST = ("generation", "sequence", "critic")
EVERY = [
    pytest.param(row, marks=() if any(word in row for word in FAST) else pytest.mark.slow)
    for row in ROWS
]


def test_the_page_has_rows():
    assert len(ROWS) == 8


@pytest.mark.parametrize("flags", EVERY)
def test_a_row_is_planned_and_traced(flags):
    changes = re.findall(r"--config\.([\w.]+)=(\d+)", flags)
    config = load_config(str(ROOT / "configs" / "ppo.py"), changes)
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    mesh = open_meshes(config, tokenizer)["actor"]
    assert mesh.size == 8
    plan_online(config, tokenizer, mesh, ArrayReward(even_tokens)).trace()
