"""Python imports this when it starts with this directory in its path: in the processes of vLLM in tests.

What they leave in /dev/shm has the prefix of the run of the tests (`tests.leftovers`).

The wheel of torchvision that PyPI has is for CUDA, and a torch for CPUs cannot load its operators. Nothing
here uses these, so they are not declared.

With `MEASURED_VLLM` a worker measures steps at its start, as on a GPU.

Without `FRESH_VLLM` they take less CPU time, too. On CPUs vLLM spawns processes, and each would import all
again, which takes 7 seconds: here they are forks. A process would spin for a second after each message: here
it sleeps for moments. Nothing is compiled, since that takes longer than all that tests compute.
"""

import multiprocessing
import os
import sys
import time
import types
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from multiprocessing import shared_memory
from typing import Any
from unittest.mock import patch

prefix = f"/{os.environ['SHARED_MEMORY_OF_TESTS']}"
patch.multiple(shared_memory, _SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + 8).start()
_OPERATORS = "torchvision._meta_registrations"
sys.modules[_OPERATORS] = types.ModuleType(_OPERATORS)


class Measuring(MetaPathFinder):
    """Changes the module that starts vLLM when it is imported."""

    MODULE = "baton.vllm_worker.llm"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            warm_up = module.VLLM.warm_up

            async def warm_up_and_measure(vllm: Any, pool: Any) -> None:
                await warm_up(vllm, pool)
                if "MEASURED_VLLM" in os.environ:  # this process may be a fork
                    await vllm.measure(pool)

            module.VLLM.warm_up = warm_up_and_measure

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Measuring())
if "FRESH_VLLM" not in os.environ:
    patch("multiprocessing.get_context", return_value=multiprocessing.get_context("fork")).start()
    patch("os.sched_yield", lambda: time.sleep(0.0005)).start()
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
