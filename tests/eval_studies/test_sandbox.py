"""Code that means harm: it neither passes for right nor reaches anything outside."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from eval_studies import sandbox
from eval_studies.sandbox import Trial, isolation, passes
from moaspec_core.errors import InputError

RIGHT = "def f(x):\n    return x + 1\n"
UNKNOWN = """
import random
def check(f):
    x = random.getrandbits(60)  # unknown: MARKER
    assert f(x) == x + 1
"""
"""Tests whose right answers nobody can know without computing them."""

NO_SANDBOX = "neither bubblewrap nor namespaces work here"


@pytest.fixture(params=["bwrap", "namespaces"])
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    if not sandbox.works(kind, Trial(RIGHT, "f", UNKNOWN)):
        pytest.skip(f"{kind} does not work here")
    monkeypatch.setattr(sandbox, "_isolation", lambda: kind)
    monkeypatch.setattr(sandbox, "START_S", 60)  # a busy machine starts processes slowly
    return kind


@pytest.fixture
def impatient(confined: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, for code that nobody should wait for."""
    monkeypatch.setattr(sandbox, "START_S", 2)
    return confined


def returns(body: str) -> Trial:
    """A trial that passes where the body, which may be hostile, returns "held"."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return Trial(f"def f():\n{lines}", "f", "def check(f):\n    assert f() == 'held'\n")


def raises(action: str) -> Trial:
    """A trial that passes where an action raises OSError."""
    return returns(
        f"import ctypes, os, shutil, socket, subprocess\ntry:\n    {action}\n"
        "except OSError:\n    return 'held'"
    )


FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "old exit code": "import os\nos._exit(87)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit in a call": "import sys\ndef f(x):\n    sys.exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    raise SystemExit(0)",
    "no function": "g = 1",
    "syntax": "def f(x) return x",
    "None": "def f(x):\n    return None",
    "equal to all": "class E(int):\n    def __eq__(s, o): return True\ndef f(x):\n    return E(0)",
    "unplain": "class E:\n    def __eq__(s, o): return True\ndef f(x):\n    return E()",
    "equal in a list": "class E(list):\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "builtins": "import builtins\nbuiltins.AssertionError = builtins.exec = builtins.print\n"
    "builtins.__build_class__ = None\ndef f(x):\n    return 0",
    "trace": "import sys\nsys.settrace(lambda *a: None)\ndef f(x):\n    return 0",
    "marker": "print('passed', 87, 0, flush=True)\ndef f(x):\n    print({'result': 1})",
    "all files": "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"result\": 1}\\n')\n"
    "    except OSError: pass\ndef f(x):\n    return 0",
    "deep reply": "import os\nfor fd in range(64):\n    try: os.write(fd, b'[' * 99999 + b'\\n')\n"
    "    except OSError: pass\ndef f(x):\n    return 0",
    "cyclic": "def f(x):\n    x = []\n    x.append(x)\n    return x",
    "huge reply": "def f(x):\n    return 'x' * 2**24",
    "kill": "import os, signal\ndef f(x):\n    for pid in (1, os.getppid(), -1):\n"
    "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass\n    return 0",
    "seen frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n"
    "    while frame:\n        frame.f_globals['ask'] = frame.f_globals['judge'] = print\n"
    "        frame = frame.f_back\n    return 0",
    "memory": "x = bytearray(1 << 31)\n" + RIGHT,
    "memory by pages": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "recursion": "def f(x):\n    return f(x)",
    "native recursion": "import ctypes\nctypes.string_at(0)\n" + RIGHT,
}


@pytest.mark.slow
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_do_not_pass(impatient: str, code: str) -> None:
    assert not passes(Trial(code, "f", UNKNOWN), timeout_s=2), impatient


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(999)",
    "output": "while True: print('x' * 9999)",
    "channel": "import os\nwhile True:\n    for fd in range(64):\n"
    "        try: os.write(fd, b'{}\\n' * 9999)\n        except OSError: pass",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "files": "n = 0\nwhile True:\n    n += 1\n    try: open(str(n), 'w').write('x' * 9999)\n"
    "    except OSError: pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_killed(impatient: str, code: str) -> None:
    name = f"moa{os.getpid()}"
    named = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
    ignoring = "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    leaving = "try: os.setsid()\nexcept OSError: pass\n"
    code = named + ignoring + leaving + f"def f(x):\n    {code.replace(chr(10), chr(10) + '    ')}"
    assert not passes(Trial(code, "f", UNKNOWN), timeout_s=1), impatient
    deadline = time.monotonic() + 60  # the kernel ends them at once; this is for a busy machine
    while name in (running := _names()):
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def _names() -> set[str]:
    """Names of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found.add(path.read_text().strip())
    return found


