"""Attacks of a program on the sandbox and on the tests. Each is contained, and nothing is left."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sandboxed import needs_sandbox

from jaxrl_llm.rewards.code import code
from jaxrl_llm.sandbox.box import Limits, Sandbox
from jaxrl_llm.sandbox.processes import descendants

SMALL = Limits(seconds=0.5, memory_mb=150, processes=8, tmp_mb=4, output_kb=64)
LIBC = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"


pytestmark = needs_sandbox


@pytest.fixture(scope="module", autouse=True)
def others():
    """How many processes tests of other files left to this one, such as a tracker of resources."""
    return len(descendants(os.getpid()))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch, others):
    """A secret in the environment and in a file; afterwards no process and no file is new."""
    (tmp_path / "canary").write_text("secret")
    monkeypatch.setenv("CANARY", "secret")
    before = len(descendants(os.getpid()))
    yield
    # The sandbox that all share is two processes, if it was begun.
    assert len(descendants(os.getpid())) <= max(before, others + 2)
    assert [file.name for file in tmp_path.iterdir()] == ["canary"]
    assert (tmp_path / "canary").read_text() == "secret"


@pytest.fixture(scope="module")
def sandbox():
    """One sandbox survives all attacks, unless it is replaced for its memory."""
    with Sandbox(SMALL) as sandbox:
        yield sandbox


def attack(sandbox, source):
    """The outcome of a program. A sound one after it finds nothing."""
    marker = "marker" + secrets.token_hex(8)
    outcome = sandbox.run(["main.py", marker], files={"main.py": source})
    after = sandbox.run_source("import os; print(os.listdir('.'))")
    assert (after.code, after.stdout) == (0, "['main.py']\n")
    assert not running(marker)
    return outcome


def running(marker):
    """Processes of the machine, forked or not, that have `marker` among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


# Further cases of what another attack does too.
SLOW = {
    "sleep", "waits for input", "1 GB of errors", "1 GB of results", "thread bomb", "atexit",
    "setprofile", "os._exit in f", "endless iterator", "raises a stranger", "equality text",
    "forges wrong messages", "unequal to itself", "truth", "everything", "own math",
}  # fmt: skip


def quick_and_slow(attacks):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in attacks]


# ------------------------------------------------------------------------- too much

TOO_MUCH = {
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "timeout"),
    "fork bomb of orphans": (
        "import os\nwhile True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass",
        "",
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n"
        "  try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
        "  except RuntimeError: pass",
        "timeout",
    ),
    "1 GB of output": ("import os\nwhile True: os.write(1, b'x' * 2**20)", "output"),
    "1 GB of errors": ("import os\nwhile True: os.write(2, b'x' * 2**20)", "output"),
    "1 GB of results": ("import os\nwhile True: os.write(3, b'x' * 2**20)", "output"),
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n"
        "  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "while True: pass",
        "timeout",
    ),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "catastrophic regex": ("import re\nre.match('(a+)+b', 'a' * 60)", "timeout"),
    "9**9**9": ("9**9**9", "timeout"),
    "sleep": ("import time\ntime.sleep(99)", "timeout"),
    "waits for input": ("import os\nr, w = os.pipe()\nos.read(r, 1)", "timeout"),
}


@pytest.mark.parametrize("name", quick_and_slow(TOO_MUCH))
def test_what_takes_too_much_is_ended(name, sandbox):
    source, why = TOO_MUCH[name]
    start = time.monotonic()
    outcome = attack(sandbox, source)
    assert not outcome.succeeded or name == "fork bomb of orphans"
    assert outcome.why == why or not why
    assert time.monotonic() - start < 5.0


def test_memory_of_many_processes_has_one_limit():
    """With more seconds than the others: on a busy machine 240 MB take half of one."""
    source = (
        "import os, time\nfor _ in range(4):\n"
        "  if not os.fork():\n    x = bytearray(b'x') * (60 << 20); time.sleep(9)\ntime.sleep(9)"
    )
    with Sandbox(replace(SMALL, seconds=4.0)) as sandbox:
        start = time.monotonic()
        outcome = attack(sandbox, source)
        assert time.monotonic() - start < 5.0
    assert not outcome.succeeded and outcome.why == "memory"


# ------------------------------------------------------------------------- refused by the kernel

