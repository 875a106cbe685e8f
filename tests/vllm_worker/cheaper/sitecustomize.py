"""Makes vLLM take less CPU time. Python imports this when it starts with this directory in its path.

On CPUs vLLM spawns processes, and each would import all again, which takes 7 seconds: here they are forks. A
process would spin for a second after each message: here it sleeps for moments. Nothing is compiled, since
that takes longer than all that tests compute.
"""

import multiprocessing
import os
import time
from unittest.mock import patch

patch("multiprocessing.get_context", return_value=multiprocessing.get_context("fork")).start()
patch("os.sched_yield", lambda: time.sleep(0.0005)).start()
os.environ["TORCH_COMPILE_DISABLE"] = "1"
