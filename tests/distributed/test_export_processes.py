"""Two processes hold halves of a model: both import it, both export it, one of them writes."""

import socket
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file
from tiny_models import tiny_config, write_directory

PROGRAM = """
import sys
import jax
from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.distributed import multihost
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import TRAIN_RULES, shardings
from jaxrl_llm.models.base import model_spec

address, index, source, out = sys.argv[1:]
multihost.initialize(address, 2, int(index), timeout_s=60)
spec = model_spec(load_model_config(source))
placed = shardings(spec.axes, spec.params, make_mesh(fsdp=2), TRAIN_RULES)
params = import_params(source, spec, placed)
assert not params["decoder"]["embed"]["table"].is_fully_addressable
export(out, spec, params, tokenizer_files_from=source)
multihost.barrier("end", 60)
"""


def test_export_of_a_model_spread_over_two_processes(tmp_path: Path):
    source = write_directory(tmp_path / "source", tiny_config())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(index), source, tmp_path / "out"],
            env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    theirs = load_file(source / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
