"""Simulates prefill pools and clusters, with the router's own policies on a simulated clock.

Life of a simulation:

1. A `Trace` of sessions says what clients ask (`trace`). A `Setting` says what the trace meets: workers,
   routers and rates.
2. `prefill.Simulation` plays the trace. Sessions begin at random times, and each turn goes to a
   random router. The router chooses a worker with a policy of `router.policy`.
3. A `SimWorker` computes one prompt after another and caches chunks (`cache`). It reports to the
   routers once a second.
4. An `Outcome` holds what was measured: cache hits, times to first token, how evenly the workers computed.

Real are the policies, the estimate of a worker's queue, the index of chunks and the order of events. The time
and the workers are simulated.

`placement` has both pools step by step: engines that decode and compute prompts (`step_worker`, `steps`) with
the same cache, copies of states (`copies`), and routers that decide for each request which workers compute it
(`router`). The load may change, and a policy may move workers between the pools. Sessions may wait for their
answers before they go on (a closed loop).

All simulations run on a `Clock` (`clock`).

`agents` makes the sessions of agents. `bench.routing_sim` compares policies with it, and `baton plan` sizes
pools with it.
"""