# Each prints what it got. The second entry is what the last line of its output must be.
REFUSED = {
    "memory bomb": ("try: bytearray(10**10)\nexcept MemoryError: print('refused')", "refused"),
    "memory in steps": (
        "x = []\ntry:\n  while True: x.append(bytearray(2**20))\n"
        "except MemoryError: print(len(x) < 150)",
        "True",
    ),
    "disk fill": (
        "n = 0\ntry:\n  for i in range(99):\n    with open(str(i), 'wb') as f:\n"
        "      f.write(bytes(2**20)); f.flush(); n += 1\nexcept OSError: print(n <= 4)",
        "True",
    ),
    "sparse file": (
        "try: open('x', 'wb').truncate(2**40)\nexcept OSError as e: print(e.strerror)",
        "File too large",
    ),
    "many files": (
        "n = 0\ntry:\n  while True: open(str(n), 'w').close(); n += 1\n"
        "except OSError: print(n < 5000)",
        "True",
    ),
    "many descriptors": (
        "import os\ntry:\n  x = []\n  while True: x.append(os.pipe())\n"
        "except OSError: print(len(x) < 64)",
        "True",
    ),
    "its limits raised": (
        "import resource as r\nfor k in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_FSIZE):\n"
        "  try: r.setrlimit(k, (r.RLIM_INFINITY,) * 2); print('raised')\n"
        "  except (ValueError, PermissionError): print('refused')",
        "refused",
    ),
    "/proc": ("import os\nprint(os.path.exists('/proc'))", "False"),
    "/sys": ("import os\nprint(os.path.exists('/sys'))", "False"),
    "parent's environment": (
        "import os\nprint('CANARY' in os.environ, os.path.exists(f'/proc/{os.getppid()}'))",
        "False False",
    ),
    "a file by its path": ("import os\nprint(os.path.exists(CANARY))", "False"),
    "symlink out": (
        "import os\nos.symlink(CANARY, 'x')\nos.symlink('/..', 'up')\n"
        "print(os.path.exists('x'), os.path.exists('up/home'))",
        "False False",
    ),
    "the tests in the repository": ("import os\nprint(os.path.exists(TESTS))", "False"),
    "home folders": (
        "import os\nprint([p for p in ('/home', '/mnt', '/run', '/var', '/etc/passwd') "
        "if os.path.exists(p)])",
        "[]",
    ),
    "write into the tree": (
        "import os, json\nfor p in ('/x', '/usr/x', os.path.dirname(json.__file__) + '/x'):\n"
        "  try: open(p, 'w'); print('written')\n  except OSError as e: print(e.errno)",
        "30",
    ),
    "overwrite a device": (
        "import os\ntry: os.remove('/dev/null'); print('removed')\n"
        "except OSError: print('refused')",
        "refused",
    ),
    "make a device": (
        "import os, stat\ntry: os.mknod('d', stat.S_IFBLK | 0o666, os.makedev(254, 0))\n"
        "except OSError: print('refused')",
        "refused",
    ),
    "become root": (
        "import os\ntry: os.setuid(0)\nexcept OSError: print('refused')",
        "refused",
    ),
    "setuid programs": (
        "import os\nfolders = ('/', '/usr', '/sandbox')\n"
        "print(all(os.statvfs(p).f_flag & os.ST_NOSUID for p in folders))",
        "True",
    ),
    "kill process 1": (
        "import os, signal\nfor n in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, "
        "signal.SIGTERM, signal.SIGHUP):\n  os.kill(1, n)\nprint(os.getppid())",
        "1",
    ),
    "limits of process 1": (
        "import resource as r, os\nfor pid in (1, os.getppid(), os.getpid()):\n"
        "  try: r.prlimit(pid, r.RLIMIT_NOFILE, (3, 3)); print('lowered')\n"
        "  except PermissionError: print('refused')",
        "refused",
    ),
    "CPUs and priority of process 1": (
        "import os\nfor call in (lambda: os.sched_setaffinity(1, {0}), lambda: "
        "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)), lambda: "
        "os.setpriority(os.PRIO_PROCESS, 1, 19)):\n"
        "  try: call(); print('changed')\n  except PermissionError: print('refused')",
        "refused",
    ),
    "its own limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (20, 20))\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE), r.prlimit(0, r.RLIMIT_NOFILE))",
        "(20, 20) (20, 20)",
    ),
    "kill the other processes": (
        "import os\nseen = []\nfor p in [*range(2, 2000)]:\n  if p != os.getpid():\n"
        "    try: os.kill(p, 9); seen.append(p)\n    except OSError: pass\nprint(seen)",
        "[]",
    ),
    "open descriptors": (
        "import os\nfound = []\nfor n in range(256):\n"
        "  try: os.fstat(n); found.append(n)\n  except OSError: pass\nprint(found)",
        "[0, 1, 2, 3]",
    ),
    "terminal": (
        "try: open('/dev/tty')\nexcept OSError: print('refused')",
        "refused",
    ),
    "internet": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', PORT), 1)\n"
        "except OSError: print('refused')",
        "refused",
    ),
    "name server": (
        "import socket\ntry: socket.getaddrinfo('example.com', 80)\n"
        "except OSError: print('refused')",
        "refused",
    ),
    "other sockets": (
        "import socket\nfor family in (2, 10, 16, 17, 31, 38, 40, 44):\n"  # netlink, vsock, ...
        "  try: socket.socket(family, socket.SOCK_RAW); print('open')\n"
        "  except PermissionError: print('refused')",
        "refused",
    ),
    "abstract socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect('\\0' + ABSTRACT)\nexcept OSError: print('refused')",
        "refused",
    ),
    "deep recursion": (
        "def f(): f()\ntry: f()\nexcept RecursionError: print('refused')",
        "refused",
    ),
}


