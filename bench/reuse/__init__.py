"""What it gains to reuse KV: `python -m baton.bench.reuse`.

`__main__` measures the second turn of one chat between two workers. With `--trace` it replays a trace of
chats through clusters that reuse more and more (`replay`). `chats` reads or makes the trace, and writes the
prompts.
"""
