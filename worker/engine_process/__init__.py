"""The engine process of a worker, and the processes of other ranks.

`start` ties the process to its parent before the slow imports. `loop` then runs one engine and two roles. The
module that `WorkerConfig.engine_module` names puts these together.
`rank_process` follows the engine in each rank from 1 on. None of these processes uses the network.
"""
