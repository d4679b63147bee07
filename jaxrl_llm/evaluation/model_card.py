"""The model card of an exported folder: what it was trained from, on what, how, and how far."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm.checkpoint.huggingface import default_model_card
from jaxrl_llm.config import Config, as_dict, differences
from jaxrl_llm.models.base import ModelSpec

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
MOST_ROWS = 12  # most rows of the table of the learning curve
# Columns of that table: the first of each that the run has.
CURVES = (
    ("reward", ("critic/score/mean",)),
    ("held-out accuracy", ("val-core/*/acc/mean@*",)),
    ("loss", ("loss",)),
    ("held-out loss", ("eval_loss",)),
)
# Keys that say where a run was, and not what it did.
LOCAL = (
    "name",
    "run_dir",
    "compile_cache",
    "resume",
    "log.",
    "checkpoint.",
    "watchdog.",
    "profile.",
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a checkpoint's run; empty where its files were not copied along."""

    config: Config | None
    step: int
    validation: dict[str, float]  # the last one up to `step`
    history: Sequence[Mapping[str, Any]] = field(default_factory=list)  # metrics up to `step`


def model_card(spec: ModelSpec, facts: RunFacts, role: str) -> str:
    """README.md of an export of `role`."""
    rows: dict[str, object] = {"role": role, "step": facts.step}
    base_model, config = None, facts.config
    if config is not None:
        path = config.actor.path
        rows = {"run": config.name, "algorithm": config.algorithm.label} | rows
        rows["seed"] = config.seed
        if HUB_NAME.fullmatch(path) and not Path(path).exists():
            base_model = path
        rows["trained from"] = base_model or Path(path).name or "random weights"
        rows["data"] = _data(config)
        rows["rewards"] = _rewards(config)
        rows = {name: value for name, value in rows.items() if value != ""}
    if role == "actor":
        rows |= {f"`{name}`": f"{value:.4g}" for name, value in facts.validation.items()}
    parts = [default_model_card(spec, base_model=base_model, facts=rows)]
    if role == "actor" and (curve := _curve(facts.history)):
        parts.append(f"## Learning\n\n{curve}\n")
    if config is not None:
        parts.append(f"## Config\n\nWhat differs from the defaults:\n\n{_config(config)}\n")
    parts.append(f"## Use\n\n{_USE[spec.kind]}\n\n## Citation\n\n{CITATION}\n")
    return "\n".join(parts)


def _data(config: Config) -> str:
    """The names of the training data, without folders."""
    data = config.data
    names = [Path(file).name for file in data.train_files]
    names += [task.label for task in data.train_tasks]
    if data.train_rows is not None:
        names.append(f"{data.train_rows.num_rows} rows of a program")
    if data.dataset_class:
        names.append(data.dataset_class.rpartition(":")[2])
    return ", ".join(names)


def _rewards(config: Config) -> str:
    labels = [function.label.rpartition(":")[2] for function in config.reward.functions]
    return ", ".join([*labels, *(["a reward model"] if config.reward.model else [])])


def _curve(history: Sequence[Mapping[str, Any]]) -> str:
    """A table of at most MOST_ROWS steps, the first and the last one among them."""
    columns: dict[str, list[float | None]] = {}
    for title, patterns in CURVES:
        for pattern in patterns:
            values = [_first(row, pattern) for row in history]
            if any(value is not None for value in values):
                columns[title] = values
    if not columns:
        return ""
    # Steps that have all columns, where there are such: validation is not in each.
    full = [i for i in range(len(history)) if all(c[i] is not None for c in columns.values())]
    shown = full if len(full) > 1 else list(range(len(history)))
    if len(shown) > MOST_ROWS:
        last = len(shown) - 1
        shown = [shown[last * i // (MOST_ROWS - 1)] for i in range(MOST_ROWS)]
    lines = [f"| step | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for i in shown:
        cells = [values[i] for values in columns.values()]
        texts = ["" if cell is None else f"{cell:.4g}" for cell in cells]
        lines.append(f"| {history[i]['training/global_step']} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _first(row: Mapping[str, Any], pattern: str) -> float | None:
    """The mean of the metrics of a pattern, where `*` is one part of a name."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^/]+"))
    values = [x for name, x in row.items() if expression.fullmatch(name) and x is not None]
    return sum(values) / len(values) if values else None


def _config(config: Config) -> str:
    """The values that differ from the defaults, as JSON; of paths only the names.

    Addresses of servers are left out.
    """
    values = as_dict(config)
    changed: dict[str, Any] = {}
    for key in differences(Config(), config):
        if key.startswith((*LOCAL, *_unused(config))):
            continue
        value: Any = values
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value.get(part)
        changed[key] = _without_folders(value)
    return f"```json\n{json.dumps(changed, indent=2)}\n```"


def _unused(config: Config) -> list[str]:
    """Keys that weights on disk replace: a model's sizes and its tokenizer."""
    with_path = [name for name in ("actor", "critic") if getattr(config, name).path]
    is_char = config.actor.path and config.data.tokenizer == "char"
    return [f"{name}.hf_config" for name in with_path] + ["data.tokenizer"] * bool(is_char)


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return "a server"  # its address is of your network
    is_path = isinstance(value, str) and value.startswith(("/", "~", ".."))
    return Path(value).name if is_path else value


_USE = {
    "causal_lm": """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```""",
    "scalar": """\
```python
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(".")
```""",
}
CITATION = f"""\
```bibtex
@software{{jaxrl_llm,
  title = {{jaxrl_llm: reinforcement learning of language models in JAX}},
  version = {{{jaxrl_llm.__version__}}},
}}
```"""
