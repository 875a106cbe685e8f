"""Starts and supervises a cluster. One command runs the whole cluster; other commands run one role each.

Life of a cluster (`baton serve`):

1. `cli` turns flags, `BATON_*` variables and a TOML file into option groups (`options`).
   `model` finds and verifies the model before any process starts.
2. `supervision.rundir` makes a private directory for all files of the cluster.
3. `serve` makes one `supervision.runner` per worker and router in its process. With `--ray-address`,
   `on_ray.actors` makes one Ray actor per role, which is a runner; `on_ray.placement` chooses the machine.
4. Each runner is a `role_process`. It runs the command that a user would type (`baton prefill …`) as a
   child. The child reports its progress and its addresses over a pipe.
5. A child that dies, or that gives no answer (`calls`), restarts as a new incarnation after a growing delay.
6. `supervisor` follows all roles and keeps the registry of workers. It gives every router the list of
   workers, and a report of all roles for `baton status`.
7. `autoscaling.autoscaler` polls the load of each worker. As `balancer` decides, it moves a worker to the
   other pool, or the supervisor starts or drains one. `tools.flip` moves a worker by hand.
8. On Ctrl-C or SIGTERM, `serve` stops the routers, then the workers. It waits until every descendant has
   ended (`processes`) and removes the run directory.
9. If `serve` itself is killed, its roles die with it, and a janitor (`rundir`) removes the directory.

On Kubernetes without Ray, `discovery` tells a router the addresses of the workers. `tools` has the commands
for a cluster that runs.

Tokens and KV never pass through this package. `ray` and `kubernetes` are imported only where they are used:
`baton router`, `baton prefill` and `baton decode` run without them.
"""
