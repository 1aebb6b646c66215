"""What device and server send each other."""
