"""Private spans: text that is replaced by placeholders before it leaves the device."""

from moaspec_core.privacy.recognisers import Phones, Recogniser, cards, default, emails, ibans
from moaspec_core.privacy.spans import Span, marked
from moaspec_core.privacy.vault import Restorer, Vault

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
