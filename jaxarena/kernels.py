"""The kernel side of a launch: what a kernel is given, whether it takes a launch, and the device it runs on.

A launch has an XLA reference. :meth:`jaxarena.ops.interface.Launch.kernel` gives it a GPU kernel beside that::

    def supports(x, *, out, factor):
        return None if x.dtype == jnp.bfloat16 else f"it takes bfloat16, got {x.dtype}"

    @scale_forward.kernel(supports)
    def scale_kernel(arena, x, *, out, device, factor):
        ...

``supports`` is asked when the step is planned, with a :class:`Site` for each operand and (in ``out``) for each result; what it says
against a launch stands in the plan. The kernel is called when the step is traced for a device that runs kernels:

- ``arena`` is the ref of the int8 ``[rows, 128]`` arena, which it reads and writes in place;
- an operand is an :class:`ArenaTensor`, or a row-major array where it does not lie in the arena (or is among ``arrays``, the operands
  that the kernel always takes as arrays);
- ``out`` is an :class:`ArenaTensor` to write, or None for a result that does not lie in the arena: that one is returned. With several
  results ``out`` and what is returned are tuples, as the reference's results are.

The rows of an arena tensor whose rows lie together, pads included, are what :attr:`Site.matrix` counts. Pads hold zeros, and a kernel that
writes a tensor leaves zeros in its pads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxarena.panels import Layout, View

__all__ = ["CAPABILITY", "ArenaTensor", "Kernel", "KernelDevice", "Site", "kernel_device"]

CAPABILITY = "9.0"
"""The compute capability that kernels are made for: Hopper (H100, H200, GH200, H20)."""


@dataclasses.dataclass(frozen=True)
class Site:
    """An operand or a result of a launch, as it is known when the step is planned.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      layout: how it lies in the arena, or None for an array of its own.
      view: where within its home it lies, or None.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: Layout | None = None
    view: View | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def in_arena(self) -> bool:
        return self.layout is not None

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Rows and columns as a matrix of rows of the last axis; in the arena, of its rows there with the pads between groups.

        None where there is no such matrix: no axes, or in the arena groups that lie apart, or another split into rows.
        """
        if not self.shape:
            return None
        columns = self.shape[-1]
        if self.layout is None or self.view is None:
            return math.prod(self.shape[:-1]), columns
        together = self.layout.groups == 1 or self.view.group_stride == self.layout.padded_rows
        if not self.layout.row_ndim or self.layout.columns != columns or not together:
            return None
        return self.layout.rows, columns


@dataclasses.dataclass(frozen=True)
class ArenaTensor:
    """An operand or a result in the arena: its site, and the arena row at which its home's slot starts (may be traced)."""

    site: Site
    home_row: ArrayLike

    @property
    def row(self) -> Any:
        """The arena row of its first panel's first row."""
        assert self.site.view is not None
        return self.home_row + self.site.view.row

    @property
    def panel_stride(self) -> int:
        """Arena rows from one panel to the next."""
        assert self.site.view is not None
        return self.site.view.panel_stride


@dataclasses.dataclass(frozen=True)
class KernelDevice:
    """What kernels run on: a GPU with so many ``multiprocessors``, or, with ``interpret``, Pallas' interpret mode on the CPU."""

    multiprocessors: int
    interpret: bool = False


INTERPRETED = KernelDevice(multiprocessors=2, interpret=True)  # enough for a cluster of two


def kernel_device(kernels: bool | str) -> KernelDevice | None:
    """The device that kernels run on, or None where launches run as their references.

    Args:
      kernels: whether to use kernels where the default device is a GPU they are made for; ``"interpret"`` interprets them.
    """
    if kernels == "interpret":
        return INTERPRETED
    device = jax.devices()[0]
    if not kernels or device.platform != "gpu" or device.compute_capability != CAPABILITY:
        return None
    return KernelDevice(multiprocessors=device.core_count)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch's kernel: the function that runs it, the one that says what it does not take, and which operands it takes as arrays
    (negative: counted from the end)."""

    run: Callable[..., Any]
    supports: Callable[..., str | None]
    arrays: frozenset[int]
