"""The policies for ``jax.checkpoint``: which launches run a second time, and that values do not change."""

from __future__ import annotations

import collections
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.checkpoint_policies import launches_saveable, save_only_launches
from jaxarena.testing import live_launches, normal

X, W = normal(0, (2, 5, 24)), normal(1, (24, 24))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    h = ja.ops.rms_norm(x, jnp.ones(24))
    return jnp.tanh(ja.ops.project(ja.ops.project(h, w), w)) + x


def gradient(policy: Any) -> Any:
    kept = jax.checkpoint(layer, policy=policy)
    return jax.grad(lambda x, w: jnp.sum(kept(kept(x, w), w) ** 2), argnums=(0, 1))


def counts(policy: Any) -> collections.Counter[str]:
    return collections.Counter(live_launches(gradient(policy), X, W))


def test_what_runs_twice() -> None:
    nothing, everything = counts(None), counts(launches_saveable)
    # Forward: a norm and two projections a layer. The first projection of each is what the second's gradient reads.
    assert (nothing["rms_norm"], nothing["project"]) == (4, 8)
    assert (everything["rms_norm"], everything["project"]) == (2, 4)
    assert counts(save_only_launches("project*"))["rms_norm"] == 4
    assert counts(save_only_launches("project*"))["project"] == 4
    assert counts(save_only_launches("rms_*"))["rms_norm"] == 2
    # To JAX's own policy a launch is no product.
    assert counts(jax.checkpoint_policies.dots_saveable)["project"] == 8


def test_values_stay() -> None:
    plain = jax.jit(gradient(jax.checkpoint_policies.everything_saveable))(X, W)
    for policy in (None, launches_saveable, save_only_launches("project*")):
        step = ja.jit(gradient(policy))
        result, _ = step(step.plan(X, W).allocate(255), X, W)
        chex.assert_trees_all_close(result, plain, rtol=1e-4, atol=1e-4)


def test_patterns_that_match_nothing() -> None:
    with pytest.raises(ValueError, match=r"'projct' must match a launch that is declared, such as .*project"):
        save_only_launches("projct")
    with pytest.raises(TypeError, match="patterns must be strings, got int 3"):
        save_only_launches(3)  # type: ignore[arg-type]
