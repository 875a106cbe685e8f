"""Options of `baton serve`: the pools, and where their workers run."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import typer

from baton.cluster.options.parameters import advanced, between, opt


class PoolSize(NamedTuple):
    """The size of a pool: `2`, or `1:4` for a pool that grows and shrinks with its load."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: object, fewest: int = 1) -> Self:
        """Parses the value of a flag. `fewest`: 0 for a pool that may be left out with `0`.

        Raises typer.BadParameter for another form.
        """
        if isinstance(value, cls):
            return value
        words = str(value).split(":")
        try:
            least, most = int(words[0]), int(words[-1])
        except ValueError:
            least = most = -1
        if 0 <= most < least and len(words) == 2:
            raise typer.BadParameter(f"{value} begins above its end; write {most}:{least}.")
        if len(words) > 2 or min(least, most) < 0:
            raise typer.BadParameter(f"{value} is neither a number of workers (2) nor a range (1:4).")
        # A range begins at 1: a pool with no worker reports no load, so it would never grow.
        if least < (1 if least < most else fewest):
            raise typer.BadParameter(f"{value}: this pool needs at least one worker, as in 1 or 1:4.")
        return cls(least, most)

    @classmethod
    def parse_or_none(cls, value: object) -> Self:
        return cls.parse(value, fewest=0)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


_SIZE: dict[str, Any] = {
    "metavar": "N or MIN:MAX",
    "shown": "for all free GPUs; else 1",
}
_ONE = PoolSize(1, 1)


@dataclass(frozen=True)
class PoolOptions:
    """The sizes of the pools and the targets of the autoscaler."""

    panel: ClassVar[str] = "Cluster"
    prefill: PoolSize | None = opt(
        None,
        "Prefill workers; 1:4 follows the load, and with 0 decode workers compute all prompts.",
        parser=PoolSize.parse_or_none,
        **_SIZE,
    )
    decode: PoolSize | None = opt(
        None, "Decode workers; 1:4 follows the load.", parser=PoolSize.parse, **_SIZE
    )
    encode: int = opt(
        0,
        "Encoders of images, as workers of their own, with a GPU each. 0: each worker encodes the images of "
        "its prompts.",
        "N",
        check=between(0),
    )
    prefill_tensor_parallel_size: int | None = opt(
        None, "GPUs of one prefill worker.", "N", shown="as --tensor-parallel-size", check=between(1)
    )
    decode_tensor_parallel_size: int | None = opt(
        None, "GPUs of one decode worker.", "N", shown="as --tensor-parallel-size", check=between(1)
    )
    prefill_kv_cache_dtype: Literal["auto", "fp8"] | None = advanced(
        None, "KV cache of prefill workers; KV is converted on its way.", shown="as --kv-cache-dtype"
    )
    decode_kv_cache_dtype: Literal["auto", "fp8"] | None = advanced(
        None, "KV cache of decode workers; KV is converted on its way.", shown="as --kv-cache-dtype"
    )
    shrink_after: float = advanced(
        60.0, "A pool shrinks after this time with a worker too many.", "S", check=between(5)
    )

    @property
    def sizes(self) -> tuple[PoolSize, PoolSize]:
        """Of the prefill pool and of the decode pool. A pool that is not given has one worker."""
        return self.prefill or _ONE, self.decode or _ONE


@dataclass(frozen=True)
class StopOptions:
    panel: ClassVar[str] = "Cluster"
    routers: bool = opt(
        False, "Drain and stop only the routers. `baton serve` with the same flags starts new ones."
    )


@dataclass(frozen=True)
class RayOptions:
    panel: ClassVar[str] = "Cluster"
    placement: Literal["spread", "pack", "pair"] = advanced(
        "spread",
        "With --ray-address. spread: use the emptiest machine; pack: fill a machine to half, then the "
        "next; pair: prefill I and decode I on one machine.",
    )
    prefill_nodes: list[str] = advanced(
        [], "With --ray-address: prefill workers only on nodes with this label.", "KEY=VALUE"
    )
    decode_nodes: list[str] = advanced(
        [], "With --ray-address: decode workers only on nodes with this label.", "KEY=VALUE"
    )
    ray_address: str | None = opt(
        None,
        "Start the roles on this Ray cluster, where they outlive this command.",
        "HOST:PORT",
        shown="none: on this machine, until this command ends",
    )
