"""Which requests the router accepts, and when they go to the workers.

1. `keys` identifies the client by its API key, and limits what one key may use.
2. `entry` admits a request and counts its body. One that would wait too long (`expected_wait`) is refused,
   and told when to try again.
3. An accepted generation waits in the `queue` until the workers have free capacity. `fairness` decides which
   generation is next.
4. A generation that cannot go on without a worker, or without retry budget, is `parked` outside the queue.
"""
