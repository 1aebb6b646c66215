"""Ports for servers that bind by themselves, some time after a test has chosen the port."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moaspec_core.errors import InputError
from moaspec_core.support.ports import bind

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections and to servers that ask for any port."""

_chance = random.SystemRandom()


def free_port(hosts: Sequence[str] = ("127.0.0.1",)) -> int:
    """A port that nobody listens on at these addresses, and that the system gives to nobody."""
    while True:
        port = _chance.choice(PORTS)
        try:
            for host in hosts:
                bind(host, port).close()
        except InputError:
            continue
        return port
