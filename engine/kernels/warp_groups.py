"""Barriers and tiles in shared memory, for kernels in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def clear(tile, rows, LAYOUT: gl.constexpr, WIDTH: gl.constexpr):
    """Clears a tile of values from this row on: those slots may hold NaN, which a weight of 0 would not
    remove. LAYOUT: of WIDTH columns."""
    inside = (gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT)) < rows)[:, None]
    for i in gl.static_range(tile.shape[1] // WIDTH):
        columns = tile.slice(i * WIDTH, WIDTH, dim=1)
        part = columns.load(LAYOUT)
        columns.store(gl.where(inside, part, gl.zeros_like(part)))
    fence_async_shared()
