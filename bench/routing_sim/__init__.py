"""`python -m bench.routing_sim`: the router's own policy objects against simulated workers.

Life of a run: a `Trace` of sessions (`trace`) is sized to a cluster: how fast sessions come, and how much its
prefix caches hold (`sizing`) → `cluster` is a discrete-event loop in which routers, each with a
`PrefillLoads` and a policy of `router.policy`, send prompts to `SimWorker`s (`worker`), which compute one
prompt after the other at measured speed and keep an LRU cache of 64-token chunks → `Outcome` has hits, TTFT
and balance → `__main__` compares policies (`baselines` has those that are not worth shipping) and writes
rows.

What is real: the policies, the queue estimate, the index of chunks, their order of events. What is simulated:
time, workers, and the delay of messages (status reports once a second, each worker at its own moment).
"""
