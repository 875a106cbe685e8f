"""What a handover costs: `python -m baton.bench.overlap`.

`__main__` starts a prefill and a decode worker, and writes the rows. `streams` submits to both as a router
does, and reads the times inside the workers from their traces.
"""
