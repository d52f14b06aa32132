"""The examples that use models of others: a Flax NNX module, a loaded checkpoint."""

from __future__ import annotations

from pathlib import Path

import chex
import finetune
import jax
import nnx_layers
import pytest

from jaxarena.models import qwen3_next

TINY = Path(__file__).parents[1] / "data" / "qwen3_next_tiny"


def test_an_nnx_module_trains(capsys: pytest.CaptureFixture[str]) -> None:
    losses = nnx_layers.main(steps=6)
    assert losses[-1] < losses[0] - 0.05
    printed = capsys.readouterr().out
    assert "moe" in printed
    assert "of the merged model" in printed


def test_fine_tuning_leaves_frozen_parameters_and_their_launches_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint", str(TINY), "--steps", "4", "--batch", "2", "--length", "40"]
    result = finetune.main([*arguments, "--train", "qgkv", "--out", str(tmp_path)])
    assert result["losses"][-1] < result["losses"][0]
    assert result["trained"] == 64 * (2 * 128 + 2 * 64)
    names = [launch.name for launch in result["plan"].launches]
    # One matrix is trained: of all the products' gradients of a weight, one.
    assert sum("dweight" in name for name in names) == 1
    before, after = (qwen3_next.load(folder)[0] for folder in (TINY, tmp_path))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if "qgkv" in jax.tree_util.keystr(path):
            assert not (a == b).any()
        else:
            chex.assert_trees_all_equal(a, b)
    assert "24,576 of" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--train: 'nothing' must match some parameter"):
        finetune.main([*arguments, "--train", "nothing"])
