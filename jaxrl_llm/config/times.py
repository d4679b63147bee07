"""Points in time that a user writes: `checkpoint.save_by`. Imports no jax."""

import os
import re
import time
from collections.abc import Mapping
from datetime import datetime

# Epoch seconds of a job's start. A launcher sets it, so that restarts do not move the end.
STARTED = "JAXRL_STARTED"
_AFTER = re.compile(r"\+(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_UNITS_S = (86400, 3600, 60, 1)


def end_time(text: str, started: float) -> float:
    """Epoch seconds of `text`: a time as ISO 8601 or epoch seconds, or `+3h50m` after `started`.

    A time without a zone is of this machine's.

    Raises: ValueError for anything else.
    """
    if found := _AFTER.fullmatch(text):
        parts = zip(found.groups(), _UNITS_S, strict=True)
        return started + sum(int(number) * unit for number, unit in parts if number)
    if text.isdecimal() and len(text) == 10:
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            "expected a time such as 2026-11-25T18:00, +3h50m after the start, or epoch seconds "
            "such as $SLURM_JOB_END_TIME"
        ) from None


def start_time(environment: Mapping[str, str] = os.environ) -> float:
    """Epoch seconds of the start of this job, or of this process outside of a launcher."""
    given = environment.get(STARTED, "")
    return float(given) if re.fullmatch(r"\d+(\.\d+)?", given) else time.time()
