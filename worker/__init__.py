"""What prefill and decode workers are both made of: process tree, local messages, gRPC service, health,
drain.

The life of a worker, `worker.service.run`, one process tree from start to end:

1. The *service process* (asyncio: gRPC, health, metrics) makes the staging arena and the sockets that its
   children inherit, and starts the *engine process*: a fresh interpreter that ties its life to the
   service, loads the model and answers what it is.
2. Knowing the KV layout it starts the *transfer process*, which listens for KV lanes (prefill) or opens
   them (decode).
3. Ready: the gRPC port opens, whoever started us is told (`worker.ready`), routers attach. What they
   submit is validated here, computed in the engine process, and goes back as one message per engine step
   and router.
4. A child that dies or falls silent ends the whole tree with a non-zero exit; the supervisor starts the
   next incarnation. All children die with the service process, however that dies.
5. SIGTERM drains (nothing new is taken, what runs ends, bounded); SIGINT cancels. Then engine, transfer
   process and server stop in this order, and nothing is left: no process, no socket file, no memory.

`worker.engine_loop` is the loop that the engine processes of both roles run; a role (`prefill_worker`,
`decode_worker`) is what it does with messages, KV and the outputs of a step.
"""

from worker.config import Deadlines, WorkerConfig

__all__ = ["Deadlines", "WorkerConfig"]
