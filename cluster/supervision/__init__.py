"""Keeps the roles of a cluster running, on one machine or behind actors of Ray.

Starts each role as a child process, watches it, restarts it, and tells routers which workers are ready.
"""
