"""An idle server measures what rounds cost, and takes better draft settings."""

import logging
import time
from collections.abc import Callable

from moaspec_core.policy.policies import DraftSettings

LOG = logging.getLogger(__name__)

QUIET_S = 5.0  # seconds without a request after which costs may be measured
RENEWAL_S = 60.0  # seconds between two tries

Renew = Callable[[DraftSettings, Callable[[], bool]], DraftSettings | None]
"""Gets the settings in use, and a function that tells whether a request came, which ends the
measurement. Returns settings for later requests, or None to keep them."""


class Renewal:
    """When a server measures again; `renew` is called in the thread that runs the target."""

    def __init__(self, renew: Renew, quiet_s: float, renewal_s: float) -> None:
        self._renew, self._quiet_s, self._renewal_s = renew, quiet_s, renewal_s
        self._due_s = 0.0

    def wait_s(self, used_s: float) -> float:
        """Seconds until the next try, if no request comes after `used_s` (of `time.monotonic`)."""
        return max(self._due_s, used_s + self._quiet_s) - time.monotonic()

    def renewed(self, shaping: DraftSettings, stopped: Callable[[], bool]) -> DraftSettings | None:
        """New settings, or None to keep them, also where measuring fails: requests go on."""
        started_s = time.monotonic()
        try:
            settings = self._renew(shaping, stopped)
        except Exception as error:  # noqa: BLE001 - as where memory is short
            LOG.warning("Costs were not measured while idle: %s", error)
            settings = None
        if settings is not None:
            LOG.info(
                "Costs were measured while idle, in %.1f s: later requests draft by them, with "
                "N = %s (before: %s).",
                time.monotonic() - started_s,
                settings.num_target_layers,
                shaping.num_target_layers,
            )
        self._due_s = time.monotonic() + self._renewal_s
        return settings
