"""Runs main.py of its folder as a script that may use names of the library without an import."""

import sys
from pathlib import Path
from types import ModuleType

from jaxrl_llm.sandbox.library import RECURSION_LIMIT, library_names

FILE = "main.py"


def main() -> None:
    """Run the file as the module __main__."""
    source = Path(FILE).read_text(errors="surrogatepass")
    module = ModuleType("__main__")
    module.__dict__.update(library_names(source), __file__=FILE)
    sys.modules["__main__"], sys.argv[:] = module, [FILE]
    sys.setrecursionlimit(RECURSION_LIMIT)
    exec(compile(source, FILE, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
