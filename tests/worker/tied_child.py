"""Run by test_processes: ties itself to the parent whose pid comes on stdin, then waits."""

import signal
import sys

from worker.child import begin

if __name__ == "__main__":
    begin("baton: tied child", int(sys.stdin.readline()))
    print("tied", flush=True)
    signal.pause()
