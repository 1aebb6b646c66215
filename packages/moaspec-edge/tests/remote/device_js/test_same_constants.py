"""What the JavaScript device states again must be what Python states."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moaspec_core.sampling.params import GREEDY
from moaspec_core.support.limits import MAX_DRAFTED
from moaspec_edge.device.remote_session import MIN_RECEIVED_SHARE, RemoteOptions
from moaspec_edge.protocol.websocket_transport import REFUSALS, UNKNOWN_CLIENT

SOURCE = Path(__file__).parents[5] / "packages/device-js/src"

PYTHON = {
    "bundle/manifest.ts": ("moaspec_edge.protocol.identity", "moaspec_edge.device_onnx.manifest"),
    "bundle/onnx_drafter.ts": ("moaspec_edge.device_onnx.onnx_drafter",),
    "protocol/activations.ts": ("moaspec_edge.protocol.codec",),
    "protocol/fleet.ts": ("moaspec_edge.protocol.fleet",),
    "protocol/limits.ts": ("moaspec_core.support.limits", "moaspec_edge.protocol.wire"),
    "protocol/websocket.ts": ("moaspec_edge.protocol.websocket_transport",),
    "protocol/wire.ts": ("moaspec_edge.protocol.wire",),
    "sampling/ranking.ts": ("moaspec_core.drafting.draft_noise", "moaspec.sampling.choose"),
    "session/draft_ahead.ts": ("moaspec_edge.device.draft_ahead",),
    "session/events.ts": ("moaspec_edge.device.events",),
    "session/link.ts": ("moaspec_edge.device.link",),
    "session/link_policy.ts": (
        "moaspec_edge.device.link_policy",
        "moaspec_core.policy.cost_model",
    ),
    "session/remote_verifier.ts": ("moaspec_edge.device.remote_verifier",),
    "session/server_calls.ts": ("moaspec_edge.protocol.websocket_transport",),
}
"""Where the constants of a file stand in Python, by the same names; seconds end with _S."""

ONLY_THERE = {
    "MAX_SIZE MAX_LAYERS MAX_FILES MAX_FILE_BYTES MAX_VOCABULARY": "limits of what a page loads",
    "MAX_WAITING_MESSAGES MAX_BEATS MAX_ROUNDS": "limits of a page's memory",
    "DESCRIBE_MS": "browsers hold connections back",
    "READ_CHUNK": "Python's is `READ_CHUNK_TOKENS` of `TreeProposer`",
    "PRIOR MIN_MS": "Python has a table of rates, and seconds",
    "EXTERNAL WEIGHTS TOKEN_PREFIX": "names",
}
"""Constants of these files that Python has not, or in another form."""

CONSTANT = re.compile(r"^(?:export )?const ([A-Z][A-Z0-9_]*) = (\d[\d_.e<* -]*|\"[^\"]*\");", re.M)


def constants(file: str) -> dict[str, Any]:
    """Numbers and texts that a file of TypeScript names."""
    found = CONSTANT.findall((SOURCE / file).read_text(encoding="utf-8"))
    return {name: eval(value) for name, value in found}


@pytest.mark.parametrize("file", PYTHON)
def test_constants_are_pythons(file: str) -> None:
    modules = [import_module(name) for name in PYTHON[file]]
    different = {name for names in ONLY_THERE for name in names.split()}
    compared = constants(file).keys() - different
    assert compared, "the pattern finds none of them"
    for name in compared:
        own, factor = re.subn("_MS$", "_S", name)
        (value, *_) = [getattr(module, own) for module in modules if hasattr(module, own)]
        value = value * 1000 if factor else value
        assert constants(file)[name] == value, name


def test_refusals_are_pythons() -> None:
    text = (SOURCE / "protocol/websocket.ts").read_text(encoding="utf-8")
    (listed,) = re.findall(r"const REFUSALS = new Set\(\[([\d, ]+)\]\)", text)
    assert {*map(int, listed.split(","))} | {UNKNOWN_CLIENT} == REFUSALS


def test_defaults_of_a_session_are_pythons() -> None:
    given = defaults("session/options.ts", "const options: RemoteOptions = {")
    python = RemoteOptions()
    known = {field.name for field in fields(python)}
    assert given.pop("min_held_share") == MIN_RECEIVED_SHARE
    assert given.pop("max_provisional") == "MAX_DRAFTED"
    assert python.max_provisional == MAX_DRAFTED
    for name, value in given.items():
        own, factor = re.subn("_ms$", "_s", name)
        assert own in known
        expected = getattr(python, own)
        assert value == (expected * 1000 if factor and expected is not None else expected), name


def test_defaults_of_sampling_are_pythons() -> None:
    given = defaults("sampling/params.ts", "export const GREEDY: SamplingParams = {")
    assert given.pop("rules") is None
    assert not GREEDY.rules
    assert given.pop("logit_bias") == {}
    assert not GREEDY.logit_bias
    assert given == {name: getattr(GREEDY, name) for name in given}
    assert {"temperature", "top_k", "top_p", "min_p", "seed", "choice"} <= given.keys()


def defaults(file: str, start: str) -> dict[str, Any]:
    """The values of an object of TypeScript, by their names in Python."""
    values: dict[str, Any] = {"true": True, "false": False, "undefined": None, "new Map()": {}}
    body = (SOURCE / file).read_text(encoding="utf-8").split(start)[1].split("\n", 1)[1]
    found = {}
    for line in body.splitlines():
        if not (match := re.fullmatch(r"\s+(\w+): (.+),", line)):
            break
        name, value = re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", match[1]), match[2]
        literal = re.fullmatch(r"[\d.]+|\".*\"", value)
        found[name] = eval(value) if literal else values.get(value, value)
    return found
