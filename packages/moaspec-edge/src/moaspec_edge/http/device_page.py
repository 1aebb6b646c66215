"""The chat page as a device: its files, its scripts, and a bundle for drafting in the browser.

The page is that of `moaspec serve`, with another `server.js`, which decodes in the browser together
with this server. `packages/device-js` has the scripts' sources.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moaspec_core import __version__
from moaspec_core.errors import InputError
from moaspec_core.support.extras import checkout
from moaspec_edge.device_onnx.manifest import MANIFEST_FILE, Manifest, read_manifest
from moaspec_serve.app import HEADERS, PAGE_POLICY, page_directory, with_headers

if TYPE_CHECKING:
    import asyncio

SCRIPTS = "dist/page"
"""Below the package's directory: the scripts that `npm run build:page` makes."""

MADE = ("server.js", "worker.js", "sw.js", "ort-wasm-simd-threaded.mjs")
WASM = "ort-wasm-simd-threaded.wasm"
"""The runtime's, which is stored compressed."""

WASM_MAGIC = b"\0asm"

SERVICE_WORKER = "/sw.js"
BUNDLE = "/bundle/"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}
POLICY = (
    PAGE_POLICY.replace("script-src 'self'", "script-src 'self' 'wasm-unsafe-eval'")
    .replace("trusted-types dompurify", "trusted-types dompurify moaspec")
    .replace("connect-src 'self'", "connect-src 'self'; worker-src 'self'; manifest-src 'self'")
)
WORKER_POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'"
"""For scripts of workers, without trusted types: the runtime starts threads from plain URLs."""

PAGE_HEADERS = {
    **HEADERS,
    # Each connection serves the path of its first request: the page, or calls.
    "connection": "close",
    "content-security-policy": POLICY,
    "cross-origin-embedder-policy": "require-corp",  # browsers have threads in isolated pages only
    "cache-control": "no-cache",
}

MAX_STALL_S = 600.0
"""Time after which a client that reads nothing loses its connection. Slow links need minutes: the
system's buffer of some megabytes counts as one piece."""


def find_scripts(given: Path | None = None) -> Path:
    """The directory with the page's built scripts.

    Without an argument, that of the checkout that this package lies in.

    Raises:
        InputError: there are none; the message has the command that builds them.
    """
    place = _built_scripts() if given is None else given
    names = (*MADE, f"{WASM}.gz")
    if all((place / name).is_file() for name in names) and not _is_damaged(place):
        return place
    raise InputError(
        f"The page's scripts are not in {place}, or damaged. Build them in a checkout of moaspec "
        "with `make device-page` (it needs Node 20), or name their directory with --page-scripts."
    )


def _built_scripts() -> Path:
    """Where a checkout has them; InputError for an installed package."""
    root = checkout()
    if root is None:
        raise InputError(
            "An installed package has no scripts for the page. Build them in a checkout of moaspec "
            "with `make device-page` (it needs Node 20), and name their directory with "
            "--page-scripts."
        )
    return root / "packages/device-js" / SCRIPTS


def _is_damaged(place: Path) -> bool:
    """Whether a script is empty, or the runtime is cut short."""
    try:
        with gzip.open(place / f"{WASM}.gz") as packed:
            magic = packed.read(4)
            while packed.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error):
        return True
    return magic != WASM_MAGIC or any((place / name).stat().st_size == 0 for name in MADE)


