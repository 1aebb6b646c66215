r"""Writes numbers of the Python device, with which the tests of packages/device-js compare theirs.

PYTHONPATH=tests:packages/moaspec-core/tests python \
    packages/moaspec-edge/tests/write_golden.py
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from moaspec.drafting.path_scores import Ranking
from moaspec.sampling.noise import seed_bits, uniform
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.engine.generate_options import sampling_params
from moaspec_core.errors import InputError
from moaspec_core.privacy import Vault, default
from moaspec_core.sampling.generation_defaults import GenerationDefaults
from moaspec_core.sampling.params import SamplingParams
from moaspec_core.sampling.philox import philox
from moaspec_edge.device.link_policy import LinkPolicy
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.activation_layout import ActivationLayout
from moaspec_edge.protocol.codec import CODECS, Codec
from moaspec_edge.protocol.fleet import Fleet, key_of
from privacy import test_attacks, test_recognisers, test_vault

GOLDEN = Path(__file__).parents[3] / "packages" / "device-js" / "test" / "golden.json"
VOCAB = 1000
COUNTERS = ((0, 0, 0, 0), (2**32 - 1,) * 4, (1, 2, 3, 4), (0x243F6A88, 0x85A308D3, 7, 0))
SEEDS = (0, 7, 2**53 + 1, 2**63, 2**64 - 1)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "seed": 2**64 - 1, "choice": 3},
    {"temperature": 0.9, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 2, "top_p": 0.6},
    {"temperature": 1.0, "seed": 3, "min_p": 0.2},
    {"temperature": 2.0, "seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 2**64 - 1, "top_p": 0.5, "presence_penalty": 0.25},
    {"temperature": 1.0, "seed": 5, "logit_bias": {3: 1.5}, "logprobs": True, "choice": 2},
)
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    {"do_sample": False, "top_k": 20},
    {
        "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [7, -1],
        "begin_suppress_tokens": 8,
        "forced_eos_token_id": 2,
        "min_new_tokens": 3,
        "no_repeat_ngram_size": 4,
        "sequence_bias": [[[5], -2.5]],
        "exponential_decay_length_penalty": [5, 1.2],
    },
)


def noise() -> list[dict[str, Any]]:
    found = []
    for seed in SEEDS:
        for choice, position, token_id in ((0, 0, 0), (1, 300, 128_000), (2**32 - 1, 5, 9)):
            numbers = (seed_bits(seed), choice, position, token_id)
            value = uniform(*(torch.tensor(one) for one in numbers)).item()
            at = {"choice": choice, "position": position, "tokenId": token_id}
            found.append({"seed": str(seed), **at, "value": value})
    return found


def words() -> list[dict[str, Any]]:
    key = (0xA4093822, 0x299F31D0)
    found = []
    for counter in COUNTERS:
        c0, c1, c2, c3 = counter
        block = philox((c0, c1, c2, c3), key)
        found.append({"counter": counter, "key": key, "words": list(block)})
    return found


def activations() -> list[dict[str, Any]]:
    """Records of ordinary numbers, and of bytes that no server would send."""
    random = np.random.default_rng(0)
    found = []
    for name in CODECS:
        for heads, dim in ((2, 6), (3, 16)):
            codec = Codec(name, 2 * heads, dim)
            encoded = codec.encode(random.normal(size=(3, 2 * heads, dim)).astype(np.float32))
            hostile = random.integers(0, 256, encoded.shape, dtype=np.uint8)
            for records in (encoded, hostile):
                decoded = codec.decode(records).swapaxes(0, 1)
                found.append(
                    {
                        "codec": name,
                        "heads": heads,
                        "dim": dim,
                        "data": base64.b64encode(records.tobytes()).decode(),
                        "key": decoded[:heads].flatten().tolist(),
                        "value": decoded[heads:].flatten().tolist(),
                    }
                )
    return found


def layered_activations() -> list[dict[str, Any]]:
    """Records with the keys and values of two reused layers."""
    random = np.random.default_rng(1)
    found = []
    for name in CODECS:
        layout = ActivationLayout(Codec(name, 4, 6), Codec(name, 12, 4), 2)
        records = random.integers(0, 256, 5 * layout.token_bytes, dtype=np.uint8).tobytes()
        key, value, layers = layout.decode(records, 5)
        assert layers is not None
        pairs = zip((key, value), layers, strict=True)
        joined = [[*own.flatten().tolist(), *more.flatten().tolist()] for own, more in pairs]
        data = base64.b64encode(records).decode()
        found.append({"codec": name, "data": data, "key": joined[0], "value": joined[1]})
    return found


def drafts() -> list[dict[str, Any]]:
    """The first choice among all tokens of a small draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for settings in SETTINGS:
        for position in range(10, 20):
            log_q = (3 * torch.randn(40, generator=generator)).log_softmax(-1)
            log_q, order = log_q.sort(descending=True)
            ids = order * 17
            row = RequestText(0, [0] * position, SamplingParams(**settings))
            _, best = Ranking([row], ids).children(log_q[None, None], 1, 0)
            found.append(
                {
                    "settings": settings | {"seed": str(settings.get("seed", 0))},
                    "position": position,
                    "tokenIds": ids.tolist(),
                    "logQ": log_q.tolist(),
                    "chosen": int(ids[best.flatten()[0]]),
                }
            )
    return found


