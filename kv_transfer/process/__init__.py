"""The transfer process: sockets, checksums and deadlines; no torch, no tensor.

Its life: the worker starts it with a channel to its engine, the arena and a socket to itself; where there are
cores it forks `movers`; it says Ready with its port; `tcp` opens and accepts sessions of `lane`s, each behind
a `handshake`, and hands all but the first to movers; `prefill_side` or `decode_side` drives the machines of
`kv_transfer.protocol` with what arrives; Drain lets what runs finish, and it ends.
"""
