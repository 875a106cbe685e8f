"""Baton's benches: `python -m bench.NAME [--json PATH] [--device cpu|cuda] [--short]`.

Each module measures one thing side by side with its baseline in the same run, prints a table and, with
`--json`, writes the report of `bench.contract`. Life of a bench: parse → warm up → measure A B A B … →
one row per result → `Report.finish()`. A bench exits 0 when it could measure, whatever it measured, and 2
when the machine lacks what it needs.
"""
