"""The demo end to end, small: it writes what it says it writes, and a resumed run goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import chex
import pytest
import train_text

SMALL = ["--quiet", "--layers", "4", "--width", "64", "--batch", "2", "--length", "64", "--steps", "6", "--windows", "2", "--sample", "20"]


@pytest.mark.slow
def test_resumed_training_continues_the_same_losses_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train_text.main([*SMALL, "--out", str(tmp_path / "whole")])
    first = train_text.main([*SMALL, "--out", str(tmp_path / "parts"), "--stop", "3"])
    second = train_text.main([*SMALL, "--out", str(tmp_path / "parts"), "--resume"])
    assert len(whole["losses"]) == 6
    assert first["losses"] + second["losses"] == whole["losses"]
    chex.assert_trees_all_equal(second["params"], whole["params"], strict=True)
    assert second["held_out"] == whole["held_out"]
    assert second["written"] == whole["written"]
    assert len(whole["written"]) == 20
    assert whole["losses"][-1] < whole["losses"][0]
    assert all((tmp_path / "parts" / name).stat().st_size > 1000 for name in ("plan.txt", "plan.html", "plan.png"))
    printed = capsys.readouterr().out
    for words in ("resumed at step 3", "this model", "zlib -9 on each window", "bigram, smoothed", "unigram", "optimal", "it writes"):
        assert words in printed
