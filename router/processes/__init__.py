"""Runs one router as several processes on one port.

Life of such a router:

1. `supervise` reserves the ports and starts each `process`, which listens on the shared port (`sockets`).
2. The supervisor sends them commands and merges their metrics (`merged_metrics`).
3. On a signal all drain or stop.
"""
