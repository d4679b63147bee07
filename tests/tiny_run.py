"""A whole run of seconds: its config, its processes, and what it left on disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from in_process import run_here
from tiny_iteration import OF_THE_DECODE_LOOP

from jaxrl_llm.launch.main import run

REPOSITORY = Path(__file__).parents[1]
TRAIN = [sys.executable, str(REPOSITORY / "scripts" / "train.py")]
TIMEOUT_S = 300
TOTAL_STEPS = 12
SAVE_EVERY = 2
KEPT = 3  # checkpoints, and the best
SAMPLES = 32  # an iteration
EPOCH_STEPS = 4  # iterations that use every training problem once

CONFIG = """
from jaxrl_llm.config import *

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


def get_config() -> Config:
    return Config(
        name="tiny",
        total_steps=12,
        save_every=2,
        data=DataConfig(
            tokenizer="char",
            train_tasks=(ChainSum(num_terms=2, num_digits=1, size=64),),
            val_tasks=(ChainSum(num_terms=2, num_digits=1, size=16),),
            train_batch_size=16,
            max_prompt_length=4,
            max_response_length=4,
        ),
        actor=ActorConfig(
            hf_config=MODEL,
            ppo_mini_batch_size=8,
            ppo_epochs=2,
            shuffle=True,
            # 4 updates a step. Runs of fewer steps have the same program, which is compiled once.
            optimizer=OptimizerConfig(
                learning_rate=3e-3, schedule="cosine", warmup_steps=3, total_steps=48
            ),
        ),
        critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-3, offload=True)),
        rollout=RolloutConfig(n=2, num_slots=3),
        algorithm=PPO(
            use_kl_in_reward=True, kl_controller="adaptive", kl_coef=0.05, kl_horizon=100.0
        ),
        reward=RewardConfig(functions=(Custom(path="FOLDER/reward.py:digits"),)),
        validation=ValidationConfig(every=3),
        warmup=SupervisedConfig(steps=10, batch_size=16),
        checkpoint=CheckpointConfig(keep_latest=KEPT, best_metric="actor/entropy"),
    )
