"""A target server for tests of packages/device-js, whose drafter changes when it is told to.

`python serve_versions.py DIR`, where DIR is of `make_models.py`: prints its port, then adopts the
drafter that a line of its input names, and repeats the line.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService


async def serve(directory: Path) -> None:
    target = load_target(directory / "target", dtype="float32")
    service = TargetService(target, load_drafter(directory / "drafter", target=target))
    async with TargetServer(service, ServerOptions(port=0)) as server:
        sys.stdout.write(f"{urlsplit(server.url).port}\n")
        sys.stdout.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            drafter = load_drafter(directory / line.strip(), target=target)
            service.adopt(drafter, fingerprint(drafter))
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
