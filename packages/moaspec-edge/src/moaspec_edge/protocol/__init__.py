"""The protocol of device and server: messages (`target.proto`), their limits, connections."""
