"""llama.cpp as the reference for GGUF files: its token ids, and the tokens that end an answer."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def token_ids(files: Mapping[str, Path], texts: Sequence[str]) -> dict[str, list[list[int]]]:
    """The ids of all texts by each file's tokenizer, with the special tokens that it adds."""
    return _answers(files, {"texts": list(texts)})


def end_ids(files: Mapping[str, Path], candidates: Sequence[int]) -> dict[str, set[int]]:
    """The candidates at which it ends an answer in which they are the likeliest tokens."""
    asked = {"candidates": list(candidates)}
    return {name: set(found) for name, found in _answers(files, asked).items()}


def _answers(files: Mapping[str, Path], asked: Mapping[str, Any]) -> Any:
    """Of a process of its own, because it ends the process where a file displeases it."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        named = {name: str(file) for name, file in files.items()}
        question.write_text(json.dumps({**asked, "files": named}), encoding="utf-8")
        command = [sys.executable, __file__, str(question), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(answer.read_text(encoding="utf-8"))


def _main() -> None:
    import xllamacpp

    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found, servers = {}, []
    for name, file in asked["files"].items():
        servers.append(xllamacpp.Server(_parameters(xllamacpp, file)))
        link = http.client.HTTPConnection(servers[-1].listening_address.rpartition("/")[2])
        if "texts" in asked:
            found[name] = [_ids(link, text) for text in asked["texts"]]
        else:
            found[name] = [token for token in asked["candidates"] if _ends(link, token)]
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a server's end may wait for ever


def _parameters(package: Any, file: str) -> Any:
    found = package.CommonParams()
    found.model.path = file
    found.port = 0
    found.n_ctx, found.n_parallel, found.warmup, found.fit_params = 64, 1, False, False
    found.use_jinja = False
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = 1
    found.verbosity = 0
    return found


def _ids(link: http.client.HTTPConnection, text: str) -> list[int]:
    asked = {"content": text, "add_special": True, "parse_special": True}
    found: list[int] = _posted(link, "/tokenize", asked)["tokens"]
    return found


def _ends(link: http.client.HTTPConnection, token: int) -> bool:
    asked = {"prompt": "a", "n_predict": 2, "temperature": 0, "logit_bias": [[token, 1000.0]]}
    return bool(_posted(link, "/completion", asked)["stop_type"] == "eos")


def _posted(link: http.client.HTTPConnection, path: str, asked: Mapping[str, Any]) -> Any:
    link.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    return json.loads(link.getresponse().read())


if __name__ == "__main__":
    _main()
