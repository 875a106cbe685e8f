"""A role that speaks the ready protocol and does nothing else. Run as a real process, in place of `baton`.

`MISBEHAVIOUR` in the environment says how it goes wrong; a file named by `GOOD_AFTER` makes it good from the
second start on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from baton.processes import tree as processes

parser = argparse.ArgumentParser()
parser.add_argument("role")
parser.add_argument("--index", default="0")
parser.add_argument("--ready-fd", type=int, required=True)
args, _ = parser.parse_known_args()


def say(message: object) -> None:
    os.write(args.ready_fd, json.dumps(message).encode() + b"\n")


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
processes.tie_to_parent(args.ready_fd)
wrong = os.environ.get("MISBEHAVIOUR", "")
once = os.environ.get("GOOD_AFTER")
if once and Path(once).exists():
    wrong = ""
elif once:
    Path(once).touch()

if wrong == "error":
    say({"error": "--dtype: int1 is not a type"})
    sys.exit(2)
if wrong == "garbage":
    os.write(args.ready_fd, b"hello\n")
if wrong == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, lambda signum, frame: sys.exit(0))
if wrong == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if wrong == "drains":  # until SIGUSR1
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signal.sigwait({signal.SIGUSR1}) * 0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if wrong == "child" else None
say({"stage": "loading weights", "fraction": 0.5})
if wrong == "slow":
    signal.sigwait({signal.SIGUSR1})
say(
    {
        "ready": {
            "role": args.role,
            "address": f"127.0.0.1:{os.getpid()}",
            "incarnation": int.from_bytes(os.urandom(8), "little"),
            "pid": os.getpid(),
            "child": child.pid if child else None,
            "environment": dict(os.environ),
            "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
    }
)
signal.pause()
