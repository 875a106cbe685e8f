"""A worker: process tree, local messages, gRPC service, health, pool, drain.

The life of a worker, which `worker.service_process.service.run` implements:

1. The *service process* (asyncio: gRPC, health, metrics) makes the staging arenas and the sockets that its
   children inherit. It starts the *engine process*, a fresh interpreter, which loads the model and reports
   the KV layout. With several ranks it also starts a process for each rank from 1 on.
2. The service process starts the *transfer process*, which needs that layout. It listens for KV lanes,
   and opens lanes to the workers that this worker fetches from.
3. The gRPC server starts, the ready line goes to the parent process, and routers attach.
4. The service process validates each request of a router. The engine process computes it. The tokens of one
   engine step go to each router in one message.
5. If a child dies or hangs, the whole tree ends with a non-zero exit code. The supervisor starts the next
   incarnation. With `replace_engine` the service process stays and starts the others again, if it was the
   engine process. With `standby` the next engine process runs by then. All children die with the service
   process, even if SIGKILL ends it.
6. SIGTERM drains: the worker refuses new requests and waits, up to a deadline, until the accepted ones have
   ended. SIGINT skips this wait. Then the remaining attempts fail, and the transfer process, the engine
   process and the gRPC server stop in this order.

`service_process` and `engine_process` hold what runs in these processes. Both use the modules beside them.
`service_process` also uses the configuration and the exit codes of `engine_process`.

Every worker does both kinds of work over one engine. `worker.engine_process.loop` runs the engine and two
roles. A role (`prefill_worker`, `decode_worker`) handles its messages, its KV and the outputs of a step. The
*pool* of a worker is a label: it tells routers which kind of new work to send. SetPool changes it at any
time.
"""

from baton.worker.config import WorkerConfig
