"""`load` is `baton bench`, the load test that users run. `lab` has the benches of Baton itself: `python -m
baton.bench.NAME`, from a clone. Both write a `report`. README.md lists them."""

from pathlib import Path

# `python -m baton.bench.kv` runs lab/kv. The wheel has no lab. Code imports `baton.bench.lab.kv`.
__path__.append(str(Path(__file__).with_name("lab")))
