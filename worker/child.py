"""What a child of the service process does before anything else: it names itself and ties its life to the
parent's."""

import signal

import setproctitle

from kv_transfer.parent import die_with_parent


def begin(title: str, parent_pid: int) -> None:
    """Die with the parent, leave signals to it, carry a name. To be called before slow imports.

    SIGKILL, because an engine deep in a kernel would not notice anything milder. The signal follows the
    thread that spawned us, so the service spawns from its main thread. A parent that died before the call
    is noticed by its pid. A Ctrl-C reaches the whole foreground group and `kill -- -PGID` all of it, but
    how a worker stops is ordered by its service process alone; children hear of it by message.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(title)
