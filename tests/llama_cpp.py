"""llama.cpp as the reference for GGUF files: its token ids, and the tokens that end an answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARK = "file: "


def token_ids(files: Mapping[str, Path], texts: Sequence[str]) -> dict[str, list[list[int]]]:
    """The ids of all texts by each file's tokenizer, with the special tokens that it adds."""
    asked = {"files": {name: str(file) for name, file in files.items()}, "texts": list(texts)}
    with tempfile.TemporaryDirectory() as folder:
        question = Path(folder) / "asked.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        _run(question, Path(folder) / "answer.json")
        found: dict[str, list[list[int]]] = json.loads((Path(folder) / "answer.json").read_text())
    return found


def end_ids(files: Mapping[str, Path]) -> dict[str, set[int]]:
    """The tokens that end an answer, from what it logs about them."""
    asked = {"files": {name: str(file) for name, file in files.items()}, "texts": [], "log": True}
    with tempfile.TemporaryDirectory() as folder:
        question = Path(folder) / "asked.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        log = _run(question, Path(folder) / "answer.json")
    parts = re.split(rf"^{_MARK}(.*)$", log, flags=re.MULTILINE)[1:]
    return {
        name: set(map(int, re.findall(r"EOG token\s+= (\d+) ", text)))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _run(question: Path, answer: Path) -> str:
    """In a process of its own, because it ends the process where a file displeases it."""
    command = [sys.executable, __file__, str(question), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def _main() -> None:
    import xllamacpp

    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found, servers = {}, []
    for name, file in asked["files"].items():
        os.write(2, f"{_MARK}{name}\n".encode())
        server = xllamacpp.Server(_parameters(xllamacpp, file, log=asked.get("log", False)))
        link = http.client.HTTPConnection(server.listening_address.rpartition("/")[2])
        found[name] = [_ids(link, text) for text in asked["texts"]]
        link.close()
        servers.append(server)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a server's end may wait for ever


def _parameters(package: Any, file: str, *, log: bool) -> Any:
    found = package.CommonParams()
    found.model.path = file
    found.port = 0
    found.n_ctx, found.n_parallel, found.warmup, found.fit_params = 64, 1, False, False
    found.use_jinja = False
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = 1
    found.verbosity = 10 if log else 0
    return found


def _ids(link: http.client.HTTPConnection, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True})
    link.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
    found: list[int] = json.loads(link.getresponse().read())["tokens"]
    return found


if __name__ == "__main__":
    _main()
