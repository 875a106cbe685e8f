"""Clients that people use today: recordings of their requests, and the clients themselves.

`recorded` has the requests of each client, with texts of ours and its version in the name. `test_replays`
sends them to a router. `python -m tests.clients NAME` installs the newest version and says what changed.
"""
