"""The workers that a router knows.

1. `discovery` yields the addresses of the workers.
2. The `pool` keeps a `connection` to each address: a gRPC stream that reconnects, with the open `attempts`.
   A `send_queue` bounds the messages to one worker.
3. `fit` refuses a worker of another model; `refusal` words the reason. `reports` checks what a worker sends.
4. `candidates` gives the routing policies the workers that take work. `cache_sequence` detects gaps in the
   reports of their prefix caches.
5. A circuit `breaker` keeps requests away from a worker that fails repeatedly.

`ask` gets the model from the workers before a router without `--model` starts.
"""
