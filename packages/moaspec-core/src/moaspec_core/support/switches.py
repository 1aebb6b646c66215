"""Environment variables with a closed set of values."""

import logging
import os
from functools import cache

OFF = ("off", "0", "false")

log = logging.getLogger("moaspec.support.switches")


def setting(variable: str, *known: str) -> str:
    """The value of a variable: "off", one of `known`, or "" for none; others are reported once."""
    asked = os.environ.get(variable, "")
    value = "off" if asked.lower() in OFF else asked.lower()
    if value in {"", "off", *known}:
        return value
    _tell(variable, asked, ", ".join(("off", *known)))
    return ""


@cache
def _tell(variable: str, asked: str, known: str) -> None:
    log.warning("%s=%s is ignored; it must be %s or unset.", variable, asked, known)
