"""Options of `baton serve`: the pools, and where their workers run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import typer
from typer.models import OptionInfo

from baton.cluster.options.declare import between, opt
from baton.cluster.options.engine import TtitTarget


class PoolSize(NamedTuple):
    """The size of a pool: `2`, or `1:4` for a pool that grows and shrinks with its load."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: object, fewest: int = 1) -> PoolSize:
        """Parses the value of a flag. `fewest`: 0 for a pool that may be left out with `0`.

        Raises typer.BadParameter for another form.
        """
        if isinstance(value, PoolSize):
            return value
        words = str(value).split(":")
        try:
            least, most = int(words[0]), int(words[-1])
        except ValueError:
            least = most = -1
        if 0 <= most < least and len(words) == 2:
            raise typer.BadParameter(f"{value} begins above its end; write {most}:{least}.")
        # A range begins at 1: a pool with no worker reports no load, so it would never grow.
        if not (1 if least < most else fewest) <= least <= most or len(words) > 2:
            raise typer.BadParameter(f"{value} is neither a number of workers (2) nor a range (1:4).")
        return cls(least, most)

    @classmethod
    def parse_or_none(cls, value: object) -> PoolSize:
        return cls.parse(value, fewest=0)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


ONE = PoolSize(1, 1)


def pool_size(text: str, parser: Callable[[object], PoolSize] = PoolSize.parse) -> OptionInfo:
    return opt(text, "N or MIN:MAX", shown="1", parser=parser)


@dataclass(frozen=True)
class PoolOptions:
    """The sizes of the pools and the targets of the autoscaler."""

    panel: ClassVar[str] = "Cluster"
    prefill: Annotated[
        PoolSize,
        pool_size(
            "Prefill workers; 1:4 follows the load, and with 0 decode workers compute all prompts.",
            PoolSize.parse_or_none,
        ),
    ] = ONE
    decode: Annotated[PoolSize, pool_size("Decode workers; 1:4 follows the load.")] = ONE
    prefill_tensor_parallel_size: Annotated[
        int | None,
        opt("GPUs of one prefill worker.", "N", shown="as --tensor-parallel-size", check=between(1)),
    ] = None
    decode_tensor_parallel_size: Annotated[
        int | None,
        opt("GPUs of one decode worker.", "N", shown="as --tensor-parallel-size", check=between(1)),
    ] = None
    prefill_kv_cache_dtype: Annotated[
        Literal["auto", "fp8"] | None,
        opt("KV cache of prefill workers; KV is converted on its way.", shown="as --kv-cache-dtype"),
    ] = None
    decode_kv_cache_dtype: Annotated[
        Literal["auto", "fp8"] | None,
        opt("KV cache of decode workers; KV is converted on its way.", shown="as --kv-cache-dtype"),
    ] = None
    ttft_target: Annotated[
        float, opt("Target time to first token. The prefill pool grows to meet it.", "MS", check=between(1))
    ] = 1000.0
    ttit_target: TtitTarget = None
    shrink_after: Annotated[
        float, opt("A pool shrinks after this time with a worker too many.", "S", check=between(5))
    ] = 60.0


@dataclass(frozen=True)
class StartOptions:
    panel: ClassVar[str] = "Cluster"
    timings: Annotated[bool, opt("Show the duration of each stage of the start, up to a first token.")] = (
        False
    )


@dataclass(frozen=True)
class StopOptions:
    panel: ClassVar[str] = "Cluster"
    routers: Annotated[
        bool,
        opt("Drain and stop only the routers. `baton serve` with the same flags starts new ones."),
    ] = False


@dataclass(frozen=True)
class RayOptions:
    panel: ClassVar[str] = "Cluster"
    placement: Annotated[
        Literal["spread", "pack", "pair"],
        opt(
            "With --ray-address. spread: use the emptiest machine; pack: fill a machine to half, then the "
            "next; pair: prefill I and decode I on one machine.",
        ),
    ] = "spread"
    prefill_nodes: Annotated[
        list[str], opt("With --ray-address: prefill workers only on nodes with this label.", "KEY=VALUE")
    ] = field(default_factory=list)
    decode_nodes: Annotated[
        list[str], opt("With --ray-address: decode workers only on nodes with this label.", "KEY=VALUE")
    ] = field(default_factory=list)
    ray_address: Annotated[
        str | None,
        opt(
            "Start the roles on this Ray cluster, where they outlive this command.",
            "HOST:PORT",
            shown="none: on this machine, until this command ends",
        ),
    ] = None
