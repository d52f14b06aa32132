"""The op interface: what an op is made of, and the one way to declare a launch.

An **op** is a public function of arrays. It checks its arguments, then composes **launches**: each launch is one kernel
launch on a GPU and, everywhere, an XLA reference, and is one JAX primitive, so a traced step shows exactly the launches
that will run. The pieces of an op, all in its one file:

- the public function: checks at trace time, errors that name the argument, its value and what is supported;
- the launches, declared with :func:`launch`: the decorated body *is* the XLA reference, and its result's shapes are the
  abstract evaluation;
- the gradient: a ``jax.custom_vjp`` whose backward rule calls launches again, one launch a gradient, so that the gradient
  of a frozen weight is dropped as dead code and costs nothing.

Example::

    @launch("scale", row_ndim=1)
    def scale_forward(x, *, factor):
        return x * factor

    def scale(x, factor):
        if not isinstance(factor, float):
            raise TypeError(f"scale: factor must be a float, got {factor!r}")
        return scale_forward(x, factor=factor)

Layout: ``row_ndim`` says how many trailing axes of a result lie side by side in one arena row (the rest count rows):
1 for ``(batch, time, width)``, 2 for ``(batch, time, heads, head size)``, and 0 for a vector stored flat, such as a
log-sum-exp. ``PER_TOKEN`` is for an op that takes either of the first two: all axes but the first two, and at least one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxarena.arena import Scratch
from jaxarena.kernels import Kernel

__all__ = ["PER_TOKEN", "Launch", "launch", "launch_names", "launch_of", "launches_in"]

PER_TOKEN = -2
"""The ``row_ndim`` of results whose first two axes are batch and time, however many follow."""

ScratchFn = Callable[..., Sequence[Scratch]]


class Launch:
    """One launch: a primitive with an XLA reference, result layouts and scratch.

    Call it with arrays and keyword parameters (static and hashable); it returns what the reference returns, an array or a
    tuple of arrays. It has no derivative of its own: an op gives the gradient with ``jax.custom_vjp``.

    Attributes:
      name: the name that plans and traces show.
      reference: the function of arrays that defines the result.
      row_ndim: as declared, one number for all results or one for each.
      gpu_kernel: what :meth:`kernel` registered, or None.
    """

    def __init__(self, name: str, reference: Callable[..., Any], row_ndim: int | tuple[int, ...], scratch: ScratchFn):
        self.name = name
        self.reference = reference
        self.row_ndim = row_ndim
        self._scratch = scratch
        self.gpu_kernel: Kernel | None = None
        self.primitive = _make_primitive(self)
        functools.update_wrapper(self, reference)

    def __call__(self, *arrays: Any, **params: Any) -> Any:
        for name, value in params.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"launch {self.name!r}: parameter {name} must be hashable and known when the step is traced, got "
                    f"{type(value).__name__}: pass arrays by position, and sequences as tuples"
                ) from None
        return self.results_of([jax.typeof(a) for a in arrays], params, self.primitive.bind(*arrays, **params))

    def __repr__(self) -> str:
        return f"<launch {self.name}>"

    def kernel(
        self, supports: Callable[..., str | None], *, arrays: Sequence[int] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers the decorated function as this launch's GPU kernel (:mod:`jaxarena.kernels` says how it is called).

        Args:
          supports: from the sites of operands and results (``out``) and the parameters to None where the kernel takes the launch, else
            to why it does not.
          arrays: positions of operands that the kernel takes as row-major arrays wherever they lie; negative ones count from the end.
        """

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            self.gpu_kernel = Kernel(run, supports, frozenset(arrays))
            return run

        return register

    def results_of(self, avals: Sequence[Any], params: dict[str, Any], results: Sequence[Any]) -> Any:
        """Flat results as the reference gives them for operands of these avals: one by itself, or a tuple."""
        returns_tuple = _shapes(self, tuple(avals), tuple(sorted(params.items())))[1]
        return tuple(results) if returns_tuple else results[0]

    def row_ndims(self, results: Sequence[Any]) -> tuple[int, ...]:
        """How many trailing axes of each of these results (avals) make one arena row."""
        declared = self.row_ndim if isinstance(self.row_ndim, tuple) else (self.row_ndim,) * len(results)
        if len(declared) != len(results):
            raise ValueError(f"launch {self.name!r}: row_ndim must have one number for each of {len(results)} results, got {declared}")
        return tuple(n if n >= 0 else max(aval.ndim + n, 1) for n, aval in zip(declared, results, strict=True))

    def scratch(self, *avals: Any, **params: Any) -> tuple[Scratch, ...]:
        """The scratch this launch asks for on operands of these shapes and dtypes."""
        return tuple(self._scratch(*avals, **params))

    def flat_reference(self, *arrays: Any, **params: Any) -> list[Any]:
        """The reference with its results always as a list."""
        results = self.reference(*arrays, **params)
        return list(results) if isinstance(results, tuple) else [results]


