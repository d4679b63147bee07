"""Memory of this machine that a process may use."""

import os
from collections.abc import Sequence
from pathlib import Path

# Memory limit of a container: control groups version 2, and version 1.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """Bytes that this process may use: the machine's, or its container's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [path.read_text().strip() for path in limits if path.exists()]
    return min([machine, *(int(text) for text in texts if text.isdigit())])
