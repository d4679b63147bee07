"""What users run instead, measured in a process of its own on the same machine.

A peer is a standalone script of scripts/peers/. It reads its work as JSON from stdin and prints a
JSON object a case. It runs before this process touches the GPU, because jax claims the memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "peers"
TIME_LIMIT_S = 1800

# The peer scripts of each benchmark; attention's are other implementations in this process.
PEERS: dict[str, tuple[str, ...]] = {
    "generation": ("naive_jax_generation", "vllm_generation"),
    "training": ("torch_training",),
    "attention": (),
}
# These need jax, so this Python has what they need; --peer_python is for the others.
WITH_JAX = ("naive_jax_generation",)


def run_peer(name: str, work: dict[str, Any], *, python: str | None) -> list[dict[str, Any]]:
    """The objects that the peer printed; one with an `error` when it failed as a whole.

    Each has `case` and `peer`, and `seconds` (a list, one a repeat) or `error`.
    """
    interpreter = python if python and name not in WITH_JAX else sys.executable
    command = [interpreter, str(FOLDER / f"{name}.py")]
    try:
        done = subprocess.run(
            command, input=json.dumps(work), capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
    except FileNotFoundError:
        return [{"peer": name, "error": f"--peer_python={python}: no such program"}]
    except subprocess.TimeoutExpired:
        return [{"peer": name, "error": f"took longer than {TIME_LIMIT_S} s"}]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-3:])
        found.append({"peer": name, "error": f"exit code {done.returncode}: {last[-500:]}"})
    return found
