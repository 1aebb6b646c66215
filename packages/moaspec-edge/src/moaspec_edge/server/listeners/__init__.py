"""How calls arrive: over WebSockets, admitted before their requests are read."""
