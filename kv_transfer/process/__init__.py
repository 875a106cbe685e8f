"""The transfer process: sockets, checksums and deadlines; no torch, no tensor.

Its life:

1. The service process starts it with two arenas, a channel to the engine for each, and a channel to itself.
2. With eight cores or more it forks `movers`. It sends Ready with its port.
3. `tcp` opens and accepts sessions of `lane`s. Each lane begins with a `handshake`. Movers get all lanes but
   the first.
4. `prefill_side` and `decode_side` give what arrives to the state machines of `kv_transfer.protocol`, one
   side for each direction.
5. Drain lets transfers finish. Then the process ends.
"""
