"""The script `baton`."""

import os
import signal
import sys


def main() -> None:
    _open_standard_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell ignores the signal for programs in the background
        # The imports take a second. A Ctrl-C meanwhile would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from baton.cluster import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


def _open_standard_streams() -> None:
    """Opens the null device in place of standard streams that the caller has closed (`baton status >&-`).

    Otherwise a later file or socket gets their number, and what children print goes there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
