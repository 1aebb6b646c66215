"""Numbers on the wire stay: devices and servers of different releases talk to one another."""

from __future__ import annotations

import pytest

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.websocket_transport import SUBPROTOCOL

FIELDS = {
    "DescribeRequest": "packing",
    "Description": (
        "protocol target drafter sampling_version num_target_layers max_tokens max_drafted name "
        "engine chains_only newest"
    ),
    "TargetIdentity": (
        "model_type num_layers hidden_size num_kv_heads head_dim vocab_size tokenizer_hash adapter"
    ),
    "Sampling": (
        "temperature top_k top_p min_p seed choice repetition_penalty presence_penalty "
        "frequency_penalty logit_bias logprobs grammar rules"
    ),
    "TokenRules": (
        "no_repeat_ngram_size bad_words_ids min_length min_new_tokens forced_bos_token_id "
        "forced_eos_token_id remove_invalid_values decay_start decay_factor suppress_tokens "
        "begin_suppress_tokens stop_token_ids max_new_tokens"
    ),
    "TokenRules.Word": "token_ids",
    "Range": "start stop",
    "ClientMessage": "session turn open draft heartbeat resume fetch close",
    "Open": (
        "protocol sampling_version target drafter codec num_target_layers sampling token_ids "
        "prompt_length held"
    ),
    "Draft": "base tokens parents further",
    "Heartbeat": "number",
    "Resume": "base held",
    "Fetch": "ranges",
    "ServerMessage": "session turn verdict activations heartbeat problem",
    "Verdict": "base tokens logprobs activations pass_s dropped max_further",
    "Activations": "start count data",
    "Problem": "kind message retry_s",
    "GenerateRequest": "token_ids sampling max_new_tokens stop_token_ids speculate stop",
    "Weights": "data version packing",
    "Generated": "token_ids sources stop_reason",
}
"""The fields of each message by their numbers, 1, 2, ... A new one has the next number."""


@pytest.mark.parametrize("message", FIELDS)
def test_fields_keep_their_numbers(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message.partition(".")[0]]
    for nested in message.split(".")[1:]:
        fields = fields.nested_types_by_name[nested]
    numbers = {field.name: field.number for field in fields.fields}
    assert numbers == {name: i for i, name in enumerate(FIELDS[message].split(), start=1)}


def test_every_message_is_listed() -> None:
    listed = {name.partition(".")[0] for name in FIELDS}
    assert listed | {"Close"} == set(pb.DESCRIPTOR.message_types_by_name)


def test_numbers_that_stand_for_words() -> None:
    assert dict(enumerate(wire.SOURCES)) == {0: "target", 1: "draft", 2: "copy"}
    assert wire.CODEC_NUMBERS == {"fp16": 1, "int8": 2, "int4": 3}
    kinds = {"KIND_UNSPECIFIED": 0, "LOST": 1, "BUSY": 2, "DRAINING": 3, "REFUSED": 4}
    assert dict(pb.Problem.Kind.items()) == kinds
    assert (identity.PROTOCOL, identity.SAMPLING_VERSION, SUBPROTOCOL) == (1, 2, "moaspec.v1")
    assert pb.DESCRIPTOR.package == "moaspec.remote.v1"


def test_bytes_of_drafts() -> None:
    """Parents are counted from 1, as 0 is the root; a chain has none."""
    tree = DraftTree((7, 300, 9), (-1, -1, 1))
    assert wire.draft_message(5, tree).SerializeToString().hex(" ") == TREE
    chain = DraftTree((7, 300), (-1, 0))
    assert wire.draft_message(5, chain).SerializeToString().hex(" ") == CHAIN
    assert wire.draft_message(5, DraftTree(), 3).SerializeToString().hex(" ") == "08 05 20 03"


TREE = "08 05 12 04 07 ac 02 09 1a 03 00 00 02"
CHAIN = "08 05 12 03 07 ac 02"
