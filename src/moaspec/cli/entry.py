"""Where the `moaspec` command begins.

Loading torch and transformers takes seconds. A Ctrl-C meanwhile ends the process at once and in
silence; raised as an exception, it would be caught, or not, anywhere inside them.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Load the commands, then run one; see `moaspec.cli.main.run`."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moaspec.cli import main

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main.run()
