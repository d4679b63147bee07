"""Speed of a server with OpenAI's API: python scripts/benchmarks/serve.py --shape=qwen2.5-1.5b

Serves random weights of a named shape, and asks from another process: each client sends a request
as soon as its last one is answered. A JSON line for each number of clients. The same work comes
first as a warm-up, in which programs are compiled.

Flags:
  --shape=qwen2.5-1.5b     a name of benchmark.py, or the path of a config.json; "tiny" for a test
  --clients=1,64,256       requests at once
  --prompt=512  --response=512   tokens of a prompt, and of an answer
  --rounds=2               requests of each client that are measured
  --dtype=bfloat16         dtype of the weights and of the computation
  --slots=0                answers generated at once; 0: the most clients
  --steps=0                most decode steps of a call of the engine; 0: the server's own
  --url=URL --model=NAME   measure a running server instead, e.g. http://127.0.0.1:8000/v1
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SCRIPTS = Path(__file__).resolve().parents[1]
FLAGS = {
    "shape": "qwen2.5-1.5b",
    "clients": "1,64,256",
    "prompt": "512",
    "response": "512",
    "rounds": "2",
    "dtype": "bfloat16",
    "slots": "0",
    "steps": "0",
    "url": "",
    "model": "",
    "ids": "0",  # ids of the vocabulary; the first process gives it to the second
}


def flags_of(argv: list[str]) -> dict[str, str]:
    """The flags and their defaults; SystemExit for an unknown one."""
    flags = dict(FLAGS)
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in flags:
            raise SystemExit(f"unknown flag {word}; the flags are {', '.join(FLAGS)}")
        flags[name] = value
    return flags


def main(argv: list[str]) -> None:
    """Serve, and let another process ask; or ask the server of --url."""
    flags = flags_of(argv)
    if flags["url"]:
        asyncio.run(ask(flags))
    else:
        serve(flags)


# ------------------------------------------------------------------------- the server


def serve(flags: dict[str, str]) -> None:
    """Serve random weights while a process asks."""
    sys.path.insert(0, str(SCRIPTS))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # as a command does
    import jax

    from benchmarks.sizes import read_shapes
    from jaxrl_llm.distributed.device_memory import free_memory
    from jaxrl_llm.evaluation.serving import STEPS, serving_engine
    from jaxrl_llm.models.base import init_sharded, model_spec
    from jaxrl_llm.server.listening import Server
    from jaxrl_llm.server.settings import ServerSettings
    from jaxrl_llm.tokenizer import load_tokenizer

    ((name, config),) = read_shapes(flags["shape"]).items()
    spec = model_spec(config, dtype=flags["dtype"], form="merged")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = init_sharded(spec, jax.random.key(0), jax.tree.map(lambda _: place, spec.params))
    most = max(map(int, flags["clients"].split(",")))
    context = int(flags["prompt"]) + int(flags["response"])
    engine = serving_engine(
        spec,
        params,
        (),  # each answer has its whole length
        memory=free_memory(sum(x.nbytes for x in jax.tree.leaves(params))),
        context=context,
        slots=int(flags["slots"]) or most,
        steps=int(flags["steps"]) or STEPS,
    )
    del params
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config.vocab_size)
        tokenizer = load_tokenizer(folder)
        print(json.dumps({"device": str(jax.devices()[0].device_kind), "shape": name}), flush=True)
        with Server(engine, tokenizer, name, context, ServerSettings(port=0)) as server:
            changes = {"url": server.url, "model": name, "ids": str(config.vocab_size)}
            words = [f"--{key}={value}" for key, value in (flags | changes).items()]
            done = subprocess.run([sys.executable, __file__, *words])
    sys.exit(done.returncode)


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level tokenizer of `size` ids, whose texts come in the usual time."""
    from tokenizers import Tokenizer, decoders, models

    words = {"<|end|>": 0} | {f"\u0120{i:x}": i for i in range(1, size)}
    fast = Tokenizer(models.BPE(words, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------------- the clients


@dataclass
class Answered:
    """Times of one request, in seconds."""

    first: float  # until the first token
    whole: float
    tokens: int


@dataclass
class Load:
    """Clients that send requests to one server."""

    url: str
    model: str
    ids: int  # ids of the vocabulary that prompts take; 0: small ones
    prompt: int
    response: int
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, clients: int, rounds: int) -> tuple[list[Answered], float]:
        """The answers to all clients, and the seconds that they took."""
        start = time.perf_counter()
        answers = await asyncio.gather(*(self.client(rounds) for _ in range(clients)))
        return [one for each in answers for one in each], time.perf_counter() - start

    async def client(self, rounds: int) -> list[Answered]:
        """Send requests one after the other."""
        return [await self.request() for _ in range(rounds)]

    async def request(self) -> Answered:
        """Send one request as a stream, and read it to its end."""
        address = urlsplit(self.url)
        body = json.dumps(
            {
                "model": self.model,
                "prompt": [self.draw.randrange(1, self.ids or 1000) for _ in range(self.prompt)],
                "max_tokens": self.response,
                "temperature": 1.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST {address.path}/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(
            address.hostname, address.port, limit=1 << 20
        )
        writer.write(head.encode() + body)
        first, last = 0.0, b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):  # an event is never cut by a chunk of HTTP
                first, last = first or time.perf_counter() - began, line
            elif line.startswith(b"HTTP/") and b" 200" not in line:
                raise SystemExit(f"{line.decode()} {(await reader.read()).decode()}")
        writer.close()
        usage = json.loads(last.removeprefix(b"data: "))["usage"]
        return Answered(first, time.perf_counter() - began, usage["completion_tokens"])


async def ask(flags: dict[str, str]) -> None:
    """Measure each number of clients."""
    load = Load(
        url=flags["url"],
        model=flags["model"],
        ids=int(flags["ids"]),
        prompt=int(flags["prompt"]),
        response=int(flags["response"]),
    )
    for clients in map(int, flags["clients"].split(",")):
        answers, warm = await load.run(clients, int(flags["rounds"]))
        answers, seconds = await load.run(clients, int(flags["rounds"]))
        tokens = sum(answer.tokens for answer in answers)
        between = [(a.whole - a.first) / max(a.tokens - 1, 1) for a in answers]
        line = {
            "clients": clients,
            "requests": len(answers),
            "output tokens": tokens,
            "output tokens/s": round(tokens / seconds, 1),
            "seconds": round(seconds, 3),
            "warm-up s": round(warm, 1),
            "ms to the first token": in_ms([answer.first for answer in answers]),
            "ms a token": in_ms(between),
            "ms a request": in_ms([answer.whole for answer in answers]),
        }
        print(json.dumps(line), flush=True)


def in_ms(seconds: list[float]) -> dict[str, Any]:
    """The median and the 99th percentile."""
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": round(1e3 * statistics.median(ordered), 2), "p99": round(1e3 * late, 2)}


if __name__ == "__main__":
    main(sys.argv[1:])
