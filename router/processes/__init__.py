"""Runs one router as several processes on one port.

Life of such a router: `supervise` reserves the ports and starts the processes → each listens on the shared
port (`listen`) → the supervisor sends them commands (`control`) and merges their metrics (`merged_metrics`) →
on a signal all drain or stop.
"""
