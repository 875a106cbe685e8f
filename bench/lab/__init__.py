"""Baton's benches: `python -m baton.bench.NAME [--json PATH] [--device cpu|cuda] [--short]`.

Life of a bench:

1. Parse the arguments. Exit with 2 if this machine cannot measure.
2. Warm up.
3. Measure Baton and its baseline in turns: A B A B …
4. Add one row per result. `Report.finish` prints the table and writes the JSON file.
"""
