"""`python -m baton.processes.tied PID PROGRAM ARGUMENT…`: becomes a program that ends with its parent PID.

Such a program ties itself to nothing, and no code of Python may run between fork and exec.
"""

import os
import sys

from baton.processes.children import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