def speeds() -> list[dict[str, Any]]:
    found = []
    for ahead in (False, True):
        policy = LinkPolicy(wait_s=lambda: 0.08, step_s=lambda: 0.006, ahead=ahead)
        rounds = [(4, 4), (4, 2), (3, 0), (12, 9), (0, 0), (2, 2)]
        for drafted, accepted in rounds:
            tree = DraftTree(tuple(range(drafted)), tuple(range(-1, drafted - 1)))
            policy.record_round(tree, tuple(range(accepted)))
        found.append({"ahead": ahead, "rounds": rounds, "speeds": policy.speeds().tolist()})
    return found


def lengths() -> list[dict[str, Any]]:
    """Numbers of drafts where drafts pay, where none do, and where a step is not known.

    The server drops the drafts of every third round.
    """
    found = []
    for ahead, step_s, plain_s in (
        (True, 0.006, 0.06),
        (True, 0.09, 0.06),
        (False, 0.09, 0.06),
        (True, None, 0.06),
        (False, None, 0.001),
        (True, 0.09, None),
    ):
        policy = LinkPolicy(
            wait_s=lambda: 0.08,
            step_s=lambda step_s=step_s: step_s,  # type: ignore[misc]
            plain_s=lambda plain_s=plain_s: plain_s,  # type: ignore[misc]
            ahead=ahead,
        )
        drafts = []
        for turn in range(400):
            shape = policy.shape(1, 1)
            drafts.append(0 if shape is None else shape.depth)
            policy.observe(turn // 50 % 2 == 0)
            if drafts[-1]:
                tree = wire.chain(range(drafts[-1] if turn % 3 else 0))
                policy.record_round(tree, tuple(range(len(tree.tokens) // 2)))
        times = {"stepMs": step_s and 1e3 * step_s, "plainMs": plain_s and 1e3 * plain_s}
        found.append({"ahead": ahead, **times, "drafts": drafts})
    return found


def fleets() -> list[dict[str, Any]]:
    """The order in which texts try the servers of a fleet."""
    servers = ["wss://10.0.0.1:8443", "wss://10.0.0.2:8443", "ws://localhost:80", "ws://[::1]:80"]
    texts = [[], [5], [*range(64)], [*range(65)], [49_151, 0, 7]]
    fleet = Fleet.at(servers)
    return [
        {
            "servers": servers,
            "text": text,
            "ranked": fleet.ranked(key_of(text)),
        }
        for text in texts
    ]


def messages() -> list[dict[str, Any]]:
    """The `Sampling` message of options and a model's generation_config.json."""
    found = []
    for config in CONFIGS:
        defaults = GenerationDefaults.of(GenerationConfig(**config), VOCAB)
        for options in OPTIONS:
            given: Any = options
            sampling = sampling_params(given, defaults).bound({9, 2}, 33)
            message = wire.sampling_message(sampling).SerializeToString(deterministic=True)
            bias = list(options.get("logit_bias", {}).items())
            found.append(
                {
                    "config": config,
                    "options": options | {"seed": str(options.get("seed", "")), "logit_bias": bias},
                    "message": base64.b64encode(message).decode(),
                }
            )
    return found


TESTS_OF_MARKS: tuple[Any, ...] = (
    test_attacks.test_other_words_are_left_alone,
    test_vault.test_marks_without_partner_are_refused,
    test_vault.test_what_looks_like_a_mark_is_refused,
    test_vault.test_what_is_no_mark,
)
TESTS_OF_KNOWN_TEXT: tuple[Any, ...] = (
    test_attacks.test_known_text_comes_back_in_another_form,
    test_vault.test_known_text_in_another_spelling,
)
TESTS_OF_NUMBERS: tuple[Any, ...] = (
    test_recognisers.test_emails,
    test_recognisers.test_cards,
    test_recognisers.test_ibans,
    test_recognisers.test_phones,
    test_recognisers.test_ibans_behind_what_looks_like_one,
)
NUMBERS = (test_attacks.CARD, test_attacks.IBAN, test_attacks.EMAIL, test_attacks.PHONE)
PIECES = (
    *(" ", "\n", ", ", "-", "_", "**", "x", "7", "<", "&lt;", "\\", "\u200b", "\u0301", "\u0441"),
    *(
        "Ada",
        "Ada Lovelace",
        "ADA\u00a0love-lace",
        "Zo\u00eb",
        "Zoe\u0308",
        "Wei\u00dfgerber",
        "\u7530\u4e2d",
    ),
    *(
        "<private>",
        "</private>",
        "<Priv\u00e1te >",
        "[EMAIL_1]",
        "[PRIVATE_1",
        "\U0001f600",
        "\ufb01",
    ),
    *("4111111111111111", "3782 822463 10005", "x@y.org", "x%40y.org", "DE89370400440532013000"),
    *("NO93 8601 1117 947", "+49 30 901820", "(415) 555-2671", "0049", "30 901820", "&euml;"),
)


def private_texts() -> list[dict[str, Any]]:
    """Texts that one vault hides one after the other; None where it refuses one."""
    found = []
    for recognise, texts in _private_texts():
        vault = Vault(default(("US", "DE")) if recognise else ())
        hidden = [_hidden(vault, text) for text in texts]
        found.append({"recognise": recognise, "texts": texts, "hidden": hidden})
    return found


def _hidden(vault: Vault, text: str) -> str | None:
    try:
        return vault.hide(text)
    except InputError:
        return None


def _private_texts() -> Iterator[tuple[bool, list[str]]]:
    """What the tests of `moaspec_core.privacy` hide, and random texts."""
    marks = (
        *test_attacks.HIDDEN_MARKS,
        *test_attacks.REFUSED_MARKS,
        *_cases(test_vault.test_marks_however_they_are_spelled),
    )
    yield from ((False, [f"I am {a}Ada{b}, Ada"]) for a, b in marks)
    for test in TESTS_OF_MARKS:
        yield from ((False, [text]) for text in _cases(test))
    for test in TESTS_OF_KNOWN_TEXT:
        for private, again in _cases(test):
            yield False, [f"<private>{private}</private>", f"It is {again}."]
    for test in TESTS_OF_NUMBERS:
        yield from ((True, [case[0]]) for case in _cases(test))
    yield from ((True, [text]) for text in _cases(test_attacks.test_other_ways_to_write_them))
    yield from ((True, [f"Send it to {text} today."]) for text in test_recognisers.FORMS)
    yield from ((True, [line]) for line in test_recognisers.ORDINARY.splitlines())
    forms = (*test_attacks.FORMS.values(), *test_recognisers.SPELLINGS.values())
    for form in forms:
        yield from ((True, [f"Is {form(value)} it"]) for value in NUMBERS)
    chosen = random.Random(0)
    for _ in range(200):
        yield True, ["".join(chosen.choices(PIECES, k=chosen.randrange(1, 8))) for _ in range(3)]


def _cases(test: Any) -> Sequence[Any]:
    """The parameters of a test."""
    (mark,) = test.pytestmark
    cases: Sequence[Any] = mark.args[1]
    return cases


def golden() -> dict[str, list[dict[str, Any]]]:
    parts = (
        noise,
        words,
        activations,
        layered_activations,
        drafts,
        speeds,
        lengths,
        fleets,
        messages,
        private_texts,
    )
    return {part.__name__: part() for part in parts}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in golden().items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
