"""Private spans: what never leaves the device is replaced before anything else happens."""

from moaspec.remote.private.recognisers import Phones, Recogniser, cards, default, emails, ibans
from moaspec.remote.private.spans import Span, marked
from moaspec.remote.private.vault import Restorer, Vault

__all__ = [
    "Phones",
    "Recogniser",
    "Restorer",
    "Span",
    "Vault",
    "cards",
    "default",
    "emails",
    "ibans",
    "marked",
]
