"""One way to decode over one link, and what it measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from edge_bench.formula import Mode
from moaspec_core.errors import InputError
from moaspec_edge.protocol.codec import CODECS, CodecName

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one measurement.

    Attributes:
        mode: see `formula`.
        drafter: "moa" or "replay"; what the device drafts with.
        num_target_layers: N, of "moa".
        step_s: a draft step takes at least so long, to hold the device's speed.
        drafted: tokens per round; 0 lets the session choose.
        agreement: of "replay", probability that a draft is right.
        codec: of activations.
    """

    mode: Mode
    drafter: str = "moa"
    num_target_layers: int = 0
    step_s: float = 0.0
    drafted: int = 4
    agreement: float = 0.75
    codec: CodecName = "int8"

    def __post_init__(self) -> None:
        for what, got, known in (("mode", self.mode, MODES), ("codec", self.codec, CODECS)):
            if got not in known:
                raise InputError(f"A {what} is one of {', '.join(known)}, got {got!r}.")

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.mode in ("plain", "server"):
            return self.mode
        return f"{self.mode} {drafter_name(self.drafter, self.num_target_layers)}"


def drafter_name(drafter: str, num_target_layers: int) -> str:
    """What tables call a drafter: "moa" has several N."""
    return f"{drafter}@{num_target_layers}" if drafter == "moa" else drafter


@dataclass
class Measured:
    """What a case measured, over all prompts.

    Attributes:
        tokens: emitted.
        rounds: target passes for them, prefills not counted.
        seconds: from each prompt's first token to its last.
        first_token_s: from the request to the first token, of each prompt.
        drafted: tokens sent for verification.
        streamed: of the rounds, those of a session that chose to draft nothing.
        step_s: of a draft step, the mean.
        pass_s: of the server's pass, the mean.
        hits: share of drafted rounds whose next draft was there when the verdict came.
        bytes_up, bytes_down: of messages; on an emulated link, of packets.
        prompts: token ids.
        texts: generated ids, so that all cases can be compared.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    drafted: int = 0
    streamed: int = 0
    step_s: float = 0.0
    pass_s: float = 0.0
    hits: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def later(self) -> int:
        """Tokens after each prompt's first."""
        return self.tokens - len(self.texts)

    @property
    def per_token_s(self) -> float:
        """Seconds of each token after the first."""
        return self.seconds / max(1, self.later)

    @property
    def tau(self) -> float:
        """Tokens a round emits."""
        return self.later / max(1, self.rounds)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        return {
            **asdict(self),
            "tokens_per_s": 1.0 / self.per_token_s if self.seconds else None,
            "passes_per_token": self.rounds / max(1, self.later),
            "tau": self.tau,
            "bytes_up_per_token": self.bytes_up / max(1, self.tokens),
            "bytes_down_per_token": self.bytes_down / max(1, self.tokens),
        }
