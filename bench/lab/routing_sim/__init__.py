"""Compares routing policies in simulated clusters: `python -m baton.bench.routing_sim`.

Life of a run: `traces` makes sessions, and chooses rate and cache capacity for a size of cluster ->
`simulator` runs the trace once with each policy -> `__main__` writes the rows. `agents` has sessions of many
turns and a public trace. `baselines` has the policies that Baton's own are compared with, and the autoscaler.
"""
