"""`python -m baton.bench.load` does the same as `baton bench`, without an installation."""

from baton.bench.load.cli import app

app(prog_name="baton bench")
