"""Baton's benches: `python -m baton.bench.NAME [--json PATH] [--device cpu|cuda] [--short]`, from a clone.

Life of a bench:

1. Its module declares a `Bench`: options, devices, `measure`. `driver` parses the arguments, and exits with 2
   if this machine cannot measure.
2. `measure` starts what it measures: engines in this process, a cluster (`harness.cluster.served`), or the
   deployments of `--side` (`harness.sides`). It warms up.
3. It measures Baton and its baseline in turns: A B A B … (`Run.compare`, `in_turns`).
4. It adds one row per result. At the end `driver` prints the table and writes the JSON file.
"""
