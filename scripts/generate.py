"""Answer a prompt: python scripts/generate.py --model=PATH --prompt="..."

The same as `jaxrl generate`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("generate")
