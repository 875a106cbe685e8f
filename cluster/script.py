"""The script `baton`."""

import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell ignores the signal for programs in the background
        # The imports take a second. A Ctrl-C meanwhile would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from baton.cluster import cli

    signal.signal(signal.SIGINT, before)
    cli.main()
