"""`python -m bench.load` is `baton bench` where the command is not installed."""

from bench.load.cli import app

app(prog_name="baton bench")
