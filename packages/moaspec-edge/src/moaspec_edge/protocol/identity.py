"""Identities of targets as messages, and versions of the protocol."""

from dataclasses import asdict, fields

from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_edge.protocol import target_pb2 as pb

PROTOCOL = 1  # version of the messages in target.proto

SAMPLING_VERSION = 2
"""Version of seeded sampling in `sampling/choose.py`: equal versions choose equal tokens.

Version 2 added `TokenRules`.
"""


def to_message(identity: TargetIdentity) -> pb.TargetIdentity:
    """Convert an identity to a message."""
    return pb.TargetIdentity(**asdict(identity))


def from_message(message: pb.TargetIdentity) -> TargetIdentity:
    """Convert a message to an identity."""
    values = {field.name: getattr(message, field.name) for field in fields(TargetIdentity)}
    hashes = {name: values[name] or None for name in ("tokenizer_hash", "adapter")}
    return TargetIdentity(**values | hashes)


def difference(got: TargetIdentity, expected: TargetIdentity) -> str | None:
    """Describe the differences of two targets; None if there are none.

    Hashes of tokenizers are compared only if both are known, and those of adapters if both have
    one: a device may hold the drafter of the base model.
    """
    said = []
    for name in (field.name for field in fields(TargetIdentity)):
        own, other = getattr(got, name), getattr(expected, name)
        if None not in (own, other) and own != other:
            said.append(f"{name} {own!r} != {other!r}")
    return ", ".join(said) or None
