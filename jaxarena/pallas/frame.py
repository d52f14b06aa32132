"""What all matrix products share: the walk over output tiles, the pipeline that feeds them, and the way results go out.

A launch has one block (or one cluster of two) a multiprocessor, and each walks over its share of the output tiles. The last warpgroup of
a block only starts copies: for every panel of the contracted axis one **stage** of operands, ``stages`` of them ahead, over the ends
of tiles, so that the next tile's operands arrive while this one's results go out. The other warpgroups each own some rows of the tile.

**Order.** Tiles go in bands of ``group`` tile rows, down before across, so that the blocks that run at one time share rows and columns
in the second-level cache. With a cluster the two blocks take neighbouring tiles, down (``cluster_m``) or across (``cluster_n``),
and what both need is copied once for both.

**Rows.** The last tile of a matrix in the arena starts as far down as fits, so that nothing past the matrix is read, which other blocks
may be writing; rows that belong to the tile before are computed and not stored. A matrix with fewer rows than a tile is read past its
end all the same: what comes from there stays in rows that are not stored.

**Results** leave as bf16 or float32 in pieces of 64 rows and 64, 32 or 16 columns; of an incomplete piece, 8 rows at a time.

A compute warpgroup frees a stage with an arrival that the copying warpgroup waits for before it fills the stage again; at the end it
waits for all, for a block of a cluster must not leave while its partner still has an arrival to make there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas.operands import Matrix, Place, unpack
from jaxarena.pallas.tiles import tile, viewed, write_bytes

__all__ = ["Operands", "Shape", "Steps", "TileConfig", "launch_product"]

_REGISTERS = {1: None, 2: (40, 232), 3: (24, 160)}
"""By compute warpgroups: registers a thread of the copying warpgroup and of the others, out of 65536 a multiprocessor; None: enough."""


@dataclass(frozen=True)
class TileConfig:
    """How a product is cut up.

    Attributes:
      tile_m: rows of an output tile, ``64 * warpgroups`` or twice that.
      tile_n: columns of an output tile: 64, 128 or 256.
      warpgroups: compute warpgroups, 1 to 3.
      stages: operand panels in flight.
      cluster_m: 2 for clusters of two tiles below each other, which share the weight's tile.
      cluster_n: 2 for clusters of two tiles beside each other, which share the rows' tile.
      group: tile rows of a band.
      in_turn: whether the warpgroups start their products in a fixed order, so that one computes while another adds up.
      piece: columns of a piece of the result, 16, 32 or 64; the fewer, the less shared memory. A piece's rows have 64 or 128 bytes, so bf16
        takes 32 or 64, float32 16 or 32.
      buffers: pieces a warpgroup has on their way out, or in work.
      together: panels whose products a warpgroup starts before it adds up the first, at most ``stages``; more hide the latency of short
        products and need an accumulator each.

    Raises:
      ValueError: for a field outside what its line says.
    """

    tile_m: int
    tile_n: int
    warpgroups: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 8
    in_turn: bool = False
    piece: int = 64
    buffers: int = 1
    together: int = 1

    def __post_init__(self) -> None:
        supported: dict[str, Sequence[int]] = {
            "warpgroups": tuple(_REGISTERS),
            "tile_m": (64 * self.warpgroups, 128 * self.warpgroups),
            "tile_n": (64, 128, 256),
            "cluster_m": (1, 2),
            "cluster_n": (1, 2),
            "piece": (16, 32, 64),
        }
        for name, values in supported.items():
            if getattr(self, name) not in values:
                raise ValueError(f"TileConfig: {name} must be one of {', '.join(map(str, values))}, got {getattr(self, name)}")
        for name in ("stages", "group", "buffers"):
            if getattr(self, name) < 1:
                raise ValueError(f"TileConfig: {name} must be at least 1, got {getattr(self, name)}")
        if self.tile_n // self.piece % self.buffers:
            raise ValueError(
                f"TileConfig: buffers must be a divisor of the {self.tile_n // self.piece} pieces of a row of tile_n, got {self.buffers}"
            )
        if not 1 <= self.together <= self.stages:
            raise ValueError(f"TileConfig: together must be 1 to stages = {self.stages}, got {self.together}")
        if self.cluster_m * self.cluster_n > 2:
            raise ValueError("TileConfig: cluster_m and cluster_n must not both be 2")

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup owns."""
        return self.tile_m // self.warpgroups

    def used(self, m: int, n: int, multiprocessors: int) -> float:
        """The share of a launch's work that is not idle multiprocessors in the last round of tiles, or tiles past the result."""
        cluster = self.cluster_m * self.cluster_n
        tiles = -(-m // (self.tile_m * self.cluster_m)) * -(-n // (self.tile_n * self.cluster_n))
        clusters = multiprocessors // cluster
        return m * n / (-(-tiles // clusters) * clusters * cluster * self.tile_m * self.tile_n)


@dataclass(frozen=True)
class Shape:
    """A product of ``[m, k]`` rows and an ``[n, k]`` weight.

    ``panels`` counts the stages of a tile: each has 128 bytes of every row, and together they cover k (once for every word of a value).
    """

    m: int
    n: int
    panels: int


class Operands(Protocol):
    """The operands of one family of products, made in the kernel from their refs."""

    def copy(self, stage: Any, slot: Any, row: Any, column: Any, panel: Any, barrier: Any) -> None:
        """Starts the copies of a panel of the tile at (row, column) into ``slot`` of the stage's scratch."""

    def compute(self, stage: Any, steps: Steps, row: Any, column: Any) -> list[list[jax.Array]]:
        """The tile's results for the calling warpgroup: for each of its 64 rows, the pieces of 64 columns from left to right."""


@dataclass(frozen=True)
class Steps:
    """A compute warpgroup's side of the pipeline for one tile; ``first`` counts the stages used before it."""

    config: TileConfig
    first: Any
    full: Any
    empty: Any
    turn: Any
    warpgroup: Any
    interpret: bool

    def slot(self, panel: Any) -> Any:
        return lax.rem(self.first + panel, jnp.int32(self.config.stages))

    def wait(self, panel: Any) -> Any:
        """Waits for a panel's operands and returns their slot."""
        slot = self.slot(panel)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, panel: Any) -> None:
        """Lets a panel's slot be filled again."""
        if self.interpret:
            plgpu.commit_smem()  # interpret mode orders ordinary reads before a later copy only so
        plgpu.barrier_arrive(self.empty.at[self.slot(panel)])

    def start_in_turn(self, start: Callable[[], jax.Array]) -> jax.Array:
        """Starts a product once it is this warpgroup's turn, and passes the turn on."""
        if not self.config.in_turn:
            return start()
        plgpu.barrier_wait(self.turn.at[self.warpgroup])
        started = start()
        plgpu.barrier_arrive(self.turn.at[lax.rem(self.warpgroup + 1, jnp.int32(self.config.warpgroups))])
        return started


def launch_product(
    make: Callable[[Sequence[Any], Sequence[Place | None]], Operands],
    arena: Any,
    inputs: Sequence[Any],
    stage: Any,
    *,
    arrivals: int,
    offsets: jax.Array,
    in_arena: Sequence[bool],
    shape: Shape,
    config: TileConfig,
    multiprocessors: int,
    interpret: bool,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array | None:
    """Runs a product.

    Args:
      make: from the refs of ``inputs`` and the places of the operands to the operands.
      arena: the arena's ref, or None when nothing lies there.
      inputs: the arrays that the kernel reads, in the order in which ``make`` takes their refs.
      stage: scratch types of the pipeline's stages.
      arrivals: copies a panel.
      offsets: the packed places: of the operands, and last of the result.
      in_arena: which of them are places.
      shape: sizes; in the arena ``m`` counts rows with pads.
      config: how the product is cut up.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel.
      out_dtype: of the result, bfloat16 or float32.

    Returns:
      The result, ``[m, n]``; None when it lies in the arena.
    """
    c = config
    tiles_m, tiles_n = -(-shape.m // (c.tile_m * c.cluster_m)), -(-shape.n // (c.tile_n * c.cluster_n))
    tiles = tiles_m * tiles_n
    clusters = min(multiprocessors // (c.cluster_m * c.cluster_n), tiles)
    axes = tuple(name for name, size in (("below", c.cluster_m), ("beside", c.cluster_n)) if size > 1)
    *operands_in_arena, out_in_arena = in_arena
    # The last tile starts further up only where reading past the end would leave the matrix.
    last_start = max(shape.m - c.tile_m, 0) if operands_in_arena[0] else None

    def body(offsets_gmem: Any, *refs: Any) -> None:
        input_refs, refs = refs[: len(inputs)], refs[len(inputs) :]
        out_gmem = arena if out_in_arena else refs[0]
        stage_smem, out_smem, full, empty, turn = refs[0 if out_in_arena else 1 :]
        places = [unpack(offsets_gmem, i) if inside else None for i, inside in enumerate(in_arena)]
        operands = make(input_refs, places[:-1])
        out = Matrix(out_gmem, places[-1])
        warpgroup, cluster = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        below = lax.axis_index("below") if c.cluster_m > 1 else 0
        beside = lax.axis_index("beside") if c.cluster_n > 1 else 0
        mine = lax.div(tiles - cluster + clusters - 1, jnp.int32(clusters))

        def tile_at(turn_number: Any) -> tuple[Any, Any]:
            index = cluster + turn_number * clusters
            band = lax.div(index, jnp.int32(c.group * tiles_n))
            within = index - band * (c.group * tiles_n)
            height = jnp.minimum(c.group, tiles_m - band * c.group)
            down, across = band * c.group + lax.rem(within, height), lax.div(within, height)
            return (down * c.cluster_m + below) * c.tile_m, (across * c.cluster_n + beside) * c.tile_n

        def start_row(row: Any) -> Any:
            return row if last_start is None else jnp.minimum(row, last_start)

        registers = _REGISTERS[c.warpgroups]

        @pl.when(warpgroup == c.warpgroups)
        def _() -> None:
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")

            def fill(turn_number: Any, used: Any) -> Any:
                row, column = tile_at(turn_number)

                def one(panel: Any, used: Any) -> Any:
                    slot = lax.rem(used, jnp.int32(c.stages))

                    @pl.when(used >= c.stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    operands.copy(stage_smem, slot, start_row(row), column, panel, full.at[slot])
                    return used + 1

                return lax.fori_loop(0, shape.panels, one, used)

            used = lax.fori_loop(0, mine, fill, jnp.int32(0))

            @pl.loop(jnp.maximum(used - c.stages, 0), used)
            def _(i: Any) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(c.stages))])

        @pl.when(warpgroup < c.warpgroups)
        def _() -> None:
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            if c.in_turn:

                @pl.when(warpgroup == c.warpgroups - 1)
                def _() -> None:
                    plgpu.barrier_arrive(turn.at[0])

            def one(turn_number: Any, used: Any) -> Any:
                row, column = tile_at(turn_number)
                steps = Steps(c, used, full, empty, turn, warpgroup, interpret)
                results = operands.compute(stage_smem, steps, start_row(row), column)
                for i, pieces in enumerate(results):
                    top = start_row(row) + warpgroup * c.rows + 64 * i
                    _store(pieces, out, out_smem, out_dtype, warpgroup, (top, column), row, shape, c, interpret)
                return used + shape.panels

            lax.fori_loop(0, mine, one, jnp.int32(0))
            if c.in_turn:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    plgpu.barrier_wait(turn.at[0])

            plgpu.wait_smem_to_gmem(0)

    row_bytes = jnp.dtype(out_dtype).itemsize * c.piece
    if row_bytes not in (64, 128):
        raise ValueError(f"TileConfig: a piece's rows must have 64 or 128 bytes, got piece={c.piece} of {jnp.dtype(out_dtype)}")
    out_type = tile((c.warpgroups * c.buffers, 64, c.piece), out_dtype, row_bytes)
    if out_in_arena:
        out_type = viewed(tile((c.warpgroups * c.buffers, 64, row_bytes), jnp.int8, row_bytes), out_type, interpret=interpret)
    empty_type: Any = plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages)
    if axes:
        empty_type = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=c.warpgroups, num_barriers=c.stages)
    scratch = [
        stage,
        out_type,
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.stages),
        empty_type,
        plgpu.Barrier(num_arrivals=1, num_barriers=c.warpgroups),
    ]
    result = plgpu.kernel(
        body,
        out_type=() if out_in_arena else jax.ShapeDtypeStruct((shape.m, shape.n), out_dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(2,) if axes else (),
        cluster_names=axes,
        num_threads=c.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(offsets, *inputs)
    return None if out_in_arena else result


def _store(
    pieces: Sequence[jax.Array],
    out: Matrix,
    out_smem: Any,
    dtype: Any,
    warpgroup: Any,
    corner: tuple[Any, Any],
    first_row: Any,
    shape: Shape,
    c: TileConfig,
    interpret: bool,
) -> None:
    """Stores 64 rows of results at ``corner``, those from ``first_row`` on and within the matrix."""
    top, column = corner
    as_bytes, as_numbers = (out_smem, out_smem) if out.place is None else out_smem
    size = jnp.dtype(dtype).itemsize
    per_panel = 128 // size  # columns in a panel of the result
    width = c.piece if out.place is None else size * c.piece
    whole_tiles = shape.m % (c.tile_m * c.cluster_m) == 0 and shape.n % (c.tile_n * c.cluster_n) == 0
    for j, values in enumerate(pieces):
        for part in range(64 // c.piece):
            offset = 64 * j + part * c.piece
            panel = lax.div(column, jnp.int32(per_panel)) + offset // per_panel
            within = offset % per_panel // c.piece  # which piece of its panel
            # Each piece's copies are one group, an empty one where nothing is stored.
            plgpu.wait_smem_to_gmem(c.buffers - 1, wait_read_only=True)
            buffer = warpgroup * c.buffers + (offset // c.piece) % c.buffers
            rounded = values.astype(dtype)
            as_numbers[buffer] = rounded if c.piece == 64 else rounded[:, part * c.piece : (part + 1) * c.piece]
            if out.place is not None:
                write_bytes(out_smem, buffer, interpret=interpret)
            plgpu.commit_smem()

            def copy(start: int, rows: int, panel: Any = panel, within: int = within, buffer: Any = buffer) -> None:
                target = out.tile(top + start, rows, panel)
                if c.piece < per_panel:
                    target = target.at[:, pl.ds(within * width, width)]
                plgpu.copy_smem_to_gmem(as_bytes.at[buffer, pl.ds(start, rows)], target, commit_group=False)

            if whole_tiles:
                copy(0, 64)
                plgpu.commit_smem_to_gmem_group()
                continue
            inside = panel * per_panel < shape.n
            whole = (top >= first_row) & (top + 64 <= shape.m)

            @pl.when(inside & whole)
            def _(copy: Any = copy) -> None:
                copy(0, 64)

            @pl.when(inside & jnp.logical_not(whole))
            def _(copy: Any = copy) -> None:
                for start in range(0, 64, 8):

                    @pl.when((top + start >= first_row) & (top + start < shape.m))
                    def _(start: int = start, copy: Any = copy) -> None:
                        copy(start, 8)

            plgpu.commit_smem_to_gmem_group()