REFUSED = {
    "fork": "os.fork()",
    "daemon": "os.setsid() if os.fork() == 0 else None\n    os.fork()",
    "process": "subprocess.Popen(['/bin/sh', '-c', 'true'])",
    "exec": "os.execv('/proc/self/exe', ['python'])",
    "shadow": "open('/etc/shadow')",
    "accounts": "open('/etc/passwd')",
    "home": f"open({str(next(filter(Path.is_file, Path.home().glob('*')), __file__))!r})",
    "sources": f"open({__file__!r})",
    "process table": "os.listdir('/proc')",
    "system": "os.listdir('/sys')",
    "devices": "open('/dev/kmsg')",
    "library": "open(os.__file__, 'a')",
    "root": "open('/x', 'w')",
    "above": "open('../x', 'w')",
    "large file": "open('x', 'wb').write(bytes(1 << 21))",
    "large directory": "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(32)]",
    "socket": "socket.socket()",
    "uid": "os.setuid(0)",
    "chroot": "os.chroot('/tmp')",
    "mode": "os.chmod('/', 0o777)",
}


@pytest.mark.slow
@pytest.mark.parametrize("action", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(confined: str, action: str) -> None:
    assert passes(raises(action)), confined


@pytest.mark.slow
def test_threads_are_refused(confined: str) -> None:
    body = "import threading\ntry: threading.Thread(target=print).start()\n"
    assert passes(returns(body + "except RuntimeError: return 'held'")), confined


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",
        "ptrace(16, 1, 0, 0)",
        "mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "umount2(b'/tmp', 2)",
        "shmget(0, 4096, 0o1600)",
        "syscall(435, 0, 0)",
    ],
)
def test_system_calls_that_are_refused(confined: str, call: str) -> None:
    body = f"import ctypes\nlibc = ctypes.CDLL(None)\nif libc.{call} == -1: return 'held'"
    assert passes(returns(body)), confined


@pytest.mark.slow
def test_nothing_of_the_tests_is_seen(confined: str) -> None:
    """The candidate's memory, files and process hold no text of the tests."""
    code = """
import gc, os, sys
def f(x):
    found = [repr(one) for one in gc.get_objects() if type(one) in (dict, list, tuple)]
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    found += [repr(sys.argv), repr(dict(os.environ)), repr(sys.orig_argv)]
    for fd in range(64):
        try: found.append(repr(os.pread(fd, 9999, 0)))
        except OSError: pass
    return x + 1 if not any("REKRAM"[::-1] in text for text in found) else None
"""
    assert passes(Trial(code, "f", UNKNOWN)), confined


@pytest.mark.slow
def test_nobody_listens(confined: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        assert passes(raises(f"socket.create_connection(('127.0.0.1', {port}), 1)")), confined
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.slow
def test_symbolic_links_lead_nowhere(confined: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    note.write_text("as it was")
    for mode in ("r", "w"):
        link = f"os.symlink({str(note)!r}, 'link')\n    open('link', {mode!r})"
        assert passes(raises(link)), confined
    assert note.read_text() == "as it was"


@pytest.mark.slow
def test_rights(confined: str) -> None:
    body = "import os\nids = os.getresuid() + os.getresgid() + tuple(os.getgroups())\n"
    # Groups that a user namespace does not map read as nobody's.
    assert passes(returns(body + "if set(ids) == {65534}: return 'held'")), confined


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    ["None", "-7", "[True, 1e300]", "float('inf')", "'\\ud800ä'", "[1, (2, 'x')]", "{1: {2}}"],
)
def test_plain_data_arrives(confined: str, value: str) -> None:
    tests = (
        f"def check(f):\n    y = f({value})\n    assert y == {value} and type(y) is type({value})"
    )
    assert passes(Trial("def f(x):\n    return x", "f", tests)), confined


@pytest.mark.slow
def test_helpers_and_files(confined: str) -> None:
    """Tests may use the problem's helpers; the function may print, and use its directory."""
    code = (
        "def f(x):\n    print(x)\n    open('a', 'w').write('x')\n    return len(open('a').read())"
    )
    tests = "def check(f):\n    assert f(2) == half(2)"
    assert passes(Trial(code, "f", tests, "def half(x):\n    return x / 2")), confined


@pytest.mark.slow
def test_why_a_sandbox_is_chosen() -> None:
    try:
        assert isolation() in {"bwrap", "namespaces"}
    except InputError:
        pytest.skip(NO_SANDBOX)


@pytest.mark.slow
def test_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_isolation", lambda: None)
    trial = Trial(RIGHT, "f", UNKNOWN)
    with pytest.raises(InputError, match="Install bubblewrap") as caught:
        passes(trial)
    assert "\n" not in str(caught.value)


def test_other_systems_have_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._isolation.cache_clear()
    monkeypatch.setattr("eval_studies.sandbox.sys.platform", "darwin")
    with pytest.raises(InputError, match="no sandbox"):
        isolation()
    sandbox._isolation.cache_clear()
