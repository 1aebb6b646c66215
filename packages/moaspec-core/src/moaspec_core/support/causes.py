"""Causes of errors, in one line."""


def first_line(error: Exception) -> str:
    """Of an error's message, or the first two if that ends in a colon; its kind if it has none."""
    lines = [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def system_reason(error: Exception) -> str:
    """The system's words for an error, without file name and number; else the error's own."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
