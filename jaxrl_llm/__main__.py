"""`python -m jaxrl_llm` is the command `jaxrl`."""

from jaxrl_llm.launch.main import main

if __name__ == "__main__":
    main()
