"""Fetching versions of a drafter that learns on its server."""

import contextlib

from moaspec_core.errors import RefusedError
from moaspec_edge.protocol.transport import ServerTransport


async def newer_version(
    transport: ServerTransport, own: str | None, most_bytes: int, packing: str = ""
) -> tuple[str, bytes] | None:
    """The newest version of a server's drafter.

    Args:
        own: fingerprint of the version that the device has.
        most_bytes: largest allowed size of its weights.
        packing: their form; see `DescribeRequest`.

    Returns:
        Its fingerprint and its weights; None if the server has no newer one in this form.

    Raises:
        LinkError: the link broke.
        RefusedError: the server refuses, or sends too much or another form.
    """
    known = "", own
    if (await transport.describe()).newest in known:
        return None
    data, version = bytearray(), ""
    async with contextlib.aclosing(transport.weights(packing)) as pieces:
        async for piece in pieces:
            data += piece.data
            version = piece.version
            if version in known:  # another server of the fleet answers, which is behind
                return None
            if piece.packing != packing:
                raise RefusedError(
                    f"The server sends weights as {piece.packing or 'safetensors'}, this device "
                    f"needs {packing}. Update the server."
                )
            if len(data) > most_bytes:
                raise RefusedError(f"The server sends more than the {most_bytes} bytes of weights.")
    return (version, bytes(data)) if version else None
