"""The transfer process: sockets, checksums and deadlines; no torch, no tensor.

Its life:

1. The service process starts it. With eight cores or more it forks `movers`. It sends Ready with its port.
2. `tcp` opens and accepts sessions of `lane`s. Each begins with a `handshake`. Movers get all but the first.
3. `prefill_side` and `decode_side` give what arrives to the state machines of `kv_transfer.protocol`.
4. It ends when the service closes its socket. Sessions say so to their peers.
"""
