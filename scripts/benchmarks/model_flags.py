"""Flags of known models on one and eight GPUs: python scripts/benchmarks/model_flags.py [--write]

Plans the configs for pretrained models without compiling, and takes the first flags that fit.
`--write` puts the table into docs/my-model.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrl_llm.config import Config, load_config  # noqa: E402
from jaxrl_llm.estimate.devices import Devices  # noqa: E402
from jaxrl_llm.estimate.estimate import Estimate, placed  # noqa: E402
from jaxrl_llm.estimate.rates import GB, rates_of  # noqa: E402
from jaxrl_llm.estimate.work import work_of  # noqa: E402
from jaxrl_llm.models.families import to_hf_config  # noqa: E402
from jaxrl_llm.models.shapes import SHAPES  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "my-model.md"
BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"
HARDWARE = "h200"
MODELS = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen3-4b": "Qwen3-4B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
CONFIGS = {
    "grpo": "grpo_pretrained",
    "ppo": "ppo_pretrained",
    "sft": "sft_pretrained",
    "dpo": "dpo_pretrained",
    "gsm8k": "grpo_gsm8k",
}
COUNTS = (1, 8)
# Flags by the letter of the page, the ones that change least first. PPO also sets the critic's.
FLAGS = {
    "A": (),
    "B": ("actor.remat=full", "actor.optimizer.moment_dtype=bfloat16"),
    "C": ("actor.lora.rank=32",),
    "D": ("actor.lora.rank=32", "actor.lora.merge=false", "actor.remat=full"),
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The first flags that fit, and what the planner says of them."""

    letter: str
    planned: Estimate

    @property
    def text(self) -> str:
        """A cell of the table."""
        return f"{self.letter}: {self.planned.peak / GB:.0f} GB, {self.planned.seconds:.1f} s"


def flags_of(letter: str, name: str, devices: int) -> tuple[str, ...]:
    """The flags of a letter for a config, beyond the path of a model and the data."""
    mesh = () if devices == 1 else (f"mesh.fsdp={devices}",)
    critic = [flag.replace("actor", "critic") for flag in FLAGS[letter] if name == "ppo"]
    return (*mesh, *FLAGS[letter], *critic)


def config_of(shape: str, name: str, flags: Sequence[str]) -> Config:
    """The config for pretrained models at a shape; no weights and data are read."""
    sizes = {"actor.hf_config": to_hf_config(SHAPES[shape]), "data.tokenizer": "char"}
    files = {"data.train_files": [], "data.val_files": [], "data.train_tasks": "[chain_sum]"}
    changes = [*sizes.items(), *files.items(), *map(_pair, flags)]
    return load_config(CONFIGS[name], changes)


def _pair(flag: str) -> tuple[str, str]:
    key, _, value = flag.partition("=")
    return key, value


def advice(shape: str, name: str, devices: int) -> Advice | None:
    """The first flags that fit; None where none do."""
    for letter in FLAGS:
        planned = plan(shape, name, devices, flags_of(letter, name, devices))
        if planned.fits:
            return Advice(letter=letter, planned=planned)
    return None


def plan(shape: str, name: str, devices: int, flags: Sequence[str]) -> Estimate:
    """Memory and time on GPUs of one host, without compiling."""
    config = config_of(shape, name, flags)
    card = rates_of(HARDWARE)
    hosts = Devices(mesh=config.mesh, hosts=1, rates=card, host_devices=devices)
    return placed(work_of(config), config, hosts)


def table_lines() -> list[str]:
    """The table of docs/my-model.md."""
    lines = [f"| model | GPUs | {' | '.join(CONFIGS)} |", "|---" * (2 + len(CONFIGS)) + "|"]
    for shape, name in MODELS.items():
        for devices in COUNTS:
            found = [advice(shape, config, devices) for config in CONFIGS]
            cells = ["does not fit" if each is None else each.text for each in found]
            lines.append(f"| {name} | {devices} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    lines = table_lines()
    print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
