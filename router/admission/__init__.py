"""Which requests the router accepts, and when they go to the workers.

1. `keys` identifies the client by its API key.
2. `account` limits what one key may use. `queue` refuses a request if too many prompt tokens wait.
3. An accepted generation waits in the `queue` until the workers have free capacity. `fairness` decides which
   generation is next. `drain_rate` estimates when a refused client should try again.
4. A generation that cannot go on without a worker, or without `retry_budget`, is `parked` outside the queue.
"""
