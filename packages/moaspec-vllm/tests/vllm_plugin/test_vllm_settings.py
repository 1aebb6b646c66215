"""The options that vLLM is started with."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from moaspec_core.errors import InputError, ServingError
from moaspec_vllm.vllm_settings import (
    PROPOSER,
    SAMPLER,
    SCHEDULER,
    WORKER,
    VLLMServeSettings,
    draft_up_to,
    drafter_name,
)

SERVING = VLLMServeSettings(model="some/model", drafter="my drafter", num_speculative_tokens=4)


def test_the_command_carries_the_engines_arguments() -> None:
    command = SERVING.command
    assert command[:3] == ["vllm", "serve", "some/model"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert json.loads(options.pop("--speculative-config")) == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 4,
    }
    assert json.loads(options.pop("--additional-config")) == {"moaspec": {"drafter": "my drafter"}}
    assert options == {"--worker-cls": WORKER, "--scheduler-cls": SCHEDULER}


def test_vllm_hands_the_drafters_name_back() -> None:
    assert drafter_name(SERVING.engine_arguments["additional_config"]) == "my drafter"


@pytest.mark.parametrize("config", [None, {}, {"moaspec": {}}, {"moaspec": "x"}, "hash"])
def test_a_missing_drafter_is_named(config: object) -> None:
    with pytest.raises(ServingError, match="which drafter"):
        drafter_name(config)


def test_vllm_hands_back_how_many_requests_are_drafted_for() -> None:
    assert draft_up_to(SERVING.engine_arguments["additional_config"]) is None
    fixed = replace(SERVING, draft_up_to=4).engine_arguments["additional_config"]
    assert draft_up_to(fixed) == 4


@pytest.mark.parametrize("most", [0, -1, "4", 2.5, True])
def test_drafts_for_no_number_of_requests_are_refused(most: object) -> None:
    with pytest.raises(ServingError, match="a number from 1 on; got"):
        draft_up_to({"moaspec": {"drafter": "d", "draft_up_to": most}})


def test_an_empty_draft_is_refused() -> None:
    with pytest.raises(InputError, match="has 1 to 16 tokens"):
        VLLMServeSettings(model="m", drafter="d", num_speculative_tokens=0)


@pytest.mark.parametrize("path", [PROPOSER, SAMPLER, SCHEDULER, WORKER])
def test_vllm_is_told_of_classes_that_exist(path: str) -> None:
    """The modules import vLLM, so their source is searched instead."""
    module, name = path.rsplit(".", 1)
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