def launch(
    name: str, *, row_ndim: int | tuple[int, ...] = 1, scratch: ScratchFn = lambda *avals, **params: ()
) -> Callable[[Callable[..., Any]], Launch]:
    """Declares a launch; the decorated function is its XLA reference.

    The function takes arrays by position and static, hashable parameters by keyword, and returns an array or a tuple of
    arrays.

    Args:
      name: shown in plans and traces, and what storage patterns match: give every launch its own.
      row_ndim: layout of the results, one number for all or a tuple with one for each (see the module's docstring).
      scratch: from the operands' avals and the parameters to the :class:`jaxarena.arena.Scratch` the kernel needs.

    Raises:
      TypeError: ``name`` is no string (``@launch`` needs one: ``@launch("name")``), or ``row_ndim`` is neither an int nor a tuple of ints.
    """
    if not isinstance(name, str):
        raise TypeError(f'launch: name must be a string, got {type(name).__name__} {name!r}: write @launch("name")')
    if not all(isinstance(n, int) for n in (row_ndim if isinstance(row_ndim, tuple) else (row_ndim,))):
        raise TypeError(f"launch {name!r}: row_ndim must be an int or a tuple of ints, got {row_ndim!r}")

    def declare(reference: Callable[..., Any]) -> Launch:
        return Launch(name, reference, row_ndim, scratch)

    return declare


_LAUNCHES: dict[Primitive, Launch] = {}


def launch_of(primitive: Primitive) -> Launch | None:
    """The launch a primitive stands for, or None for a primitive of JAX's own."""
    return _LAUNCHES.get(primitive)


def launches_in(jaxpr: Any) -> Iterator[Launch]:
    """The launches of a jaxpr in order, those of the jaxprs that its equations call too."""
    for eqn in jaxpr.eqns:
        if (found := launch_of(eqn.primitive)) is not None:
            yield found
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from launches_in(getattr(inner, "jaxpr", inner))


def _is_jaxpr(param: Any) -> bool:
    return hasattr(param, "jaxpr") or hasattr(param, "eqns")


def launch_names() -> list[str]:
    """The names of the launches declared so far, sorted."""
    return sorted({launch.name for launch in _LAUNCHES.values()})


@functools.lru_cache(maxsize=4096)
def _shapes(launch: Launch, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> tuple[list[Any], bool]:
    """The result avals, taken from a trace of the reference (so varying axes are kept), and whether it returns a tuple."""
    returns_tuple = False

    def flat(*arrays: Any) -> list[Any]:
        nonlocal returns_tuple
        results = launch.reference(*arrays, **dict(params))
        returns_tuple = isinstance(results, tuple)
        flat_results = list(results) if returns_tuple else [results]
        for result in flat_results:
            if not isinstance(result, jax.Array):
                raise TypeError(
                    f"launch {launch.name!r}: its reference must return an array or a tuple of arrays, got {type(result).__name__}"
                )
        return flat_results

    out_avals = jax.make_jaxpr(flat)(*avals).out_avals
    return [a.strip_weak_type() for a in out_avals], returns_tuple


def _make_primitive(launch: Launch) -> Primitive:
    primitive = Primitive(f"jaxarena_{launch.name}")
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **params: _jitted(launch, tuple(sorted(params.items())))(*arrays))
    primitive.def_abstract_eval(lambda *avals, **params: _shapes(launch, avals, tuple(sorted(params.items())))[0])
    mlir.register_lowering(primitive, mlir.lower_fun(launch.flat_reference, multiple_results=True))

    def no_derivative(*args: Any, **params: Any) -> Any:
        raise TypeError(
            f"jaxarena: launch {launch.name!r} has no derivative of its own: differentiate the op that calls it (an op gives its "
            "gradient with jax.custom_vjp; forward-mode and second derivatives are not supported)"
        )

    def batch(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, list[int]]:
        # A batched launch runs as XLA: the kernels know one batch axis, which the ops put inside a launch's own shapes.
        results = jax.vmap(functools.partial(launch.flat_reference, **params), in_axes=tuple(dims))(*arrays)
        return results, [0] * len(results)

    ad.primitive_jvps[primitive] = no_derivative
    batching.primitive_batchers[primitive] = batch
    _LAUNCHES[primitive] = launch
    return primitive


@functools.lru_cache(maxsize=4096)
def _jitted(launch: Launch, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(launch.flat_reference, **dict(params)))
