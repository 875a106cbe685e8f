"""Inputs that users of such servers have reported, replayed through a real router.

`replay` writes a small model, starts a router whose workers write a given text, and sends requests. Each
module has a table of reports: what the model writes or the client sends, and what is right.
"""
