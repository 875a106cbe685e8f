"""A child for test_processes: it ties itself to the parent with the pid on stdin, then waits."""

import signal
import sys

from baton.worker.engine_process.start import begin

if __name__ == "__main__":
    begin("baton: tied child", int(sys.stdin.readline()))
    print("tied", flush=True)
    signal.pause()
