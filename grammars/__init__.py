"""Grammars of clients, for routers and for both engines.

1. `trials` tries a text in a process of its own, which has hard limits.
2. `compiler` compiles what was tried.
"""
