"""Private spans: what never leaves the device is replaced before anything else happens."""

from moaspec.privacy.recognisers import Phones, Recogniser, cards, default, emails, ibans
from moaspec.privacy.spans import Span, marked
from moaspec.privacy.vault import Restorer, Vault

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
