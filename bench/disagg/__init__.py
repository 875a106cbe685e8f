"""Compares two deployments under load, by the same client: disaggregated Baton and another one.

Life of a run:

1. Each turn starts one side, and ends it after its loads. The sides take turns, with a seed for each pair.
2. `loads` lists the loads. Each is measured at several rates, while the side stays up.
3. `baton bench` measures each of them in a child process. The requests of all turns are pooled.
"""
