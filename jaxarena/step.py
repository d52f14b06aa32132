"""``jit``: what users hold. A step that runs over a planned arena."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxarena.execute import execute
from jaxarena.kept import StoragePolicy, check_policy
from jaxarena.kernels import kernel_device
from jaxarena.plan import ArenaBuffer, Plan
from jaxarena.planner import place
from jaxarena.schedule import Schedule, schedule
from jaxarena.trace import Graph

__all__ = ["Step", "jit"]


def jit(
    function: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    reuse: bool = True,
    storage: StoragePolicy = None,
    kernels: bool | str = True,
) -> Step:
    """Makes a step of ``function``: like ``jax.jit``, but its arrays live in one planned arena.

    ``function`` is an ordinary JAX function, with ``jaxarena.ops`` in it, ``jax.value_and_grad``, ``lax.scan`` over layers, an optax
    update. The step is called with the arena in front and returns it behind::

        step = jaxarena.jit(train_step, donate_argnums=(0, 1))
        arena = step.plan(params, opt_state, batch).allocate()
        (params, opt_state, loss), arena = step(arena, params, opt_state, batch)

    The arena is always donated: use the one that the call returned.

    Args:
      function: the function; traced once for each new combination of shapes, dtypes and static arguments.
      donate_argnums: positions, in ``function``'s arguments, of what may be overwritten with results.
      static_argnums: positions of arguments that are compile-time constants (hashable).
      static_argnames: their names, when passed by keyword.
      reuse: whether arrays share memory once they are dead. ``False`` gives every array bytes of its own, for hunting a bug:
        the results must have the same bits.
      storage: how arrays that the forward pass keeps for the backward pass are stored meanwhile: None (as they are), ``"bf16"``,
        ``"int8"`` (one word a value) or ``"int8x2"`` (two words) for all of them, or a dict from patterns to these. See
        :mod:`jaxarena.kept`.
      kernels: whether launches run as GPU kernels where the default device is a GPU they are made for; ``plan.kernels()`` says which
        launches do. ``False`` runs the XLA reference of each. ``"interpret"`` runs the kernels in Pallas' interpret mode on the CPU,
        for tests: slow, and with fewer cores than a kernel has warpgroups it may hang unless the environment has ``PJRT_NPROC=16``.

    Raises:
      TypeError: when ``function`` is not callable, or ``storage`` no string or dict.
      ValueError: for an unknown storage, or other ``kernels``.
    """
    return Step(function, donate_argnums, static_argnums, static_argnames, reuse, storage, kernels)


class Step:
    """A function run over a planned arena; made by :func:`jit`."""

    def __init__(
        self,
        function: Callable[..., Any],
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Iterable[str] = (),
        reuse: bool = True,
        storage: StoragePolicy = None,
        kernels: bool | str = True,
    ):
        if not callable(function):
            raise TypeError(f"jaxarena.jit: function must be callable, got {function!r}")
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._reuse = reuse
        self._policy = check_policy(storage)
        if kernels not in (True, False, "interpret"):
            raise ValueError(f"jaxarena.jit: kernels must be True, False or 'interpret', got {kernels!r}")
        self._kernels = kernels
        nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._static_nums, self._static_names = _match_static(function, nums, names)
        donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        # The static positions come out counted from the front, as jax.jit counts them; so must these, with the arena put before them.
        self._donated = _match_static(function, donated, ())[0]
        self._traced = jax.jit(function, static_argnums=self._static_nums, static_argnames=self._static_names)
        self._planned: dict[int, tuple[Any, Schedule, Plan]] = {}
        self._jitted = jax.jit(
            self._run,
            donate_argnums=(0, *(n + 1 for n in self._donated)),
            static_argnums=tuple(n + 1 for n in self._static_nums),
            static_argnames=self._static_names,
        )

    def __call__(self, arena: ArenaBuffer, *args: Any, **kwargs: Any) -> tuple[Any, ArenaBuffer]:
        """Runs the step. Returns the function's result and the arena.

        Raises:
          TypeError: when ``arena`` is no arena, or under ``jax.grad`` and its kin: take gradients inside the step.
          ValueError: when ``arena`` is of another program or size or was donated to an earlier call, or when an array that is donated
            is passed twice.
        """
        self._check_arena(arena)
        self._check_donated(args, kwargs)
        return self._jitted(arena, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The memory plan for arguments given as arrays or ``jax.ShapeDtypeStruct``. Nothing is compiled or run."""
        return self._prepare(args, kwargs)[1]

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions, in the function's arguments, of what may be overwritten with results."""
        return self._donated

    def result_shapes(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result as ``jax.ShapeDtypeStruct``, for arguments as :meth:`plan` takes them."""
        return self._traced.eval_shape(*args, **kwargs)

    def lower(self, arena: ArenaBuffer, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Like ``jax.jit(...).lower``: for ``.compile().memory_analysis()`` and the like."""
        self._check_arena(arena)
        return self._jitted.lower(arena, *args, **kwargs)

    def _run(self, arena: ArenaBuffer, *args: Any, **kwargs: Any) -> tuple[Any, ArenaBuffer]:
        schedule, plan, out_tree = self._prepare(args, kwargs)
        if plan.fingerprint not in arena.plans or arena.nbytes < plan.bytes:
            raise ValueError(
                f"{self._name}: arena was allocated for plan {', '.join(arena.plans)} with {arena.nbytes} bytes, but these arguments need "
                f"plan {plan.fingerprint} with {plan.bytes} bytes: allocate one with step.plan(...).allocate() on arguments of these shapes"
            )
        buffer, *leaves = _guard_p.bind(arena.data, *jax.tree.leaves(self._dynamic(args, kwargs)))
        outputs, data = execute(schedule, plan.arena, buffer, leaves, kernel_device(self._kernels))
        return jax.tree.unflatten(out_tree, outputs), ArenaBuffer(data, arena.plans)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Schedule, Plan, Any]:
        """The schedule and the plan, made once for each trace that jax.jit keeps."""
        traced = self._traced.trace(*args, **kwargs)
        jaxpr = traced.jaxpr
        out_tree = jax.tree.structure(traced.out_info)
        known = self._planned.get(id(jaxpr))
        if known is None:
            scheduled = schedule(Graph(traced), self._name, self._policy)
            plan = Plan(scheduled.form, place(scheduled.form, reuse=self._reuse), scheduled.temporaries, scheduled.reasons)
            known = (jaxpr, scheduled, plan)
            if not any(isinstance(c, jax.core.Tracer) for c in scheduled.graph.constants):
                # The jaxpr is kept with the entry, so that its id stays its own.
                self._planned[id(jaxpr)] = known
        return known[1], known[2], out_tree

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (
            tuple(a for i, a in enumerate(args) if i not in self._static_nums),
            {k: v for k, v in kwargs.items() if k not in self._static_names},
        )

    def _check_arena(self, arena: Any) -> None:
        if not isinstance(arena, ArenaBuffer):
            raise TypeError(
                f"{self._name}: the first argument must be an arena, as step.plan(...).allocate() or an earlier call returned it, "
                f"got {type(arena).__name__}"
            )
        data = arena.data
        if isinstance(data, jax.core.Tracer) or not isinstance(data, jax.Array):
            return
        if data.is_deleted():
            raise ValueError(f"{self._name}: arena was donated to an earlier call: pass the arena which that call returned")

    def _check_donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        donated = {n: args[n] for n in self._donated if n < len(args)}
        kept = {n: a for n, a in enumerate(args) if n not in donated} | kwargs
        seen: dict[int, str] = {}
        for leaf, where in _arrays(donated):
            if leaf.is_deleted():
                raise ValueError(f"{self._name}: {where} was donated to an earlier call: pass what that call returned")
            if id(leaf) in seen:
                raise ValueError(f"{self._name}: {seen[id(leaf)]} and {where} are one array and cannot both be donated: copy one of them")
            seen[id(leaf)] = where
        for leaf, where in _arrays(kept):
            if id(leaf) in seen:
                raise ValueError(f"{self._name}: {seen[id(leaf)]} is donated and {where} is the same array: copy one of them")


