"""A link between two network namespaces on this machine, under real TCP.

Needs root, `ip` (iproute2) and /dev/net/tun; no `netem`, which many kernels lack.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from edge_bench import python_command
from edge_bench.relay import ADDRESSES
from moaspec_core.errors import InputError
from moaspec_edge.emulation import LinkProfile

Side = Literal["client", "server"]
PREFIX = "moaspec-"


def missing() -> str | None:
    """Why this machine cannot emulate links; None where it can."""
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here ({tried.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


class EmulatedLink:
    """Two namespaces, a TUN device in each, and the relay between them, as a context manager.

    On leaving, the relay is ended and the two namespaces are removed, these and no others.

    Args:
        link: what it does to packets.
        seed: of losses and delays.

    Attributes:
        address: of the server's end, as the client reaches it.

    Raises:
        InputError: on entering, where this machine cannot do it; says why.
    """

    address = ADDRESSES[1]

    def __init__(self, link: LinkProfile, seed: int = 0) -> None:
        self.link, self._seed = link, seed
        token = uuid.uuid4().hex[:8]
        self._names = {"client": f"{PREFIX}{token}c", "server": f"{PREFIX}{token}s"}
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> EmulatedLink:
        if (reason := missing()) is not None:
            raise InputError(f"Links cannot be emulated here: {reason}.")
        try:
            for name in self._names.values():
                subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def _start(self) -> None:
        arguments = [*self._names.values(), json.dumps(asdict(self.link)), str(self._seed)]
        self._relay = subprocess.Popen(
            python_command("edge_bench.relay", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        if json.loads(self._relay.stdout.readline() or "null") != "ready":
            raise InputError("Links cannot be emulated here: the relay did not start.")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            for stream in (self._relay.stdin, self._relay.stdout):
                if stream is not None:
                    stream.close()
            self._relay = None
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def command(self, side: Side, arguments: list[str]) -> list[str]:
        """The command line that runs another one at this end of the link."""
        return ["ip", "netns", "exec", self._names[side], *arguments]

    def cut(self) -> None:
        """Drop all packets from now on, silently."""
        self._tell("cut")

    def mend(self) -> None:
        """Let packets pass again."""
        self._tell("mend")

    def shape(self, link: LinkProfile) -> None:
        """Emulate another link from now on."""
        self.link = link
        self._tell(f"link {json.dumps(asdict(link))}")

    def stats(self) -> dict[str, list[int]]:
        """Bytes, packets and lost packets so far, each up and down, headers included."""
        self._tell("stats")
        assert self._relay is not None
        assert self._relay.stdout is not None
        found: Any = json.loads(self._relay.stdout.readline())
        return dict(found)

    def _tell(self, line: str) -> None:
        assert self._relay is not None, "only between entering and leaving"
        assert self._relay.stdin is not None
        self._relay.stdin.write(line + "\n")
        self._relay.stdin.flush()
