"""A profile of a case: its kernels by time, largest first."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks.records import Kernel, Profile
from jaxrl_llm.observability import profile

# A number at the end distinguishes instances of one kernel: loop_add_fusion_12.
INSTANCE = re.compile(r"([._]\d+)+$")


def record(folder: Path, run: Callable[[], Any]) -> Profile:
    """Run once under jax's profiler. The trace stays in `folder`, for xprof or Perfetto.

    An earlier trace there is replaced. RuntimeError if the profiler saw no kernel.
    """
    with profile.trace(folder):
        jax.block_until_ready(run())
    return read_profile(profile.read(folder))


def read_profile(data: Any) -> Profile:
    """The kernels of the first GPU, or of the CPU where there is none."""
    planes = {plane.name: plane for plane in data.planes}
    if events := profile.first_gpu(data):
        return summarise_gpu([(e.start, e.end, INSTANCE.sub("", e.name)) for e in events])
    return summarise_cpu(
        [_span(event) for event in line.events if "hlo_op" in dict(event.stats)]
        for line in planes["/host:CPU"].lines
    )


Span = tuple[float, float, str]  # start and end in ns, name


def summarise_gpu(spans: Iterable[Span]) -> Profile:
    """Time in which kernels overlap counts for the one that began first, so they add up to `busy`.

    Kernels overlap in parallel parts of a graph, and where a kernel is launched early and waits for
    the one before it, as cuBLAS' are.
    """
    every = sorted(spans, key=lambda s: (s[0], -s[1]))
    own, until = [], -math.inf
    for start, end, name in every:
        own.append((name, max(end - max(start, until), 0.0)))
        until = max(until, end)
    return _profile(every, own)


def summarise_cpu(lines: Iterable[list[Span]]) -> Profile:
    """A line is a thread with nested spans: each counts without the spans inside it."""
    own, every = [], []
    for line in lines:
        open_spans: list[Span] = []
        for span in sorted(line, key=lambda s: (s[0], -s[1])):
            start, end, name = span
            while open_spans and open_spans[-1][1] <= start:
                open_spans.pop()
            if open_spans:
                own.append((open_spans[-1][2], start - end))
            open_spans.append(span)
            own.append((name, end - start))
        every += line
    return _profile(sorted(every), own)


def _profile(every: list[Span], own: list[tuple[str, float]]) -> Profile:
    if not every:
        raise RuntimeError("the profiler saw no kernel; is another profiler running?")
    seconds: dict[str, float] = defaultdict(float)
    for name, ns in own:
        seconds[name] += ns / 1e9
    calls = Counter(name for _, _, name in every)
    busy, until = 0.0, -math.inf
    for start, end, _ in every:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    largest = sorted(seconds, key=lambda name: -seconds[name])
    return Profile(
        seconds=(until - every[0][0]) / 1e9,
        busy=busy / 1e9,
        kernels=tuple(Kernel(name, seconds[name], calls[name]) for name in largest),
    )


def _span(event: Any) -> Span:
    start = event.start_ns
    return start, start + event.duration_ns, INSTANCE.sub("", event.name)
