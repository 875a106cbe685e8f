"""One command runs the whole cluster, and each role alone.

Life of a cluster (`baton serve`):

1. `cli` turns flags, `BATON_*` variables and a TOML file into option groups (`options`, `parameters`);
   `model` finds and verifies the model before anything starts.
2. `rundir` makes a private directory that holds everything the cluster leaves on disk.
3. `local` makes one `runner` per worker and router in the process of `serve`. With `--ray-address`,
   `actors` makes one Ray actor for each, with a runner in it, where `placement` says.
4. Each runner has one `role_process`: exactly the command that a user would type (`baton prefill …`),
   as a child that reports its progress and its addresses over a pipe, and is started again, as a new
   incarnation, when it dies or no longer answers (`backoff` says when, `health` asks).
5. `supervisor` follows all of them, keeps the registry, and gives every router the list of workers, and a
   report of all roles for `status`.
6. `autoscaler` asks the workers for their loads and has the supervisor resize pools as `scaling` says.
7. On Ctrl-C or SIGTERM `serve` stops routers, then workers, waits until the last process of the tree is
   gone (`processes`), and removes the run directory. If serve itself is killed, its roles die with it, and
   `janitor` removes the directory.

On Kubernetes without Ray, `kubernetes_discovery` tells a router which workers there are.

`doctor` finds what is wrong, `top` shows what happens, `sizing` says how many workers a load needs.

Tokens and KV never pass through here. `ray` and `kubernetes` are imported only where they are used, so that
`baton router`, `baton prefill` and `baton decode` run without them.
"""
