"""How calls arrive: over gRPC and WebSockets, admitted before their requests are read."""
