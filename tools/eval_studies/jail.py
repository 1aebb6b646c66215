"""The program inside the sandbox; `sandbox.py` runs its text, so it imports no moaspec modules.

Arguments: the role (`candidate` or `judge`), `namespaces` or `bwrap`, seconds of processor time,
bytes of address space, and the paths that stay visible. Standard input is the role's job as JSON,
standard output a socket to the other role.

The candidate runs the answer. The judge runs the tests, in another process and another sandbox:
each call of the function under test is sent to the candidate, whose result returns as plain data.
So the candidate holds neither the tests nor the verdict, which is the judge's exit code.
"""

import ctypes
import json
import numbers
import os
import platform
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

MAX_MESSAGE = 1 << 20  # bytes of one call or result
NOBODY = 65534
TMP = "/tmp"  # noqa: S108 - made anew in the sandbox
FILE_BYTES, TMP_BYTES, TMP_FILES, OPEN_FILES = 1 << 20, 1 << 24, 1024, 64

CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MS_RDONLY, MS_REMOUNT, MNT_DETACH = 1, 32, 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CAPABILITY_VERSION_3 = 0x20080522

NEW_CALLS = (*range(424, 443), 448, 451)
"""Same numbers everywhere: pidfds, io_uring, `clone3`, the mount API, and later ones."""
FORBIDDEN = {
    # clone execve execveat ptrace process_vm_readv process_vm_writev unshare setns mount umount2
    # pivot_root chroot socket shmget msgget semget mq_open add_key request_key keyctl bpf
    # perf_event_open userfaultfd open_by_handle_at
    "aarch64": (
        0xC00000B7,
        "220 221 281 117 270 271 97 268 40 39 41 51 198 194 186 190 180 217 218 219 280 241 282 "
        "265",
    ),
    # These calls, and fork and vfork.
    "x86_64": (
        0xC000003E,
        "56 59 322 101 310 311 272 308 165 166 155 161 41 29 68 64 240 248 249 250 321 298 323 304 "
        "57 58",
    ),
}
"""By machine: its number in filters, and system calls that no program here needs."""


def main(role: str, isolation: str, seconds: str, memory: str, *visible: str) -> None:
    """Confine this process, and play the role."""
    os.umask(0o022)
    with open(0, "rb", closefd=False) as file:
        job = json.load(file)
    if isolation == "namespaces":
        enter_namespaces(visible)
    channel = socket.socket(fileno=os.dup(1))
    for standard in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    limit(int(seconds), int(memory))
    drop_rights()
    stream = cast(BinaryIO, channel.makefile("rwb"))
    if role == "judge":
        judge(job, stream)
    candidate(job, stream)


