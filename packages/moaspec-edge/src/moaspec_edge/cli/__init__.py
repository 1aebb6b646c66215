"""Commands of devices and of the server that verifies for them."""
