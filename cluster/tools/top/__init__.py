"""`baton top`: shows live metrics of a running cluster.

Life of a frame:

1. `scrape` reads `/status` and `/metrics` of the router, and the metrics of each worker in `/status`.
2. `frame`, which is pure, computes rates and quantiles from the difference of two scrapes.
3. `command` draws the frame, repeatedly or once.
"""
