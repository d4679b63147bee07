"""Settings of a server. Imports no jax, so that a command refuses a flag at once."""

from typing import Annotated, TypedDict

from annotated_types import Ge, Le

from jaxrl_llm.typed_records.bounds import Count, Positive, Seconds, Whole
from jaxrl_llm.typed_records.record import Record


class ServerSettings(Record):
    """Settings of `jaxrl serve` and `OpenModel.serve`."""

    host: str = "127.0.0.1"  # address to listen on
    port: Annotated[int, Ge(0), Le(65535)] = 8000  # 0 takes a free one
    api_key: str = ""  # key that requests must have; empty: none
    seed: Whole = 0  # seed of requests that give none
    slots: Whole = 0  # answers generated at once; 0: 256 on a GPU, 8 on a CPU
    context: Whole = 0  # most tokens of a prompt and its answer; 0: as many as fit
    queue: Count = 1024  # most unfinished answers of all requests
    answer_s: Seconds = 600.0  # longest time of a request
    body_mb: Positive = 16.0  # largest body of a request


class ServerKeys(TypedDict, total=False):
    """The keyword arguments that make `ServerSettings`."""

    host: str
    port: int
    api_key: str
    seed: int
    slots: int
    context: int
    queue: int
    answer_s: float
    body_mb: float