"""

REWARD = '''
"""The share of a completion that is digits. A file `pause` holds up the step that it names."""
import time
from pathlib import Path

PAUSE = Path(__file__).with_name("pause")


def digits(completions, trainer_state):
    if PAUSE.exists() and int(PAUSE.read_text()) == trainer_state.global_step:
        PAUSE.with_name("paused").touch()
        while PAUSE.exists():
            time.sleep(0.01)
    return [sum(c.isdigit() for c in text) / 4 for text in completions]
'''


class TinyRun:
    """One run directory with a config of its own, worked on by one process after the other."""

    def __init__(self, folder: Path, *flags: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run_dir = folder / "run"
        self.flags = flags
        config = folder / "tiny.py"
        if not config.exists():  # a process may be reading it
            (folder / "reward.py").write_text(REWARD)
            config.write_text(CONFIG.replace("FOLDER", str(folder)).replace("KEPT", str(KEPT)))
        self.arguments = [f"--config={config}", f"--config.run_dir={self.run_dir}"]
        self._log = folder / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def step_path(self, step: int) -> Path:
        return self.checkpoints / f"global_step_{step}"

    def pause_at(self, step: int) -> None:
        """Have the reward function of `step` wait until `unpause`."""
        (self.folder / "paused").unlink(missing_ok=True)
        (self.folder / "pause").write_text(str(step))

    def paused(self) -> bool:
        return (self.folder / "paused").exists()

    def unpause(self) -> None:
        (self.folder / "pause").unlink()

    @contextlib.contextmanager
    def process(self, *flags: str, launcher: list[str] = TRAIN) -> Iterator[subprocess.Popen[str]]:
        """The run as a process, as a shell would start it; never left behind."""
        command = [*launcher, *self.arguments, *self.flags, *flags]
        # With another number of devices it would compile again what the tests have compiled.
        devices = {"JAX_NUM_CPU_DEVICES": str(jax.device_count("cpu"))}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **devices}
        with open(self._log, "a") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a signal to its group is what a terminal sends
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(TIMEOUT_S)

    def finish(self, *flags: str, launcher: list[str] = TRAIN, code: int = 0) -> str:
        """Run to the end; its output. The exit code must be `code`."""
        start = self._log.stat().st_size if self._log.exists() else 0
        with self.process(*flags, launcher=launcher) as process:
            found = process.wait(TIMEOUT_S)
        output = self._log.read_text()[start:]
        assert found == code, f"exit code {found}\n{output}"
        return output

    def finish_here(self, *flags: str, code: int = 0) -> str:
        """As `finish`, in this process: for a test that asks nothing of processes."""
        words = [*self.arguments, *self.flags, *flags]
        ended = run_here(partial(run, "train", words), words)
        output = ended.stdout + ended.stderr
        assert ended.returncode == code, f"exit code {ended.returncode}\n{output}"
        return output

    def kill_when(self, condition: Callable[[], Any], *flags: str) -> None:
        """Start the run and `kill -9` it as soon as `condition` holds."""
        with self.process(*flags) as process:
            self.wait_for(condition, process)
            process.kill()
            process.wait(TIMEOUT_S)

    def wait_for(self, condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            code = process.poll()
            assert code is None, f"ended early with {code}\n{self._log.read_text()}"
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Each step's metrics, without times and bytes; every step must stand once and in order."""
        rows = read_jsonl(self.run_dir / "metrics.jsonl")
        steps = [row["training/global_step"] for row in rows]
        assert steps == sorted(set(steps)), steps
        timed = ("timing_", "perf/", "communication/")
        kept = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
        return dict(zip(steps, kept, strict=True))

    def events(self) -> list[dict[str, Any]]:
        """The alarms, without those that depend on the machine."""
        timed = ("step_time", "host_memory", "device_memory")
        rows = read_jsonl(self.run_dir / "events.jsonl")
        return [row for row in rows if row["name"] not in timed]

    def samples(self, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
        """Every sample of the trace by step and index; none may stand twice."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for path in sorted((self.run_dir / "trace").glob(f"{kind}*.jsonl")):
            for record in read_jsonl(path):
                key = (record["step"], record["index"])
                assert key not in found, f"{kind} sample {key} is in the trace twice"
                found[key] = record
        return found

    def saved_steps(self) -> list[int]:
        names = [path.name for path in self.checkpoints.glob("global_step_*")]
        return sorted(int(name.rpartition("_")[2]) for name in names)

    def weights(self, step: int) -> dict[str, np.ndarray]:
        """Every array of a checkpoint and of the frozen roles, by item and path."""
        items = [path for path in self.step_path(step).iterdir() if (path / "_METADATA").exists()]
        assert items
        out: dict[str, np.ndarray] = {}
        for path in [*items, *self.checkpoints.glob("frozen")]:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.metadata(path).item_metadata.tree
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                restored = checkpointer.restore(path, restore_args=as_numpy)
            for key, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]:
                out[path.name + jax.tree_util.keystr(key)] = np.asarray(leaf)
        return out


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype and array.shape == second[name].shape, name
        assert array.tobytes() == second[name].tobytes(), f"{name} differs"


def assert_close(
    found: dict[str, float], expected: dict[str, float], *, rtol: float, atol: float
) -> None:
    """The same metrics with about the same values; the counts of a decode loop depend on its slots.

    A replica decodes its own samples only, so the more replicas, the fewer steps it takes. Shares
    of idle stages and of attention's work exist on their mesh axes only.
    """

    def names(metrics: dict[str, float]) -> set[str]:
        of_mesh = ("/pipeline_bubble", "/attention_balance")
        return {name for name in metrics if not name.endswith(of_mesh)}

    assert names(found) == names(expected)
    for name in names(expected) - OF_THE_DECODE_LOOP:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
