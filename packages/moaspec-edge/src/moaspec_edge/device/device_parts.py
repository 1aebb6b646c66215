"""A device as its session uses it: data of the target, and a drafter. Needs no PyTorch."""

from abc import ABC, abstractmethod

from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.device_target import DeviceTarget
from moaspec_edge.protocol.activation_layout import ActivationLayout, Activations
from moaspec_edge.protocol.codec import CodecName
from moaspec_edge.protocol.transport import ServerTransport


class DeviceProposer(Proposer):
    """A `Proposer` whose activations come from a server.

    Attributes:
        num_target_layers: N.
        chains_only: whether it drafts chains, but no trees.
    """

    num_target_layers: int
    chains_only = False

    @abstractmethod
    def layout(self, codec: CodecName) -> ActivationLayout:
        """The layout of a token's activations; InputError for an unknown codec."""

    @abstractmethod
    def place_activations(self, row: int, start: int, activations: Activations) -> None:
        """Store activations of verified tokens from position `start` on, in any order."""


class Device(ABC):
    """The models on a device, as its session uses them."""

    target: DeviceTarget  # a whole target, or the parts of it in a device bundle
    # Of the drafter whose encoder the server must have; None if it needs none.
    fingerprint: str | None

    @abstractmethod
    def drafting(self, num_target_layers: int | None) -> Proposer:
        """Make a drafter for one session, with caches of its own.

        One that needs activations is a `DeviceProposer`.
        """

    async def update(self, transport: ServerTransport) -> bool:  # noqa: ARG002
        """Take the newest version of a server's drafter, if it learns; texts go on meanwhile.

        New sessions draft with it, others from their next turn on. The bundle's files stay.

        Returns:
            Whether there was a newer one.

        Raises:
            LinkError: the link broke.
            RefusedError: the server refuses, or sends weights that are not of this drafter.
        """
        return False

    def renew(self, drafting: Proposer) -> None:  # noqa: B027 - only some devices are updated
        """Let a session's drafter use the device's newest version."""
