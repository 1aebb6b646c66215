"""The process between two network namespaces: takes packets from one TUN device to the other, late.

`main(CLIENT_NAMESPACE, SERVER_NAMESPACE, LINK_JSON, SEED)` prints "ready", then obeys lines on
standard input: `cut`, `mend`, `stats` (answered by a line of JSON) and `link JSON`. It ends with
its standard input. Only the standard library is used, and of this package the arithmetic, so that
it starts at once and holds little memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moaspec_edge.emulation import LinkProfile, Pacer

TUN = "moaspec0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the client's and the server's end."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MTU, _QUEUE = 1500, 2000


def open_tun(namespace: str, address: str, peer: str) -> int:
    """A TUN device inside a namespace; the descriptor keeps working from outside."""
    enter(f"/var/run/netns/{namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", TUN.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        f"addr add {address} peer {peer} dev {TUN}",
        f"link set {TUN} mtu {_MTU} txqueuelen {_QUEUE} up",
        "link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def enter(path: str) -> None:
    """Move this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


class Relay:
    """Two devices and what travels between them.

    Args:
        devices: descriptors of the client's and the server's TUN device.
        link: what to do to packets.
        seed: of losses and delays.
    """

    def __init__(self, devices: Sequence[int], link: LinkProfile, seed: int = 0) -> None:
        self._devices = tuple(devices)
        self._seed = seed
        self.cut = False
        self.bytes = [0, 0]
        self.packets = [0, 0]
        self.lost = [0, 0]
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self.shape(link)

    def shape(self, link: LinkProfile) -> None:
        """Be another link from now on."""
        self._pacers = [Pacer(link, self._seed), Pacer(link, self._seed + 1)]

    def run(self) -> None:
        """Carry packets until standard input ends."""
        while True:
            pause = self._waiting[0][0] - time.monotonic() if self._waiting else None
            ready, _, _ = select.select(
                [*self._devices, sys.stdin], [], [], None if pause is None else max(0.0, pause)
            )
            for side, device in enumerate(self._devices):
                if device in ready:
                    self._take(side, device)
            self._deliver()
            if sys.stdin in ready and not self._obey(sys.stdin.readline()):
                return

    def _take(self, side: int, device: int) -> None:
        """Schedule all packets that a device holds; side 0 sends upward."""
        while True:
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            now = time.monotonic()
            arrives = self._pacers[side].arrival(now, len(packet))
            self.bytes[side] += len(packet)
            self.packets[side] += 1
            if arrives is None or self.cut:
                self.lost[side] += 1
                continue
            self._number += 1
            heapq.heappush(self._waiting, (arrives, self._number, side, packet))

    def _deliver(self) -> None:
        """Hand over what is due; what was on its way when the link was cut is gone."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, side, packet = heapq.heappop(self._waiting)
            if self.cut:
                self.lost[side] += 1
                continue
            try:
                os.write(self._devices[1 - side], packet)
            except OSError:
                # A device's queue is full, or it is being taken down: a network loses packets.
                self.lost[side] += 1

    def _obey(self, line: str) -> bool:
        word, _, rest = line.strip().partition(" ")
        if word in ("cut", "mend"):
            self.cut = word == "cut"
        elif word == "link":
            self.shape(LinkProfile(**json.loads(rest)))
        elif word == "stats":
            _say({"bytes": self.bytes, "packets": self.packets, "lost": self.lost})
        return bool(line)


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> None:
    """Open both devices, say so, and carry packets."""
    client, server, link, seed = arguments
    pairs = ((client, *ADDRESSES), (server, *reversed(ADDRESSES)))
    devices = [open_tun(*pair) for pair in pairs]
    _say("ready")
    Relay(devices, LinkProfile(**json.loads(link)), int(seed)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
