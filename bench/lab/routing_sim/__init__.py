"""Compares placements of requests in simulated clusters: `python -m baton.bench.routing_sim`.

`__main__` simulates loads of fixed lengths and writes the rows. `agents` has sessions of many turns and a
public trace, `frontier` the longest gaps against first tokens, and `flips` the autoscaler.
"""
