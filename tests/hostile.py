"""Frames that no device sends: noise, mutations of real messages, and lies."""

from __future__ import annotations

import random

from moaspec.target.target import Target
from moaspec_edge.protocol import identity
from moaspec_edge.protocol import target_pb2 as pb

NAMES = tuple(bytes([number]) * 16 for number in range(4))
"""Sessions that hostile frames speak of; so few, that they meet."""


class Hostile:
    """Makes frames from a seed.

    Args:
        target: of the server, so that some frames are almost right.
        drafter: fingerprint of the server's drafter.
    """

    def __init__(self, target: Target, drafter: str, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self._identity, self._drafter = identity.to_message(target.identity), drafter
        self._sent: list[bytes] = []

    def frame(self) -> bytes:
        """Return the next hostile frame."""
        makers = (self.noise, self.message, self.message, self.mutated, self.cut_off, self.replay)
        frame = self.random.choice(makers)()
        if len(self._sent) < 64:
            self._sent.append(frame)
        return frame

    def noise(self) -> bytes:
        """Bytes of no meaning."""
        return self.random.randbytes(self.random.choice((0, 1, 7, 60, 3000)))

    def mutated(self) -> bytes:
        """A message with a few bytes changed."""
        frame = bytearray(self.message())
        for _ in range(self.random.randint(1, 4)):
            frame[self.random.randrange(len(frame))] = self.random.randrange(256)
        return bytes(frame)

    def cut_off(self) -> bytes:
        """The beginning of a message."""
        frame = self.message()
        return frame[: self.random.randrange(len(frame))]

    def replay(self) -> bytes:
        """A frame that was sent before."""
        return self.random.choice(self._sent) if self._sent else b""

    def message(self) -> bytes:
        """A message whose fields are sometimes right."""
        kind = self.random.choice(("open", "draft", "resume", "fetch", "heartbeat", "close"))
        message = pb.ClientMessage(
            session=self.random.choice((*NAMES, b"short")),
            turn=self.random.choice((0, 1, 1, 1, 2, 2**32 - 1)),
        )
        content = {
            "open": self._open,
            "draft": self._draft,
            "resume": lambda: pb.Resume(base=self._number(), held=self._ranges()),
            "fetch": lambda: pb.Fetch(ranges=self._ranges()),
            "heartbeat": lambda: pb.Heartbeat(number=self.random.getrandbits(64)),
            "close": pb.Close,
        }[kind]()
        getattr(message, kind).CopyFrom(content)
        return message.SerializeToString()

    def _open(self) -> pb.Open:
        known = self.random.random() < 0.8
        return pb.Open(
            protocol=identity.PROTOCOL if known else self._number(),
            sampling_version=identity.SAMPLING_VERSION,
            target=self._identity if known else pb.TargetIdentity(model_type="other"),
            drafter=self.random.choice((self._drafter, self._drafter, "", "another")),
            codec=self.random.choice((1, 2, 3, 0)),  # type: ignore[arg-type]
            num_target_layers=self.random.choice((0, 0, 1, 2**31)),
            sampling=self._sampling(),
            token_ids=self._tokens(),
            prompt_length=self.random.choice((1, 1, 2, 0, 2**31)),
            held=self._ranges(),
        )

    def _sampling(self) -> pb.Sampling:
        return pb.Sampling(
            temperature=self.random.choice((0.0, 0.0, 1.0, -1.0, float("nan"), 1e308)),
            top_p=self.random.choice((1.0, 1.0, 0.5, 2.0)),
            repetition_penalty=self.random.choice((1.0, 1.0, 0.0, float("inf"))),
            seed=self.random.choice((None, 3)),
            logit_bias=self.random.choice(({}, {}, {5: 1.0}, {2**31: 1.0})),
        )

    def _draft(self) -> pb.Draft:
        tokens = self._tokens()
        parents = [self.random.randrange(len(tokens) + 2) for _ in tokens]
        return pb.Draft(
            base=self._number(),
            tokens=tokens,
            parents=self.random.choice(((), parents, parents[:-1])),
        )

    def _tokens(self) -> list[int]:
        length = self.random.choice((0, 1, 3, 8, 300))
        most = self.random.choice((63, 63, 63, 2**32 - 1))
        return [self.random.randint(0, most) for _ in range(length)]

    def _number(self) -> int:
        return self.random.choice((0, 1, 4, 9, 10, 250, 2**32 - 1))

    def _ranges(self) -> list[pb.Range]:
        numbers = [self._number() for _ in range(self.random.choice((0, 2, 4)))]
        return [
            pb.Range(start=start, stop=stop)
            for start, stop in zip(numbers[::2], numbers[1::2], strict=True)
        ]
