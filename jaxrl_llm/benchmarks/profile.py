"""A profile of what a case ran: the kernels that its time went to, largest first."""

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.benchmarks.records import Kernel, Profile

# Numbers at the end tell instances of one kernel apart: loop_add_fusion_12.
INSTANCE = re.compile(r"([._]\d+)+$")


def record(folder: Path, run: Callable[[], Any]) -> Profile:
    """Run once under jax's profiler. The trace stays in `folder`, for xprof or Perfetto.

    An earlier trace there is replaced. RuntimeError where the profiler saw no kernel.
    """
    shutil.rmtree(folder, ignore_errors=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a line a Python call would be most of the file
    with jax.profiler.trace(folder, profiler_options=options):
        jax.block_until_ready(run())
    (file,) = folder.glob("**/*.xplane.pb")
    return read_profile(jax.profiler.ProfileData.from_file(str(file)))


def read_profile(data: Any) -> Profile:
    """The kernels of the first GPU, or of the CPU where there is none."""
    planes = {plane.name: plane for plane in data.planes}
    if "/device:GPU:0" in planes:
        lines = [x for x in planes["/device:GPU:0"].lines if x.name.startswith("Stream")]
        kernels = [[_span(event) for event in line.events] for line in lines]
    else:
        kernels = [
            [_span(event) for event in line.events if "hlo_op" in dict(event.stats)]
            for line in planes["/host:CPU"].lines
        ]
    return summarise(kernels)


Span = tuple[float, float, str]  # start and end in ns, name


def summarise(lines: Iterable[list[Span]]) -> Profile:
    """Sums by kernel over lines of spans; those of one line may lie in each other."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    every: list[Span] = []
    for line in lines:
        open_spans: list[Span] = []
        for span in sorted(line, key=lambda s: (s[0], -s[1])):
            start, end, name = span
            while open_spans and open_spans[-1][1] <= start:
                open_spans.pop()
            if open_spans:
                seconds[open_spans[-1][2]] -= (end - start) / 1e9
            open_spans.append(span)
            seconds[name] += (end - start) / 1e9
            calls[name] += 1
        every += line
    if not every:
        raise RuntimeError("the profiler saw no kernel; is another profiler running?")
    busy, until = 0.0, 0.0
    for start, end, _ in sorted(every):
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    largest = sorted(seconds, key=lambda name: -seconds[name])
    return Profile(
        seconds=(until - min(start for start, _, _ in every)) / 1e9,
        busy=busy / 1e9,
        kernels=tuple(Kernel(name, seconds[name], calls[name]) for name in largest),
    )


def _span(event: Any) -> Span:
    start = event.start_ns
    return start, start + event.duration_ns, INSTANCE.sub("", event.name)
