"""`baton top`: what a running cluster does right now.

Life of a frame: `scrape` asks the router for `/status` and `/metrics`, and each worker that `/status` names
for its metrics → `frame`, which is pure, makes a `Frame` of two scrapes: what was added between them, as
rates and quantiles → `command` draws it, again and again, or once.
"""
