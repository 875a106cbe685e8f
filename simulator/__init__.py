"""Simulates prefill and decode pools on a simulated clock (`clock`), with the router's own desk and queue.

Life of a simulation:

1. `trace` and `agents` say what clients ask: sessions of turns, which may wait for their answers before they
   go on (a closed loop). The load may change.
2. `placement` plays them. Each turn goes to a random router (`router`), whose `Desk` and admission queue are
   those of the real router. Workers may come, go and move between the pools.
3. A worker (`step_worker`) decodes and computes prompts step by step, at the cost of `steps`, with a prefix
   cache (`cache`) and copies of states (`copies`). It reports to the routers once a second.
4. A `PlacementOutcome` holds what was measured.

Real are the plans, the window, the order of the queue, the index of chunks and the order of events. The time
and the workers are simulated. `bench.routing_sim` compares policies, and `baton plan` sizes pools with it.
"""
