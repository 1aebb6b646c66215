"""What vLLM is told."""

from __future__ import annotations

import json

import pytest

from moaspec.errors import InputError, ServingError
from moaspec.vllm_plugin.vllm_settings import PROPOSER, SCHEDULER, WORKER, Serving, drafter_name

SERVING = Serving(model="some/model", drafter="my drafter", num_speculative_tokens=4)


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
    graphs = json.loads(options.pop("--compilation-config"))
    assert graphs == {"cudagraph_mode": "PIECEWISE"}
    assert options == {"--worker-cls": WORKER, "--scheduler-cls": SCHEDULER}


def test_vllm_hands_the_drafters_name_back() -> None:
    assert drafter_name(SERVING.engine_arguments["additional_config"]) == "my drafter"


@pytest.mark.parametrize("config", [None, {}, {"moaspec": {}}, {"moaspec": "x"}, "hash"])
def test_a_missing_drafter_is_named(config: object) -> None:
    with pytest.raises(ServingError, match="which drafter"):
        drafter_name(config)


def test_an_empty_draft_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Serving(model="m", drafter="d", num_speculative_tokens=0)
