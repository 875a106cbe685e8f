"""What a handover costs: `python -m baton.bench.overlap`.

`__main__` starts a prefill and a decode worker, submits to both as a router does (`streams`), reads the times
inside the workers from their traces (`trace`), and writes the rows.
"""
