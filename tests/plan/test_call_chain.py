"""How many calls lie between the script and the formula of the loss: docs/architecture.md."""

import re
import runpy
import sys
import traceback
from pathlib import Path

import pytest
from further import further
from tiny_run import TinyRun

import jaxrl_llm
from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.launch import exits
from jaxrl_llm.plan.plan import Phase, Plan

PACKAGE = Path(jaxrl_llm.__file__).parent
DOCS = PACKAGE.parent / "docs" / "architecture.md"
SCRIPT = PACKAGE.parent / "scripts" / "train.py"
FORMULA = policy_losses.ppo_clip


class Stop(Exception):
    """The chain was seen."""


# The calls that a run has beyond the table.
MORE = {
    "": [],
    "actor.lora.rank": ["joined_loss"],
    "mesh.data": ["_sums_of_group"],
}


@pytest.mark.parametrize("key", further(MORE))
def test_the_chain_from_the_script_to_the_formula(key, tmp_path, monkeypatch):
    """Two mini-batches of two micro-batches, so that every loop is in the chain."""
    chain: list[tuple[str, str]] = []

    def formula(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, clip_c):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(PACKAGE))]
        if any(f.name == "run" and f.filename.endswith("program/program.py") for f in frames):
            found = [(str(Path(f.filename).relative_to(PACKAGE)), f.name) for f in frames]
            chain.extend([*found, ("algorithms/policy_losses.py", "ppo_clip")])
            raise Stop
        settings = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}
        return FORMULA(logprobs, old_logprobs, advantages, mask, **settings)

    monkeypatch.setattr(policy_losses, "ppo_clip", formula)
    # Nothing is traced ahead: the chain belongs to a step.
    monkeypatch.setattr(Plan, "trace", lambda self, *_: None)
    monkeypatch.setattr(Phase, "compile_ahead", lambda self: None)
    run = TinyRun(tmp_path)
    overrides = {
        "run_dir": str(run.run_dir),
        "algorithm": "ppo",
        "warmup": "null",
        "validation.before_train": "false",
        "actor.micro_batch_size": "4",
        "critic.optimizer.offload": "false",
        "log.tensorboard": "false",
    }
    overrides |= {key: "2"} if key else {}
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    words = [str(SCRIPT), f"--config={tmp_path / 'tiny.py'}", *flags]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(exits, "leave", sys.exit)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    names = [name for _, name in chain]
    assert len(chain) <= 11 + len(MORE[key]), [str(call) for call in chain]
    assert [name for name in names if name in MORE[key]] == MORE[key]
    chain = [call for call in chain if call[1] not in MORE[key]]
    rows = re.findall(r"^\| \d+ \| `jaxrl_llm/([\w/.]+)` \| `([\w.]+)`", DOCS.read_text(), re.M)
    assert chain == [(file, name.rpartition(".")[2]) for file, name in rows]
