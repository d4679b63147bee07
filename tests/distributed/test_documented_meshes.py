"""Every row of docs/parallelism.md and docs/placement.md is planned and traced."""

import re
from pathlib import Path

import pytest
from further import further
from tiny_iteration import even_tokens

from jaxrl_llm.config import load_config
from jaxrl_llm.plan.models import find_tokenizer, open_meshes
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward

ROOT = Path(__file__).parents[2]
PAGES = {"parallelism.md": 9, "placement.md": 7}  # rows of each
# Rows with one of these; the others are slow.
FAST = ("sequence=4", "fsdp=8 --config.mesh.generation", "placement.rollout=6", "critic.tensor")


def rows_of(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^\| [^|]* \| `(--config\.mesh[^`]*)` \|$", text, re.MULTILINE)


ROWS = [row for page in PAGES for row in rows_of(page)]
EVERY = [
    pytest.param(row, marks=() if any(word in row for word in FAST) else pytest.mark.slow)
    for row in ROWS
]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_rows(page):
    assert len(rows_of(page)) == PAGES[page]
    assert all(any(word in row for row in ROWS) for word in FAST)


@pytest.mark.parametrize("flags", further(EVERY, 2))
def test_a_row_is_planned_and_traced(flags):
    changes = re.findall(r"--config\.([\w.]+)=(\S+)", flags)
    name = "grpo_moe.py" if "mesh.expert" in flags else "ppo.py"
    config = load_config(str(ROOT / "configs" / name), changes)
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    meshes = open_meshes(config, tokenizer)
    mesh = meshes.pop("actor")
    plan = plan_online(config, tokenizer, mesh, ArrayReward(even_tokens), role_meshes=meshes)
    assert plan.num_devices >= (6 if meshes else 8)
    plan.trace()
