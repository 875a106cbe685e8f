"""`python -m bench.load` does the same as `baton bench`, without an installation."""

from bench.load.cli import app

app(prog_name="baton bench")
