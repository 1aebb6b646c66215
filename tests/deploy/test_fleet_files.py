"""The files of deploy/: manifests that Kubernetes accepts, and queries of metrics that exist."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import moaspec
import tiny
from moaspec_core.cli.main import app
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteSession
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import TargetService

DEPLOY = Path(__file__).parents[2] / "deploy"
FLEET = DEPLOY / "fleet"
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}


def manifests(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("folder", ["fleet", "vllm"])
def test_manifests_are_valid(folder: str) -> None:
    checker = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate brings the schemas"
    )
    for document in manifests(DEPLOY / folder / "kubernetes.yaml"):
        checker.validate(document, "1.34", strict=True)


def test_pods_have_time_to_drain_and_metrics_and_options_exist() -> None:
    """What a schema does not see: names that refer to one another, and our own options."""
    deployment, service, budget, scaler = manifests(FLEET / "kubernetes.yaml")
    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    (container,) = pod["containers"]
    options = dict(one.split("=", 1) for one in container["args"][1:])
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(options["--drain-s"])
    assert waits < pod["terminationGracePeriodSeconds"]
    ports = {one["name"]: str(one["containerPort"]) for one in container["ports"]}
    assert [options["--port"], options["--metrics-port"]] == list(ports.values())
    assert template["metadata"]["annotations"]["prometheus.io/port"] == ports["metrics"]
    assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports.keys()
    for selector in (
        service["spec"]["selector"],
        *(one["spec"]["selector"]["matchLabels"] for one in (deployment, budget)),
    ):
        assert selector == labels
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in exported()
    command = typer.main.get_command(app).commands["target-server"]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    assert options.keys() <= known


def queries() -> list[str]:
    panels = json.loads((FLEET / "dashboard.json").read_text())["panels"]
    groups = yaml.safe_load((FLEET / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [*asked, *(rule["expr"] for rule in rules)]


def exported() -> dict[str, list[dict[str, str]]]:
    """The metrics of a server that has verified a round: name to labels of each sample."""

    async def run() -> dict[str, list[dict[str, str]]]:
        service = TargetService(tiny.target())
        device = LocalDevice(tiny.target(), moaspec.NgramProposer())
        session = RemoteSession(device, InProcessTransport(service, "alice"))
        await session.generate(tiny.PROMPTS[0], max_new_tokens=4)
        service.observer.refused("credentials")
        service.observer.failed("RuntimeError")
        found: dict[str, list[dict[str, str]]] = {}
        for family in service.observer.registry.collect():
            for suffix in SUFFIXES[family.type]:
                name = family.name + suffix
                found[name] = [one.labels for one in family.samples if one.name == name]
        await session.close()
        await service.stop()
        return found

    return asyncio.run(run())


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    metrics = exported()
    asked = {name for query in queries() for name in re.findall(r"moaspec_\w+", query)}
    assert asked <= metrics.keys()
    for query in queries():
        for name, matchers in re.findall(r"(moaspec_\w+)\{([^}]*)\}", query):
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
            assert any(wanted.items() <= labels.items() for labels in metrics[name]), query
    assert {"owner": "alice"} in metrics["moaspec_owner_slots_used"]
    # What an operator of a fleet must see.
    assert asked >= {
        "moaspec_tokens_total",
        "moaspec_slots_used_ratio",
        "moaspec_owner_slots_used",
        "moaspec_waiting",
    }


def test_queries_can_be_parsed() -> None:
    parser = pytest.importorskip("promql_parser", reason="pip install promql-parser")
    for query in queries():
        parser.parse(query)