def _arrays(arguments: dict[Any, Any]) -> Iterator[tuple[jax.Array, str]]:
    """The arrays among the arguments (no tracers), each with words that say where it is."""
    for key, argument in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                yield leaf, f"argument {key}{jax.tree_util.keystr(path)}"


def _match_static(function: Callable[..., Any], nums: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """As in ``jax.jit``, a static argument is static whether it is passed by position or by keyword."""
    try:
        signature = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return nums, names
    positional = [p.name for p in signature.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    nums = tuple(n + len(positional) if n < 0 else n for n in nums)
    names = tuple(dict.fromkeys((*names, *(positional[n] for n in nums if n < len(positional)))))
    nums = tuple(dict.fromkeys((*nums, *(positional.index(n) for n in names if n in positional))))
    return nums, names


# The identity on a step's operands, but a clear error where the step is differentiated or batched from outside.
_guard_p = Primitive("jaxarena_step")
_guard_p.multiple_results = True
_guard_p.def_impl(lambda *args: list(args))
_guard_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(_guard_p, lambda ctx, *args: list(args))


def _refuse_derivative(*args: Any, **params: Any) -> Any:
    raise TypeError(
        "a planned step cannot be differentiated from outside: its launches write one arena in place. Take jax.grad or "
        "jax.value_and_grad inside the function given to jaxarena.jit"
    )


def _refuse_batch(*args: Any, **params: Any) -> Any:
    raise TypeError(
        "a planned step cannot be batched by jax.vmap: its launches write one arena in place. Use jax.vmap inside the function "
        "given to jaxarena.jit, or give its arrays a batch axis"
    )


ad.primitive_jvps[_guard_p] = _refuse_derivative
batching.primitive_batchers[_guard_p] = _refuse_batch
