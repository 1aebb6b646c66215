"""The server's side: sessions, shared verification passes, limits."""
