"""The drafter on a device, the target on a server."""
