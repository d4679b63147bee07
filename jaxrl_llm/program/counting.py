"""The number of programs that XLA compiled: a run compiles each of its programs once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jax import monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event, also of what it reads


@dataclass
class CompileCounter:
    """Programs that XLA compiled (or read from the compile cache) since `start`, by name."""

    names: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.names.total()

    def programs(self, name: str) -> int:
        """The number of compilations of the jitted function `name`."""
        return self.names[f"jit({name})"] + self.names[name]

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            self.names[str(kwargs.get("fun_name", "?"))] += 1
            self.seconds += duration_secs


@contextmanager
def count_compilations() -> Iterator[CompileCounter]:
    """Count the compilations inside: `with count_compilations() as c: step(); c.count`."""
    counter = CompileCounter()
    listen = counter._listen
    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counter
    finally:
        monitoring.unregister_event_duration_listener(listen)
