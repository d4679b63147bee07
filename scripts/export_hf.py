"""Write a checkpoint for Hugging Face: python scripts/export_hf.py --model=RUN --output=DIR

The same as `jaxrl export`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("export")
