"""Runs the server tests of other projects against a cluster. docs/suites.toml has the outcomes."""
