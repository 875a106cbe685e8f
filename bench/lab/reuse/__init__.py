"""What it gains to reuse KV: `python -m baton.bench.reuse`.

`__main__` measures the second turn of one chat between two workers. What a host or disk tier gains shows
`baton bench run` with `--prefix-groups` whose prefixes need more than the KV blocks.
"""