class DevicePage:
    """An ASGI application that serves a fixed set of files.

    Args:
        bundle: directory of an ONNX bundle, see `moaspec checkpoint export-device`.
        scripts: see `find_scripts`.
        model: the model's name, which the page shows.
        learns: whether the server's drafter learns; only then the page asks for versions.

    Attributes:
        manifest: of the bundle.

    Raises:
        CheckpointError: no ONNX bundle.
    """

    def __init__(self, bundle: Path, scripts: Path, *, model: str, learns: bool = False) -> None:
        self.manifest: Manifest = read_manifest(bundle)
        page = page_directory()
        files = {
            f"/{path.relative_to(page).as_posix()}": path
            for path in sorted(page.rglob("*"))
            if path.suffix in TYPES
        }
        files |= {f"/{name}": scripts / name for name in MADE}
        files[f"/{WASM}"] = scripts / f"{WASM}.gz"
        self._files = {path: _File(place) for path, place in files.items()}
        worker = self._files.pop(SERVICE_WORKER)
        texts = {
            "/device.json": json.dumps({"model": model, "version": __version__, "learns": learns}),
            "/app.webmanifest": json.dumps(_web_manifest(model)),
        }
        self._texts = {path: text.encode() for path, text in texts.items()}
        self._texts[SERVICE_WORKER] = self._service_worker(worker.path.read_bytes())
        bundled = (MANIFEST_FILE, *self.manifest.files)
        self._bundle = {f"{BUNDLE}{name}": bundle / name for name in bundled}

    def _service_worker(self, script: bytes) -> bytes:
        """The script with the paths that it must keep, and their common version."""
        tags = {path: file.tag for path, file in self._files.items()}
        tags |= {path: _tag(text) for path, text in self._texts.items()}
        version = _tag(repr(tags).encode() + script)
        del tags["/index.html"]
        info = {"version": version, "paths": ["/", *tags]}
        return b"self.MOASPEC = " + json.dumps(info).encode() + b";\n" + script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Files can only be read.\n", 405, {"Allow": "GET, HEAD"})
        path = "/index.html" if scope["path"] == "/" else scope["path"]
        if path in self._bundle:
            place = self._bundle[path]
            # The page has a cache of its own.
            return FileResponse(
                place, headers={"cache-control": "no-store"}, media_type=_type(path)
            )
        if path in self._texts:
            return Response(self._texts[path], media_type=_type(path))
        if path in self._files:
            return self._files[path].response(path, dict(scope["headers"]))
        return PlainTextResponse("There is no such file.\n", 404)


def _web_manifest(model: str) -> dict[str, Any]:
    """The web manifest, with which browsers install the page as an application."""
    return {
        "name": f"moaspec: {model}",
        "short_name": "moaspec",
        "start_url": "/",
        "display": "standalone",
        "background_color": "#ffffff",
        "theme_color": "#2f4bb8",
        "icons": [{"src": "/icon.svg", "sizes": "any", "type": "image/svg+xml"}],
    }


class _File:
    """A file that does not change while it is served."""

    def __init__(self, path: Path) -> None:
        self.path, self.tag = path, _tag(path.read_bytes())

    def response(self, path: str, asked: Mapping[bytes, bytes]) -> Response:
        headers = {"etag": f'"{self.tag}"'}
        if path.endswith(("worker.js", ".mjs")):
            headers["content-security-policy"] = WORKER_POLICY
        if asked.get(b"if-none-match", b"").decode("latin-1") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if self.path.suffix == ".gz":
            headers["content-encoding"] = "gzip"
        return FileResponse(self.path, headers=headers, media_type=_type(path))


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _type(path: str) -> str:
    return TYPES.get(Path(path).suffix, "application/octet-stream")


def page_protocols(app: ASGIApp) -> Callable[[], asyncio.Protocol]:
    """Make protocols of asyncio that serve an application, for `ServerOptions.http`."""
    from uvicorn.server import ServerState

    from moaspec_serve.uvicorn_server import HeadDeadline, config

    class PageConnection(HeadDeadline):
        """A connection that ends when its client has taken nothing for `MAX_STALL_S`."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._end = self.loop.call_later(MAX_STALL_S, transport.abort)
            super().connection_made(transport)

        def resume_writing(self) -> None:
            self._end.cancel()
            self._end = self.loop.call_later(MAX_STALL_S, self.transport.abort)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end.cancel()
            super().connection_lost(exc)

    settings, state = config(with_headers(app, PAGE_HEADERS)), ServerState()
    return lambda: PageConnection(config=settings, server_state=state, app_state={})
