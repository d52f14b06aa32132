"""What our own tests use, for users too. Needs chex: ``pip install 'jaxarena[test]'``.

A test of an op is mostly these lines, ``naive`` being the same mathematics in plain jnp::

    args = (normal(0, (3, 5, 130)), normal(1, (130,)))
    check_against_oracle(op, naive, args, argnums=(0, 1), dtype=jnp.float32, terms=130)
    check_modes(op, args, argnums=(0, 1))
    check_vmap(op, args, argnums=(0, 1), in_axes=(0, None))
    check_shard_map(op, args, argnums=(0, 1), sharded=(True, False))
    assert gradient_launches(op, args, argnums=(0,)) == ["op_grad"]  # a frozen weight costs nothing

and of a step::

    plan = check_step(step, *arguments)  # on poisoned arenas, without reuse, and beside plain jax.jit
    assert_arena_at_most(plan, 3 * ja.MiB)

====================  ========================================================================================
module                holds
====================  ========================================================================================
``inputs``            random arrays by seed, arrays of 0xFF bytes
``tolerances``        how far from exact a right result may be: from its dtype and the length of its sums
``oracles``           float64 oracles; an op's values and gradients beside an oracle or a reference
``modes``             the same op under strict promotion, x64, ``vmap`` and ``shard_map``
``launches``          the launches a function or its gradient is made of
``steps``             planned steps: poisoned arenas, the same bits every time, a limit on the arena
====================  ========================================================================================
"""

try:
    import chex as _chex  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "chex":
        raise
    raise ImportError("jaxarena.testing needs chex, which is not installed: pip install 'jaxarena[test]', or chex alone") from error

from jaxarena.testing.inputs import integers, normal, poison
from jaxarena.testing.launches import gradient_launches, live_launches
from jaxarena.testing.modes import check_modes, check_shard_map, check_vmap
from jaxarena.testing.oracles import assert_close_to_oracle, assert_op_matches_reference, check_against_oracle, oracle, value_and_gradients
from jaxarena.testing.steps import assert_arena_at_most, assert_step_repeatable, check_step, poisoned_arenas
from jaxarena.testing.tolerances import tolerance, unit_roundoff

__all__ = [
    "assert_arena_at_most",
    "assert_close_to_oracle",
    "assert_op_matches_reference",
    "assert_step_repeatable",
    "check_against_oracle",
    "check_modes",
    "check_shard_map",
    "check_step",
    "check_vmap",
    "gradient_launches",
    "integers",
    "live_launches",
    "normal",
    "oracle",
    "poison",
    "poisoned_arenas",
    "tolerance",
    "unit_roundoff",
    "value_and_gradients",
]
