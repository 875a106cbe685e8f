"""The workers that a router knows.

1. `discovery` yields the addresses of the workers.
2. The `pool` keeps a `connection` to each address: a gRPC stream that reconnects, with the open `attempts`.
   A `send_queue` bounds the messages to one worker.
3. `checks` refuses a worker of another model, and says what the router believes of the reports of a worker.
4. `candidates` gives the routing policies the workers that take work.
5. A circuit breaker (`attempts`) keeps requests away from a worker that fails repeatedly.

`ask` gets the model from the workers before a router without `--model` starts.
"""
