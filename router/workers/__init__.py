"""The workers that a router knows.

1. `router.discovery` yields the addresses of the workers.
2. The `pool` keeps a `stream` to each address, which is opened again whenever it ends.
3. A `worker` is what the router knows of one worker, with the open attempts and the messages to it.
4. `checks` refuses a worker of another model, and says what the router believes of the reports of a worker.
5. The `roster` and the connections tell `policy.desk` what happens. It has the tables and makes plans.
6. A circuit `breaker` keeps requests away from a worker that fails repeatedly.
"""
