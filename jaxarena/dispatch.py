"""Which launches of a step run as kernels, decided when it is planned."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxarena.graph import Atom, Equation, Value
from jaxarena.kernels import Site
from jaxarena.residence import Residences
from jaxarena.storage import STORAGE_OF_DTYPE

__all__ = ["LaunchSites", "fallback", "launch_sites"]


class LaunchSites(NamedTuple):
    """Where a launch's operands and results lie."""

    operands: tuple[Site, ...]
    results: tuple[Site, ...]


def launch_sites(equation: Equation, residences: Residences) -> LaunchSites:
    """Where a launch's operands and results lie, as its kernel sees it."""
    return LaunchSites(
        tuple(_site(a, residences) for a in equation.inputs),
        tuple(_site(v, residences) for v in equation.outputs),
    )


def fallback(equation: Equation, residences: Residences) -> str | None:
    """Why a launch runs as its XLA reference also on a GPU that kernels are made for; None: it runs as a kernel."""
    import jaxarena.pallas.launches  # noqa: F401  registers the package's own kernels; Pallas takes a while to import

    launch = equation.launch
    assert launch is not None
    if launch.gpu_kernel is None:
        return "it has no kernel"
    sites = launch_sites(equation, residences)
    out = launch.results_of([a.aval for a in equation.inputs], equation.params, sites.results)
    return launch.gpu_kernel.supports(*sites.operands, out=out, **equation.params)


def _site(atom: Atom, residences: Residences) -> Site:
    aval: Any = atom.aval
    shape, dtype = tuple(map(int, aval.shape)), aval.dtype
    residence = residences.get(atom) if isinstance(atom, Value) else None
    # A run of a stack's slots, or what is kept in another storage, reaches a kernel as an array.
    if residence is None or residence.run is not None or residence.layout.storage != STORAGE_OF_DTYPE.get(dtype):
        return Site(shape, dtype)
    place = residence.resolved()
    return Site(shape, dtype, place.layout, place.view)
