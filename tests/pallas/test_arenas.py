"""The harness that holds kernels to the bytes they declare to write finds what is left, and what is written besides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pallas.arenas import TestArena, launch_writing


def kernel(ref: Any) -> None:
    ref[3, 16:32] = ref[2, 16:32]


def test_passes_what_is_as_declared() -> None:
    arena = TestArena(0).array()
    after, _ = launch_writing(kernel, arena, [(3 * 128 + 16, 3 * 128 + 32)])
    assert (after[3, 16:32] == arena[2, 16:32]).all()


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ([], "16 bytes changed that were not declared, first .400, 401"),
        ([(3 * 128 + 17, 3 * 128 + 32)], "1 bytes changed that were not declared, first .400"),
        ([(3 * 128 + 16, 3 * 128 + 34)], "2 declared bytes were not written, .* first .416, 417"),
        ([(2 * 128 + 16, 2 * 128 + 32), (3 * 128 + 16, 3 * 128 + 32)], "32 declared bytes were not written, or depend"),
    ],
)
def test_names_the_bytes(written: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        launch_writing(kernel, TestArena(0).array(), written)
