"""Commands of servers, and of devices that use them."""
