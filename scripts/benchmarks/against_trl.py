"""Runs of ours and of TRL's GRPOTrainer in turn, and a table of their rewards and times.

Each run is a process of its own. A record is a JSON object a line, appended as it comes, so a run
that was cut short still says how far it got. Of each iteration: side, seed, step, reward (the mean
over its samples), seconds. Of each finished process: side, seed, wall_seconds (start to end, with
imports, loading and compilation), exit_code.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.baseline import FOLDER
from benchmarks.trl_work import trl_setup, trl_work
from jaxrl_llm.config import Config, ConfigError, to_json

SCRIPTS = Path(__file__).resolve().parents[1]
SIDES = ("ours", "trl")
# TRL neither validates nor saves, so ours does both only once, at the end.
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
        """Raises ConfigError for a config that TRL cannot run alike, before any run starts."""
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
        """Run scripts/train.py on the config, written as a file; the curve is in metrics.jsonl."""
        run_dir = self._folder / f"ours-{config.seed}"
        if run_dir.exists():
            raise ConfigError(f"{run_dir} holds a run already: remove it, or set --work_folder")
        file = self._folder / f"ours-{config.seed}.py"
        file.write_text(CONFIG_FILE.format(text=json.dumps(to_json(config))))
        command = [sys.executable, str(SCRIPTS / "train.py"), f"--config={file}"]
        command += [*WITHOUT_EXTRAS, f"--config.run_dir={run_dir}"]
        if not config.compile_cache:
            command.append(f"--config.compile_cache={self._folder / 'compile_cache'}")
        log = self._folder / f"ours-{config.seed}.log"
        with open(log, "w") as text:
            process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT)
            code = self._wait(process, log)
        metrics = run_dir / "metrics.jsonl"
        for line in metrics.read_text().splitlines() if metrics.exists() else ():
            row = json.loads(line)
            if row["training/global_step"]:
                step = {"step": row["training/global_step"], "reward": row["critic/score/mean"]}
                self._append(step | {"seconds": row["timing_s/step"]}, "ours", config.seed)
        return code

    def _trl(self, config: Config) -> int:
        """The peer's process; its lines are records but for the side and the seed."""
        work = self._folder / f"trl-{config.seed}.json"
        work.write_text(json.dumps(trl_work(config)))
        log = self._folder / f"trl-{config.seed}.log"
        with open(work) as prompts, open(log, "w") as text:
            process = subprocess.Popen(
                [self._python, str(FOLDER / "trl_grpo.py")],
                stdin=prompts,
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


# The config with its overrides: ours runs exactly what TRL's work was made of.
CONFIG_FILE = """from jaxrl_llm.config import from_json

TEXT = {text}


def get_config():
    return from_json(TEXT)
"""


def table(file: Path, window: int) -> list[str]:
    """A line for each run of a file of records: mean rewards and seconds.

    ValueError when steps are missing or come twice: two runs of a side and seed in one file.
    """
    steps: dict[tuple[str, int], list[dict[str, Any]]] = {}
    seconds_of_processes: dict[tuple[str, int], float] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        run = (record["side"], record["seed"])
        if "step" in record:
            steps.setdefault(run, []).append(record)
        elif record.get("exit_code") == 0:
            seconds_of_processes[run] = record["wall_seconds"]
    head = f"| side | seed | steps | reward | reward of the last {window} | first step, s |"
    lines = [f"{head} median of the others, s | process, s |", "|---|---|---|---|---|---|---|---|"]
    for run, records in sorted(steps.items()):
        if [record["step"] for record in records] != list(range(1, len(records) + 1)):
            raise ValueError(f"{file}: two runs of {run} are in one file; give another --output")
        rewards = [record["reward"] for record in records]
        first, *others = (record["seconds"] for record in records)
        wall = f"{seconds_of_processes[run]:.1f}" if run in seconds_of_processes else "cut"
        cells = [*map(str, run), str(len(records)), f"{statistics.fmean(rewards):.3f}"]
        cells += [f"{statistics.fmean(rewards[-window:]):.3f}", f"{first:.1f}"]
        cells += [f"{statistics.median(others):.3f}" if others else "-", wall]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
