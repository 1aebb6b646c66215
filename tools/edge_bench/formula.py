"""Predicts the seconds per token of each deployment.

R is the round trip, gamma the drafted tokens of a round, t_d the device's draft step and t_v the
verifying pass. t_T is the plain pass, s/B the transfer and A the tokens that a round emits. h is
the share of drafted rounds whose next draft was ready when the verdict came. Seconds per token:

- plain, streamed from the server: t_T (the link only delays the first token);
- server, drafting beside its target: (gamma t_d' + t_v) / A with the server's own draft step;
- sync, client-server, one after the other: (gamma t_d + R + s/B + t_v) / A;
- ahead, the device drafting on meanwhile: (max(gamma t_d, R + s/B + t_v) + (1 - h) gamma t_d) / A.

Rounds for which a session chose no drafts are streamed, and take t_v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["plain", "server", "sync", "ahead"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a prediction rests on; measured, except for the time it is about.

    Attributes:
        tokens: A.
        drafted: gamma, the mean of all rounds.
        step_s: t_d, or t_d' where the server drafts.
        pass_s: t_v, or t_T.
        rtt_s: R, of an idle link.
        transfer_s: s/B, of one round's bytes in both directions.
        hits: h.
        streamed: share of the rounds that are streamed.
    """

    tokens: float
    drafted: float
    step_s: float
    pass_s: float
    rtt_s: float
    transfer_s: float = 0.0
    hits: float = 0.0
    streamed: float = 0.0

    @property
    def wait_s(self) -> float:
        """From a request to its verdict."""
        return self.rtt_s + self.transfer_s + self.pass_s


def prediction(mode: Mode, of: Round) -> float:
    """Predicted seconds per token of a mode."""
    draft_s = of.drafted * of.step_s
    if mode == "plain":
        return of.pass_s
    if mode == "server":
        return (draft_s + of.pass_s) / of.tokens
    waited_s = (1.0 - of.streamed) * of.wait_s
    overlapped_s = draft_s + waited_s if mode == "sync" else max(draft_s, waited_s)
    late_s = 0.0 if mode == "sync" else (1.0 - of.hits) * draft_s
    return (overlapped_s + late_s + of.streamed * of.pass_s) / of.tokens


def pays(mode: Mode, of: Round, plain_pass_s: float) -> bool:
    """Whether a mode beats plain streaming by the formula.

    For `sync` that is R + s/B + gamma t_d < A t_T - t_v.

    Args:
        mode: see above.
        of: its round.
        plain_pass_s: t_T.
    """
    return prediction(mode, of) < plain_pass_s
