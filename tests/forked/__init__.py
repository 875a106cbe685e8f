"""Starts whole roles as forks of a process that has imported their modules, torch among them.

A fresh interpreter needs two seconds of CPU time to import torch, and a test run starts a hundred engines.

1. `forking` replaces `subprocess.Popen` by `ForkedPopen` in this process.
2. Its first start of a role starts a fork server (`server`): it imports all modules and has one thread.
3. Each role is a fork of the server. It gets its arguments, environment, descriptors and session as from
   `exec`, and its parent is the process that started it. Then it runs its module as `python -m` does.
4. A role that starts other processes has a fork server of its own: its first child, a fork too.

Transfer processes of the tests of `kv_transfer` are forks of another server, which has no torch. So are load
tests (`baton bench`), their clients and the server that they measure, of a third one.

Processes of pytest-xdist are forks of one that has imported what tests and roles import. Each has a fork
server for roles and load tests, again a fork.

All that runs in the environment with vLLM is a fork of a fourth one, which has vLLM.

All else starts fresh: other programs, and a role whose environment changes what an import does. These tests
start each role by its command line, fresh: `tests/system/test_serve.py` (the `baton serve` that is killed),
`tests/system/test_roles.py`, `tests/worker/test_life.py` (with two ranks) and
`tests/kv_transfer/test_process.py`. Long tests of `tests/vllm_worker` start vLLM's fresh.
"""

from tests.forked.popen import ForkedPopen, FreshPopen, forking
