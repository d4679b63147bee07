"""A chat template is a program of the model's folder: its first rendering is tried with limits.

A process of its own renders the conversation. It ends after some seconds of computing, or above
some memory, or writes too long a text. Only then is the template used in this process.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SECONDS = 5  # limit of computing
PATIENCE = 60  # limit by the clock: a busy machine may let the process wait
MEMORY = 2**30  # bytes that the process may take, its imports included
LONGEST = 10**7  # characters of the text; tokenizers abort a process that has no memory left
OUT_OF_MEMORY, TOO_LONG = 3, 4  # exit codes

_TRIAL = """
import json, resource, sys
request = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (request["memory"],) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"],) * 2)
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def refuse(what):
    raise ValueError(what)

environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
try:
    text = environment.from_string(request["template"]).render(**request["variables"])
    if len(text) > request["longest"]:
        sys.exit(request["too_long"])
except MemoryError:
    sys.exit(request["out_of_memory"])
except Exception:
    pass  # the process that uses the template says what is wrong with it
"""


def try_template(template: str | Mapping[str, str], variables: Mapping[str, Any]) -> None:
    """Render once with limits. Of several named templates the default one is tried.

    Raises: ValueError when it takes too long, too much memory, or writes too long a text. Other
        mistakes are left to the rendering itself.
    """
    text = template if isinstance(template, str) else template.get("default", "")
    request = {
        "template": text,
        "variables": dict(variables),
        "memory": MEMORY,
        "seconds": SECONDS,
        "longest": LONGEST,
        "out_of_memory": OUT_OF_MEMORY,
        "too_long": TOO_LONG,
    }
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL],
            input=json.dumps(request, default=str),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it did not end within {PATIENCE} s") from None
    if trial.returncode == OUT_OF_MEMORY:
        raise ValueError(f"it takes more than {MEMORY / 2**30:g} GiB of memory")
    if trial.returncode == TOO_LONG:
        raise ValueError(f"it writes more than {LONGEST:,} characters")
    if -trial.returncode in (signal.SIGKILL, signal.SIGXCPU):
        raise ValueError(f"it takes more than {SECONDS} s of computing")
    if trial.returncode:
        raise ValueError(f"the process that tried it ended with code {trial.returncode}")
