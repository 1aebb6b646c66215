"""A model's own defaults over the network: the text is the local one."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

import moaspec
import tiny
from links import Faults, FaultyTransport, Restartable
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.target.target import Target
from moaspec_core.errors import WireError
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_core.tokens.token_rules import TokenRules
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.wire import WireLimits, sampling_message, sampling_of
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

RULES = TokenRules(
    no_repeat_ngram_size=2,
    bad_words_ids=((4,), (5, 9)),
    min_length=12,
    min_new_tokens=5,
    forced_bos_token_id=7,
    forced_eos_token_id=(9, 10),
    remove_invalid_values=True,
    exponential_decay_length_penalty=(3, 1.5),
    suppress_tokens=(1, 2),
    begin_suppress_tokens=(3,),
)
DEFAULTS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [1, 2, 3],
    "begin_suppress_tokens": list(range(30)),
    "eos_token_id": list(range(0, 64, 5)),
    "min_new_tokens": 6,
    "do_sample": True,
    "temperature": 0.7,
}
LIMITS = WireLimits(vocab_size=64, max_tokens=256)


def _target() -> Target:
    model = tiny.model("llama")
    model.generation_config = GenerationConfig(**DEFAULTS)
    return Target(model, tiny.tokenizer(), name="surprising")


@pytest.mark.slow
@pytest.mark.parametrize("generation_config", ["auto", None])
def test_the_text_is_the_local_one(generation_config: Any) -> None:
    """The session is opened anew within the text, so that the rules travel again."""
    target = _target()
    drafter = tiny.random_drafter(target)

    async def run() -> None:
        server = Restartable(lambda: TargetService(target, drafter))
        transport = FaultyTransport(server.transport, Faults())
        session = RemoteSession(
            LocalDevice(target, drafter), transport, RemoteOptions(draft="chain:3")
        )
        for temperature in (0.0, 0.9):
            options: Any = {"temperature": temperature, "seed": 5, "max_new_tokens": 14}
            options |= {"generation_config": generation_config}
            expected = moaspec.generate(target, tiny.PROMPTS[1], **options).token_ids
            got: list[int] = []
            async for event in session.stream(tiny.PROMPTS[1], **options):
                if len(got) < 4 <= event.start + len(event.token_ids):
                    await server.restart()
                got[event.start :] = event.token_ids
            assert got == expected
        await session.close()
        await server.service.stop()

    run_simulated(run())


def test_rules_survive_the_wire() -> None:
    for rules in (RULES, TokenRules(suppress_tokens=(5,)), TokenRules()):
        sampling = SamplingParams(rules=rules).bound({9, 3}, 20)
        message = pb.Sampling.FromString(sampling_message(sampling).SerializeToString())
        assert sampling_of(message, LIMITS) == sampling
    assert not sampling_message(GREEDY).HasField("rules")


@pytest.mark.parametrize(
    "rules",
    [
        pb.TokenRules(suppress_tokens=[64]),
        pb.TokenRules(stop_token_ids=[99]),
        pb.TokenRules(forced_bos_token_id=64),
        pb.TokenRules(bad_words_ids=[pb.TokenRules.Word()]),
        pb.TokenRules(bad_words_ids=[pb.TokenRules.Word(token_ids=[1] * 300)]),
        pb.TokenRules(bad_words_ids=[pb.TokenRules.Word(token_ids=[1])] * 20_000),
        pb.TokenRules(decay_start=1, decay_factor=float("nan")),
    ],
)
def test_rules_that_no_device_sends(rules: pb.TokenRules) -> None:
    message = sampling_message(GREEDY)
    message.rules.CopyFrom(rules)
    with pytest.raises(WireError):
        sampling_of(message, LIMITS)


def test_bundles_bring_the_defaults(tmp_path: Any) -> None:
    target = _target()
    assert target.tokenizer is not None
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(tiny.random_drafter(target), tmp_path / "drafter")
    export_bundle(tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle")
    device = load_device(tmp_path / "bundle")
    assert device.target.generation_defaults == target.generation_defaults