def enter_namespaces(visible: tuple[str, ...]) -> None:
    """Go on as a process that sees a few read-only directories, a private /tmp and no network.

    Two processes stay behind and wait: one outside, and the first one of the process namespace,
    which the kernel ends together with all processes in the namespace.
    """
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.getuid(), os.getgid()
    die_with_parent()
    if user != 0 or LIBC.unshare(spaces) != 0:
        check(LIBC.unshare(spaces | CLONE_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1", encoding="ascii")
    stay_behind_if_parent()
    die_with_parent()
    change_root(visible)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    stay_behind_if_parent()


def stay_behind_if_parent() -> None:
    """Fork; the parent waits for its child and ends with the child's code."""
    child = os.fork()
    if child == 0:
        return
    os.closerange(0, 3)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os._exit(min(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), 255))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def change_root(visible: tuple[str, ...]) -> None:
    """Make a root of the visible paths, read-only, and of an empty /tmp."""
    sources = {path: os.path.realpath(path) for path in (*visible, os.devnull)}
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", TMP, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    Path(TMP, "old").mkdir()
    check(LIBC.pivot_root(TMP.encode(), f"{TMP}/old".encode()))
    os.chdir("/")
    Path(TMP).mkdir()
    options = f"size={TMP_BYTES},nr_inodes={TMP_FILES},mode=1777"
    mount("tmpfs", TMP, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, source in sources.items():
        bind(Path("/old" + source), Path(path))
        if path != os.devnull:
            make_read_only(path)
    check(LIBC.umount2(b"/old", MNT_DETACH))
    Path("/old").rmdir()
    mount(None, "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(TMP)


def bind(source: Path, path: Path) -> None:
    """Show a file or directory of the old root at a place in the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    mount(str(source), str(path), None, MS_BIND | MS_REC)


def make_read_only(path: str) -> None:
    """Of a mount and those below it; devices and set-user-id programs count for nothing there."""
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    place = ctypes.c_char_p(path.encode())
    size = ctypes.c_size_t(len(attributes))
    check(
        LIBC.syscall(
            ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, place, AT_RECURSIVE, attributes, size
        )
    )


def mount(source: str | None, path: str, kind: str | None, flags: int, data: str = "") -> None:
    """The system call of that name."""
    encoded = [None if text is None else text.encode() for text in (source, path, kind)]
    check(LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()))


def check(result: int) -> None:
    """Raise what a call of the C library reports."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def limit(seconds: int, memory: int) -> None:
    """Set limits of processor time, memory and files; forbid children and threads."""
    for name, most in (
        ("CPU", seconds),
        ("AS", memory),
        ("FSIZE", FILE_BYTES),
        ("NOFILE", OPEN_FILES),
        ("NPROC", 0),
        ("CORE", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
        except (OSError, ValueError):  # macOS has no limit of address space
            if sys.platform == "linux":
                raise


def drop_rights() -> None:
    """Give up root, all capabilities, and system calls that only attacks need."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    check(LIBC.capset(struct.pack("=II", CAPABILITY_VERSION_3, 0), bytes(24)))
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if platform.machine() in FORBIDDEN:
        machine, calls = FORBIDDEN[platform.machine()]
        filter_calls(machine, (*map(int, calls.split()), *NEW_CALLS))


def filter_calls(machine: int, forbidden: tuple[int, ...]) -> None:
    """Let forbidden system calls fail with EPERM (seccomp)."""
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # From 2^30 on calls are those of another convention on the same machine.
    steps.append((at_least, len(forbidden) + 1, 0, 1 << 30))
    for left, number in zip(range(len(forbidden), 0, -1), forbidden, strict=True):
        steps.append((equal, left, 0, number))
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def candidate(job: dict[str, Any], stream: BinaryIO) -> NoReturn:
    """Run the answer, and its function for each call that arrives."""
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(job["code"], "answer", "exec"), names)  # noqa: S102 - this is the purpose
    function = names[job["function"]]
    while line := stream.readline(MAX_MESSAGE):
        try:
            arguments, options = plain(json.loads(line))
            reply = json.dumps({"result": marked(function(*arguments, **options))})
        except BaseException:  # noqa: BLE001 - the judge's tests decide what it means
            reply = json.dumps({"failed": True})
        stream.write(reply.encode() + b"\n")
        stream.flush()
    os._exit(0)


def judge(job: dict[str, Any], stream: BinaryIO) -> NoReturn:
    """Run the tests, whose calls go to the candidate; exit with 0 where they pass."""

    def ask(*arguments: Any, **options: Any) -> Any:
        stream.write(json.dumps(marked((arguments, options))).encode() + b"\n")
        stream.flush()
        reply = json.loads(stream.readline(MAX_MESSAGE))
        if "result" not in reply:
            raise RuntimeError("The function raised.")
        return plain(reply["result"])

    names: dict[str, Any] = {"__name__": "tests"}
    exec(job["setup"], names)  # noqa: S102 - ours, as the tests are
    names[job["function"]] = ask
    try:
        exec(job["tests"], names)  # noqa: S102
        names["check"](ask)
    except BaseException:  # noqa: BLE001 - whatever it is, they did not pass
        os._exit(1)
    os._exit(0)


def marked(value: Any) -> Any:
    """A value as JSON that keeps its type; TypeError for what is no plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[marked(key), marked(one)] for key, one in value.items()]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [marked(one) for one in value]}
    raise TypeError(f"{type(value)} is no plain data.")


def plain(value: Any) -> Any:
    """The value that `marked` was given."""
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    if name == "complex":
        return complex(*parts)
    if name == "dict":
        return {plain(key): plain(one) for key, one in parts}
    return CONTAINERS[name](plain(part) for part in parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