@pytest.fixture(scope="module")
def listening():
    """A port of this machine and an abstract socket that would answer."""
    name = "jaxrl" + secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as port:
        abstract.bind("\0" + name)
        abstract.listen()
        yield {"PORT": port.getsockname()[1], "ABSTRACT": name}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_refuses(name, sandbox, tmp_path, listening):
    source, last = REFUSED[name]
    known = {"CANARY": str(tmp_path / "canary"), "TESTS": __file__, **listening}
    head = "".join(f"{key} = {value!r}\n" for key, value in known.items())
    outcome = attack(sandbox, head + source)
    lines = outcome.stdout.splitlines()
    assert outcome.why == "ended" and lines and lines[-1] == last, outcome
    assert set(lines) <= {last}


# Calls with numbers for x86-64, from its table of system calls.
SYSTEM_CALLS = {
    "ptrace": "libc.ptrace(16, 1, 0, 0)",
    "trace me": "libc.ptrace(0, 0, 0, 0)",
    "process_vm_readv": "libc.syscall(310, 1, 0, 0, 0, 0, 0)",
    "pidfd_getfd": "libc.syscall(438, 0, 0, 0)",
    "mount": "libc.mount(b'proc', b'/tmp', b'proc', 0, None)",
    "remount": "libc.mount(b'none', b'/usr', None, 0x1020, None)",
    "umount": "libc.umount2(b'/tmp', 2)",
    "mount_setattr": "libc.syscall(442, -100, b'/', 0, bytes(32), 32)",
    "new mount api": "libc.syscall(430, b'tmpfs', 0)",
    "chroot": "libc.chroot(b'/tmp')",
    "pivot_root": "libc.syscall(155, b'/', b'/tmp')",
    "user namespace": "libc.unshare(0x10000000)",
    "clone of a namespace": "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",
    "setns": "libc.setns(0, 0)",
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "io_uring": "libc.syscall(425, 1, bytes(120))",
    "userfaultfd": "libc.syscall(323, 0)",
    "perf_event_open": "libc.syscall(298, 0, 0, 0, 0, 0)",
    "keyring": "libc.syscall(250, 0, -3, 1)",
    "memory without a size": "libc.memfd_create(b'x', 0)",
    "shared memory": "libc.shmget(0, 2**20, 0o1600)",
    "file handles": "libc.syscall(304, 0, 0, 0)",
    "kernel module": "libc.syscall(313, 0, b'', 0)",
    "kernel log": "libc.syscall(103, 3, 0, 0)",
    "reboot": "libc.reboot(0x1234567)",
    "x32 call": "libc.syscall(0x40000000 + 39)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_system_calls_that_are_refused(sandbox):
    """One program makes all of them, since each is refused without an effect."""
    lines = [
        f"ctypes.set_errno(0); print({name!r}, {call}, ctypes.get_errno())"
        for name, call in SYSTEM_CALLS.items()
    ]
    outcome = attack(sandbox, LIBC + "\n".join(lines))
    assert outcome.stdout.splitlines() == [f"{name} -1 1" for name in SYSTEM_CALLS]  # EPERM


# ------------------------------------------------------------------------- ends of all kinds

ENDS = {
    "null pointer": ("import ctypes\nctypes.string_at(0)", -11),
    "abort": ("import os\nos.abort()", -6),
    "kills all and itself": (
        "import os, time\nif not os.fork(): time.sleep(99)\n"
        "os.kill(-1, 9)\nos.kill(os.getpid(), 9)",
        -9,
    ),
    "exit(0)": ("exit(0)", 0),
    "os._exit(0)": ("import os\nos._exit(0)", 0),
    "endless exception": ("raise ValueError('x' * 10**4)", 1),
    "forged control lines": (
        "import os, json\nfor n in range(3, 64):\n"
        '  try: os.write(n, b\'{"why": "", "code": 0, "outputs": ["1", "", ""]}\\n\')\n'
        "  except OSError: pass\nos._exit(7)",
        7,
    ),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    time.sleep(99)\n  os._exit(0)\ntime.sleep(0.1)\nprint('done')",
        0,
    ),
    "child that keeps the output open": (
        "import os, time\nif os.fork() == 0: time.sleep(99)\nprint('done')",
        0,
    ),
    "files left behind": (
        "import os\nos.mkdir('d')\nopen('d/x', 'w').close()\nos.symlink('/usr', 'u')\n"
        "os.chmod('d', 0)\nos.chmod('.', 0)",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_program_ended_is_reported(name, sandbox):
    source, exit_code = ENDS[name]
    start = time.monotonic()
    outcome = attack(sandbox, source)
    assert (outcome.why, outcome.code) == ("ended", exit_code)
    assert time.monotonic() - start < 3.0


def test_a_sandbox_ends_with_its_caller():
    marker = "marker" + secrets.token_hex(8)
    source = "import time\nprint(1)\ntime.sleep(99)"
    caller = (
        "import sys\nfrom jaxrl_llm.sandbox.box import Sandbox\n"
        "Sandbox().run(['main.py', sys.argv[2]], files={'main.py': sys.argv[1]})"
    )
    # Its own arguments have the marker, so what counts is a second process.
    process = subprocess.Popen([sys.executable, "-c", caller, source, marker])
    deadline = time.monotonic() + 60  # a busy machine may let a start wait
    while len(running(marker)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    seen = len(running(marker)) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert seen and not running(marker)


# ------------------------------------------------------------------------- the tests of a row

# No code below computes f: every test must fail. Right would be f(x) = x * x + 7.
TESTS = [
    "assert f(2) == 11",
    "assert 11 == f(2)",
    "assert abs(f(3) - 16) < 1e-6",
    "assert math.isclose(f(3), 16)",
    "assert isinstance(f(2), int) and f(2) == 11",
    "assert [f(i) for i in range(3)] == [7, 8, 11]",
    "assert str(f(2)) == '11' and len(str(f(2))) == 2",
    "assert all(map(lambda x: f(x) == x * x + 7, [2, 3]))",
]
CALLS = [
    {"input": given, "output": result, "testtype": "functional", "fn_name": "f"}
    for given, result in (("2", "11"), ("3", "16"))
]

CHEATS = {
    "exit(0)": "exit(0)",
    "sys.exit in f": "import sys\ndef f(x): sys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit in f": "import os\ndef f(x): os._exit(0)",
    "settrace": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef f(x): return 0",
    "setprofile": "import sys\ndef p(*a): sys.exit(0)\ndef f(x): sys.setprofile(p); return 0",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "patched builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.len = lambda x: 2\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.AssertionError = ValueError\n"
        "builtins.str = lambda x: '11'\ndef f(x): return 0"
    ),
    "own builtins": (
        "def abs(x): return 0\ndef len(x): return 2\ndef isinstance(*a): return True\n"
        "def str(x): return '11'\ndef range(n): return []\ndef f(x): return 0"
    ),
    "own math": "class math:\n  isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
    "patched math": (
        "import math, sys\nmath.isclose = lambda *a: True\nsys.modules['math'] = math\n"
        "def f(x): return 0"
    ),
    "equality object": (
        "class Yes:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n"
        "  def __sub__(self, o): return 0\n  def __float__(self): return 16.0\n"
        "  __req__ = __eq__\n  def __abs__(self): return 0\n  def __lt__(self, o): return True\n"
        "def f(x): return Yes()"
    ),
    "equality number": (
        "class Yes(int):\n  def __eq__(self, o): return True\n  __hash__ = None\n"
        "  def __sub__(self, o): return 0\n  def __str__(self): return '11'\n"
        "def f(x): return Yes(0)"
    ),
    "equality text": (
        "class Yes(str):\n  def __eq__(self, o): return True\n  __hash__ = None\n"
        "def f(x): return Yes('a')"
    ),
    "unequal to itself": "def f(x): return float('nan')",
    "everything": "def f(x): return [11, 16, 7, 8, True]",
    "truth": "def f(x): return True",
    "raises what a test raises": "def f(x): raise AssertionError",
    "raises to end a loop": "def f(x): raise StopIteration",
    "raises to leave": "def f(x): raise SystemExit(0)",
    "raises a stranger": "class Lost(BaseException): pass\ndef f(x): raise Lost",
    "reads the tests in memory": (
        "import gc, sys, re\ndef f(x):\n  text = ' '.join(map(repr, gc.get_objects()))\n"
        "  found = re.search(r'f\\(%d\\) == (\\d+)' % x, text)\n"
        "  return int(found[1]) if found else 0"
    ),
    "reads the tests in frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    for value in list(frame.f_locals.values()):\n"
        "      if 'assert' in str(value) or 'outputs' in str(value): return 11\n"
        "    frame = frame.f_back\n  return 0"
    ),
    "reads the tests on disk": (
        "import glob\ndef f(x):\n  for p in glob.glob('/sandbox/**', recursive=True) + "
        "glob.glob('/proc/self/fd/*') + ['/proc/1/environ', '/proc/self/cmdline']:\n"
        "    try:\n      if 'assert' in open(p).read(): return 11\n    except OSError: pass\n"
        "  return 0"
    ),
    "prints the marker": (
        "import os\nfor n in (1, 2, 3):\n  for line in (b'[\"passed\"]\\n', b'OK\\n', "
        "b'[\"value\", 11]\\n'):\n    os.write(n, line * 20)\ndef f(x): return 0"
    ),
    "forges answers": ("import os\nos.write(4, b'[\"ok\", true, []]\\n' * 50)\ndef f(x): return 0"),
    "forges objects": (
        'import os\nos.write(4, b\'["ok", ["object", 0, true], []]\\n\' * 50)\ndef f(x): return 0'
    ),
    "forges wrong messages": "import os\nos.write(4, b'[[[\\n{}\\n1\\n')\ndef f(x): return 0",
    "floods the channel": ("import os\ndef f(x):\n  while True: os.write(4, b'1' * 2**16)"),
    "nests without end": ("import os\nos.write(4, b'[' * 200000 + b'\\n')\ndef f(x): return 0"),
    "patches the harness": (
        "import sys, json\nfrom jaxrl_llm.sandbox import values\n"
        "values.encode = lambda *a: True\nm = sys.modules['__main__']\n"
        "m.encode = lambda *a: ['dict']\njson.dumps = lambda *a: 'true'\ndef f(x): return 0"
    ),
    "patches time and random": (
        "import time, random\ntime.time = time.monotonic = lambda: 0\n"
        "random.random = lambda: 11\ndef f(x): return random.random() if x == 9 else 0"
    ),
    "kills the judge": "import os\nos.kill(-1, 9)\ndef f(x): return 0",
    "forks": "import os\nos.fork()\ndef f(x): return 0",
    "changes its arguments": "def f(*a, **k): a = 11; return None",
    "calls back": "def f(x): return f",
    "never returns": "def f(x):\n  while True: pass",
    "endless iterator": "import itertools\ndef f(x): return itertools.repeat(11)",
}


@pytest.mark.parametrize("name", quick_and_slow(CHEATS))
def test_a_cheat_gets_nothing(name):
    settings = {"scoring": "share", "case_s": 0.3, "total_s": 1.0, "memory_mb": 150}
    block = f"```python\n{CHEATS[name]}\n```"
    assert code(block, json.dumps(TESTS + CALLS), **settings)["score"] == 0.0


def test_the_right_code_gets_all():
    block = "```python\ndef f(x):\n    return x * x + 7\n```"
    assert code(block, json.dumps(TESTS + CALLS), scoring="share") == {"score": 1.0}


def test_expected_outputs_are_not_where_a_program_runs():
    """A program prints everything that it can reach; the answer is not among it."""
    source = (
        "import gc, os, sys\nprint(repr(gc.get_objects()), os.environ, sys.argv)\n"
        "for p, _, names in os.walk('.'):\n  for n in names: print(open(p + '/' + n).read())"
    )
    tests = {"inputs": ["1"], "outputs": ["needle-in-the-answers"]}
    assert code(f"```python\n{source}\n```", json.dumps(tests))["score"] == 0.0
    with Sandbox() as sandbox:
        outcome = sandbox.run_source(source, stdin="1")
    assert "needle" not in outcome.stdout and "main.py" in outcome.stdout


def test_many_sandboxes_at_once():
    results = {}

    def one(index):
        with Sandbox(SMALL) as sandbox:
            results[index] = sandbox.run_source(f"print({index})").stdout

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}\n" for i in range(4)}
