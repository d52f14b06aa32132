"""The op of docs/own-op.md, by the checks that the document names; and its code is that of the example and of this file."""

from __future__ import annotations

import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import own_op
import pytest
from own_op import relu2

import jaxarena as ja
from jaxarena.pallas.operands import Place, pack
from jaxarena.testing import (
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    normal,
)

ROOT = Path(__file__).parents[2]


def naive(x, weight):
    return weight * jnp.maximum(x, 0) ** 2


def test_relu2():
    args = (normal(0, (3, 5, 130)), normal(1, (130,)))
    check_against_oracle(relu2, naive, args, (0, 1), dtype=jnp.float32, terms=15, stages=2)
    check_modes(relu2, args, (0, 1))
    check_vmap(relu2, args, (0, 1), in_axes=(0, None))
    check_shard_map(relu2, args, (0, 1), sharded=(True, False))
    assert gradient_launches(relu2, args, (0,)) == ["relu2_dx"]
    assert gradient_launches(relu2, args, (1,)) == ["relu2_dweight"]


def test_a_step_with_it_does_not_depend_on_the_arena():
    params = own_op.init(jax.random.key(0), 7, 130)
    plan = assert_step_repeatable(own_op.train_step, params, normal(0, (3, 5, 7)), normal(1, (3, 5, 7)))
    assert {"relu2", "relu2_dx", "relu2_dweight"} <= {launch.name.rpartition(".")[0] for launch in plan.launches}


def test_the_example_trains(capsys):
    losses = own_op.main(steps=5)
    assert losses == sorted(losses, reverse=True)
    assert "relu2_dweight.1" in capsys.readouterr().out


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"relu2: weight must have shape \(200,\) \(a number for each column of x\), got shape \(48,\)"):
        relu2(jnp.ones((3, 200)), jnp.ones(48))
    with pytest.raises(TypeError, match="relu2: x must be bfloat16 or float32, got int32"):
        relu2(jnp.ones((3, 200), jnp.int32), jnp.ones(200))


def test_the_documents_code_is_the_examples():
    document = (ROOT / "docs" / "own-op.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert len(blocks) >= 6
    sources = Path(own_op.__file__).read_text() + Path(__file__).read_text()
    for block in blocks:
        assert block in sources, block


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_its_kernel_is_its_reference(dtype, capsys):
    x, weight = normal(2, (2, 64, 72), dtype), normal(3, (72,), dtype)

    def step(x, weight):
        return own_op.relu2(own_op.relu2(own_op.relu2(x, weight), weight), weight)

    planned = ja.jit(step, kernels="interpret")
    plan = planned.plan(x, weight)
    # The first reads an array that is not in the arena, the last writes one.
    assert [why is None for why in plan.kernels().values()].count(True) == 1
    got, _ = planned(plan.allocate(255), x, weight)
    expected, _ = ja.jit(step, kernels=False)(plan.allocate(), x, weight)
    chex.assert_trees_all_close(got, expected, rtol=1e-6 if dtype == jnp.float32 else 2e-2)
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_its_kernel_lowers_for_a_gpu():
    arena = jnp.zeros((512, 128), jnp.int8)

    def run(arena):
        ref = jax.new_ref(arena)
        places = pack([Place(0, 128), Place(256, 128)])
        own_op.relu2_tiles(ref, places, jnp.ones(64), 128, jnp.dtype("bfloat16"), False)
        return ref[...]

    assert "mosaic_gpu" in jax.jit(run).trace(arena).lower(lowering_platforms=("cuda",)).as_text()
