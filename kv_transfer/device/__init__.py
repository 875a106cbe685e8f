"""Where torch begins: KV between the engine's paged pool and arena slots.

`HostPool` copies at once. `CudaPool` enqueues on a side stream of its own and answers with events; it never
waits for the device. In both, a *table* is where one request's positions and its states lie in the pool.
"""
