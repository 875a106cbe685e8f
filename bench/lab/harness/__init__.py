"""Real processes, what is sent to them, and what came back: for benches and tests.

- `cluster` runs workers and a router, and starts each again when it ends. `processes` starts and kills.
- `streams` asks a router, as clients do, and compares the answers with the right ones.
- `sides` starts deployments by the commands of a user. `faults` kills, stops, cuts off and flips workers.
- `workers` asks a prefill and a decode worker, as a router does.
"""
