"""The command `baton`. Each command imports its heavy modules itself, so that `--help` stays fast."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from baton.cluster.options import clients, engine, pools, roles
from baton.cluster.options.command import Command
from baton.cluster.options.parameters import takes_options
from baton.cluster.supervision.blueprint import Blueprint
from baton.processes.limits import raise_descriptor_limit

app = typer.Typer(
    name="baton",
    help="Disaggregated LLM inference: prefill and decode on different workers, KV streamed between them.\n\n"
    "[bold]baton serve[/bold] runs a whole cluster on this machine; [bold]baton chat[/bold] talks to it. "
    "To run each role on its own machine, use the commands under 'One role alone'.\n\n"
    "Give an option as a flag (--max-model-len 4096), in the environment (BATON_MAX_MODEL_LEN=4096), "
    "or in a TOML file named by --config (max-model-len = 4096). The first of these wins.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(flag: bool) -> None:
    if flag:
        from baton import version

        typer.echo(f"baton {version()}")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    raise_descriptor_limit()


CLUSTER, ROLES, CLIENTS = "A whole cluster", "One role alone", "Talk to a cluster"


def command(panel: str, *examples: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a command whose parameters are option groups. `panel` is its section in `baton --help`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        run = takes_options(function)
        epilog = "\n".join(examples)
        registered = app.command(
            function.__name__.replace("_", "-"), cls=Command, rich_help_panel=panel, epilog=epilog
        )
        registered(run)
        return function

    return register


@command(
    CLUSTER,
    "baton serve",
    "baton serve --port 8123 --dtype float32",
    "baton serve Qwen/Qwen2.5-0.5B-Instruct --prefill 1 --decode 2",
    "baton serve --config cluster.toml",
)
def serve(argument: engine.ServedModel, blueprint: Blueprint) -> int:
    """Start a cluster on this machine: prefill workers, decode workers and a router.

    By default it serves the embedded model SmolLM2-135M-Instruct at http://127.0.0.1:8000, with workers on
    all free GPUs, or with one worker of each role on a CPU. Ctrl-C stops every process and removes all
    temporary files; a second Ctrl-C kills them at once. SIGTERM lets running requests finish first. SIGUSR1
    restarts the workers one after the other, and fails no request.
    """
    from baton.cluster.serve import run

    if argument.model_argument is not None:
        blueprint = replace(blueprint, model=replace(blueprint.model, model=argument.model_argument))
    return run(blueprint)


@command(CLUSTER, "baton stop --ray-address 10.0.0.1:6379")
def stop(ray: pools.RayOptions, scope: pools.StopOptions) -> int:
    """Stop a cluster that was started with --ray-address. (A local one stops with Ctrl-C.)"""
    from baton.cluster.on_ray import joined

    if ray.ray_address is None:
        raise ValueError(
            "--ray-address: required, it names the cluster; to stop a local cluster, press Ctrl-C in its "
            "`baton serve`"
        )
    return joined.stop(ray.ray_address, routers_only=scope.routers)


@command(
    CLUSTER,
    "baton restart",
    "baton restart --ray-address 10.0.0.1:6379",
    "baton restart --engine decode-0",
)
def restart(
    target: clients.RestartOptions,
    ray: pools.RayOptions,
    endpoint: clients.EndpointOptions,
    secret: roles.SecretOptions,
    local: clients.LocalOptions,
) -> int:
    """Restart the workers of a cluster, one after the other, without a failed request.

    The cluster is that of a `baton serve` of yours on this machine, with its router at --url, or the one on
    Ray. Each worker drains first. The next worker follows when the restarted one serves again. The command
    ends when all of them do.

    With --engine no worker drains. Its engine process ends between two steps, and another one goes on with
    its requests and their KV: clients see a pause.
    """
    if target.engines:
        from baton.cluster.tools.restart import restart_engines

        return restart_engines(target.worker, endpoint, secret, local)
    if target.worker is not None:
        raise ValueError(f"{target.worker}: one worker alone restarts only its engine process; add --engine")
    if ray.ray_address is not None:
        from baton.cluster.on_ray import joined

        return joined.restart(ray.ray_address)
    from baton.cluster.tools.restart import run

    return run(endpoint, local)


@command(
    ROLES,
    "baton router --worker 10.0.0.5:7001 --worker 10.0.0.6:7001 --host 0.0.0.0",
    "baton router --workers-file /etc/baton/workers",
)
def router(router: roles.RouterRole) -> int:
    """Run a router: the OpenAI API in front of the given workers."""
    from baton.cluster.roles import run_router

    return run_router(router)


@command(ROLES, "BATON_CLUSTER_SECRET=$(cat secret) baton prefill --host 10.0.0.5 --port 7001 --kv-port 7002")
def prefill(worker: roles.WorkerRole) -> int:
    """Run a prefill worker: it computes prompts and streams their KV to decode workers."""
    from baton.cluster.roles import run_worker

    return run_worker("prefill", worker)


@command(ROLES, "BATON_CLUSTER_SECRET=$(cat secret) baton decode --host 10.0.0.6 --port 7001")
def decode(worker: roles.WorkerRole) -> int:
    """Run a decode worker: it receives the KV of a prompt and generates every token after the first."""
    from baton.cluster.roles import run_worker

    return run_worker("decode", worker)


@command(ROLES, "BATON_CLUSTER_SECRET=$(cat secret) baton encode --host 10.0.0.7 --port 7001 --kv-port 7002")
def encode(worker: roles.WorkerRole) -> int:
    """Run an encoder: it makes embeddings of images for workers with --advanced.encoder-pool."""
    from baton.cluster.roles import run_worker

    return run_worker("encode", worker)


@command(
    ROLES,
    "baton store serve --host 10.0.0.7 --size 64GiB",
    "baton store serve --host 10.0.0.8 --size 64GiB --kv-store mooncake://10.0.0.7:50051",
    "baton store clear --kv-store mooncake://10.0.0.7:50051 --cluster-secret-file secret "
    "--advanced.tenant alice --api-key-file keys.toml",
)
def store(flags: roles.StoreRole) -> int:
    """Run a store for KV that outlives workers (--kv-store), or clear it.

    It has a master, which knows where objects are, and processes that give memory. One command may run both.
    The store has no authentication: keep its ports in a network of workers alone.
    """
    from baton.cluster.store import run

    return run(flags)


@command(
    ROLES,
    "baton picker --router 10.0.0.5:8000 --router 10.0.0.6:8000 --host 0.0.0.0",
    "baton picker --kubernetes-service baton --advanced.router-metrics-port 8002 --host ::",
)
def picker(picker: roles.PickerRole) -> int:
    """Run an endpoint picker: it tells a gateway to which router each request should go.

    For gateways with the inference extension of the Kubernetes Gateway API, and for Envoy's ext_proc filter.
    """
    from baton.cluster.roles import run_picker

    return run_picker(picker)


@command(
    CLIENTS,
    "baton status",
    "baton status --json --url http://10.0.0.5:8000",
    "baton status --worker 10.0.0.6:7001 --worker 10.0.0.7:7001 --cluster-secret-file secret",
)
def status(
    endpoint: clients.EndpointOptions,
    output: clients.JsonOptions,
    options: clients.StatusOptions,
    secret: roles.SecretOptions,
    local: clients.LocalOptions,
) -> int:
    """Show the workers of a cluster: pool, state, load, KV use.

    Below the table: how requests went through the workers, what is wrong, the last failures, and the remedy.
    The exit code is 1 while a pool has no ready worker, or a worker of --worker does not answer.
    """
    from baton.cluster.tools.status import run

    return run(endpoint, output, options, secret, local)


@command(
    CLIENTS,
    "baton flip decode-1 prefill",
    "baton flip 10.0.0.6:7001 decode --url http://10.0.0.5:8000 --cluster-secret-file secret",
)
def flip(
    flip: clients.FlipOptions,
    endpoint: clients.EndpointOptions,
    secret: roles.SecretOptions,
    local: clients.LocalOptions,
) -> int:
    """Move a worker to the other pool: routers then send it prompts (prefill) or generations (decode).

    Every worker can do both, so nothing is loaded or interrupted: what runs on the worker goes on to its end.
    The worker keeps its name. When it restarts, it is in the pool of its name again.
    """
    from baton.cluster.tools.flip import run

    return run(flip, endpoint, secret, local)


@command(
    CLIENTS,
    "baton weights /checkpoints/step-200",
    "baton weights /checkpoints/step-200 --url http://10.0.0.5:8000 --cluster-secret-file secret",
)
def weights(
    weights: clients.WeightsOptions,
    endpoint: clients.EndpointOptions,
    secret: roles.SecretOptions,
    local: clients.LocalOptions,
) -> int:
    """Replace the weights of all workers while they run, as a trainer does between rollouts.

    The workers read and check the new weights beside their work. If one finds a fault, nothing changes. Else
    their requests pause, and go on with the new weights.

    The model must be the same but for the values of its tensors. A worker that starts later gets the same
    weights from the same path, before it serves: keep them there until the next ones.
    """
    from baton.cluster.tools.weights import run

    return run(weights, endpoint, secret, local)


@command(CLIENTS, "baton top", "baton top --url http://10.0.0.5:8000 | cat")
def top(endpoint: clients.EndpointOptions, top: clients.TopOptions) -> int:
    """Watch a cluster: load, KV use, latencies, transfers, restarts. Press Ctrl-C to leave.

    Rates and latencies cover the time between two samples. A dash means that there was nothing to measure.
    In a pipe it prints one frame and ends.
    """
    from baton.cluster.tools.top import run

    return run(endpoint, top)


@command(
    CLIENTS,
    "baton doctor",
    "baton doctor --url http://10.0.0.5:8000",
)
def doctor(
    doctor: clients.DoctorOptions, endpoint: clients.DoctorEndpointOptions, output: clients.JsonOptions
) -> int:
    """Find problems and their remedies, on this machine or in a running cluster.

    The exit code is 1 when a check fails. Warnings do not change the exit code.
    """
    from baton.cluster.tools.doctor.command import run

    return run(doctor, endpoint, output)


@command(
    CLIENTS,
    "baton plan --rate 40 --input-len 2000 --output-len 150 --slo ttft=500,itl=20",
    "baton plan --agents 48 --prefill 1 --decode 1",
    "baton plan --model Qwen/Qwen3-14B --measured engine.json --gpu-memory 80GiB",
)
def plan(sizing: clients.SizingOptions) -> int:
    """Compute how many prefill and decode workers a load needs, from measured speeds and a simulation."""
    from baton.cluster.tools.sizing.command import run

    return run(sizing)


@command(CLIENTS, "baton chat", 'baton chat "Name three rivers." --temperature 0')
def chat(endpoint: clients.EndpointOptions, chat: clients.ChatOptions) -> int:
    """Chat in the terminal, or ask one question. Shows the time to the first token and tokens per second.

    Ctrl-C interrupts an answer. Ctrl-D ends the chat.
    """
    from baton.cluster.tools.chat import run

    return run(endpoint, chat)


@command(CLIENTS, "baton run-batch -i requests.jsonl -o responses.jsonl --url http://10.0.0.5:8000")
def run_batch(endpoint: clients.EndpointOptions, batch: clients.RunBatchOptions) -> int:
    """Send the requests of a file, and write their responses: OpenAI's batch form.

    A request that the server has no room for is sent again. The exit code is 1 if a request failed.
    """
    from baton.cluster.tools.run_batch import run

    return run(endpoint, batch)


BENCH = "baton.bench.load.cli"
"""A package above this one, which knows it by name only."""


class _BenchGroup(TyperGroup):
    """The commands of `BENCH`, which is imported when one of them is asked for."""

    @cached_property
    def _group(self) -> TyperGroup:
        group = typer.main.get_command(import_module(BENCH).app)
        assert isinstance(group, TyperGroup)
        return group

    def list_commands(self, ctx: Any) -> list[str]:
        return self._group.list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._group.get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return self._group.resolve_command(ctx, args)  # it names the command that was meant

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._group.format_help(ctx, formatter)


app.add_typer(
    typer.Typer(cls=_BenchGroup, no_args_is_help=True),
    name="bench",
    help="Load-test any OpenAI-compatible endpoint; see `baton bench --help`.",
    rich_help_panel=CLIENTS,
)


def main() -> None:
    try:
        try:
            sys.exit(app())
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # typer handles it only while the command runs, not while it parses
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it once more at its end
        if error.errno != errno.EPIPE:
            file = error.filename or "the output"  # a write does not know its file
            remedy = "it is not complete; free space there, or write elsewhere"
            typer.secho(f"Error: {file} cannot be written: {error.strerror}; {remedy}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
