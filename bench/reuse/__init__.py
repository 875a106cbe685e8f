"""What it gains to reuse KV: `python -m baton.bench.reuse`.

`__main__` measures the second turn of one chat between two workers, `tiers` the host tier of one worker.
"""
