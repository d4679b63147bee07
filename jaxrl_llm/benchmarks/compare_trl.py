"""Runs of ours and of TRL's GRPOTrainer one after the other, each in a process of its own.

Records are appended as they come, so what was cut short still says how far it got.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.benchmarks.learning_curves import SIDES
from jaxrl_llm.benchmarks.peers import FOLDER
from jaxrl_llm.benchmarks.trl_work import trl_setup, trl_work
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.overrides import to_json

# Ours does what TRL is not asked for only once, at the end: validate, and save.
WITHOUT_EXTRAS = (
    "--config.validation.before_train=False",
    "--config.validation.every=0",
    "--config.save_every=0",
    "--config.log.tensorboard=False",
    "--config.log.samples_every=0",
)


class Comparison:
    """Where the records go, and how the two sides are started."""

    def __init__(
        self,
        config: Config,
        *,
        output: Path,
        work_folder: Path,
        peer_python: str | None,
        time_limit_s: float,
    ):
        """Raises ConfigError for a config that TRL cannot run alike, before anything is run."""
        self._config, self._output, self._folder = config, output, work_folder
        self._python, self._limit = peer_python or sys.executable, time_limit_s
        self._folder.mkdir(parents=True, exist_ok=True)
        trl_setup(config)

    def run(self, seeds: Sequence[int], sides: Sequence[str]) -> int:
        """Every seed on every side, in turn; how many processes failed."""
        unknown = sorted(set(sides) - set(SIDES))
        if unknown:
            raise ConfigError(f"--sides={unknown[0]}: a side is one of {', '.join(SIDES)}")
        failed = 0
        for seed in seeds:
            for side in sides:
                config = replace(self._config, seed=seed)
                start = time.perf_counter()
                code = self._ours(config) if side == "ours" else self._trl(config)
                wall = time.perf_counter() - start
                self._append({"wall_seconds": wall, "exit_code": code}, side, seed)
                failed += code != 0
        return failed

    def _ours(self, config: Config) -> int:
        """scripts/train.py on the config as a file of its own; its curve is in metrics.jsonl."""
        run_dir = self._folder / f"ours-{config.seed}"
        if run_dir.exists():
            raise ConfigError(f"{run_dir} holds a run already: remove it, or set --work_folder")
        file = self._folder / f"ours-{config.seed}.py"
        file.write_text(CONFIG_FILE.format(text=json.dumps(to_json(config))))
        command = [sys.executable, str(FOLDER.parent / "train.py"), f"--config={file}"]
        command += [*WITHOUT_EXTRAS, f"--config.run_dir={run_dir}"]
        if not config.compile_cache:
            command.append(f"--config.compile_cache={self._folder / 'compile_cache'}")
        log = self._folder / f"ours-{config.seed}.log"
        with open(log, "w") as text:
            process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT)
            code = self._wait(process, log)
        metrics = run_dir / "metrics.jsonl"
        for line in metrics.read_text().splitlines() if metrics.exists() else ():
            found = json.loads(line)
            if found["training/global_step"]:
                step = {"step": found["training/global_step"], "reward": found["critic/score/mean"]}
                self._append(step | {"seconds": found["timing_s/step"]}, "ours", config.seed)
        return code

    def _trl(self, config: Config) -> int:
        """The peer's process; its lines are records but for the side and the seed."""
        work = self._folder / f"trl-{config.seed}.json"
        work.write_text(json.dumps(trl_work(config)))
        log = self._folder / f"trl-{config.seed}.log"
        with open(work) as given, open(log, "w") as text:
            process = subprocess.Popen(
                [self._python, str(FOLDER / "trl_grpo.py")],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=text,
                text=True,
            )
            timer = threading.Timer(self._limit, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                self._append(json.loads(line), "trl", config.seed)
            timer.cancel()
            return self._wait(process, log)

    def _wait(self, process: subprocess.Popen[Any], log: Path) -> int:
        try:
            code = process.wait(self._limit)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            print(f"exit code {code}; the end of {log}:\n{last}", file=sys.stderr, flush=True)
        return code

    def _append(self, record: dict[str, Any], side: str, seed: int) -> None:
        with open(self._output, "a") as file:
            file.write(json.dumps({"side": side, "seed": seed} | record) + "\n")


# The whole config with its overrides, so that ours runs exactly what TRL's work was made of.
CONFIG_FILE = """from jaxrl_llm.overrides import from_json

TEXT = {text}


def get_config():
    return from_json(TEXT)
"""
