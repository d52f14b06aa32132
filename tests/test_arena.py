from __future__ import annotations

import subprocess
import sys

import pytest

import jaxarena.arena as arena_module
from jaxarena.arena import ALIGN, Arena, GiB, MiB, Placed, PlacedScratch, Scratch, place, round_up, scratch
from jaxarena.lifetime import Form, Launch, Tensor
from jaxarena.panels import Layout


def test_offers_its_names():
    names = ["Arena", "Placed", "PlacedScratch", "Scratch", "ALIGN", "array_bytes", "home", "place", "quant_parts", "scratch"]
    assert set(names) <= set(arena_module.__all__)
    assert all(hasattr(arena_module, name) for name in arena_module.__all__)


def test_core_imports_no_jax():
    # In a fresh interpreter, with the package's own __init__ (which may import JAX) out of the way.
    code = (
        "import sys, types; p = types.ModuleType('jaxarena'); p.__path__ = ['jaxarena']; sys.modules['jaxarena'] = p; "
        "import jaxarena.arena, jaxarena.planner; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_round_up():
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "f32", 4), "tag must be a non-empty string"),
        (("t", "f64", 8), "dtype 'f64' is unknown; supported: f32"),
        (("t", "f32", 6), "multiple of 4"),
        (("t", "i8", -1), "got -1"),
        (("t", "f32", 4, True), "counter's dtype must be i32 or u32"),
    ],
)
def test_scratch_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scratch(*arguments)


def test_arena_questions():
    placed = (Placed("a", 3000, 0, 0, 2), Placed("b", 1024, 3072, 2, 3))
    partials = PlacedScratch("partials", 500, 4096, 1)
    arena = Arena(placed, (partials,), 0, 5120)
    assert arena.rows == 40
    assert arena.find("b").row == 24
    assert arena.find("b").end == 4096
    assert (partials.row, partials.end) == (32, 4596)
    assert arena.live_at(1) == (placed[0], partials)
    assert arena.live_at(2) == placed
    assert [arena.live_bytes(t) for t in range(5)] == [3072, 4096, 4096, 1024, 0]
    with pytest.raises(KeyError, match="'c' is not placed"):
        arena.find("c")


def test_arena_compares_by_value():
    first, second = (Arena((Placed("a", 1024, 0, 0, 0),), (), 0, 1024) for _ in range(2))
    first.find("a")
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize("size", [-1024, 1000])
def test_arena_size_is_checked(size):
    with pytest.raises(ValueError, match=f"multiple of {ALIGN}, got {size}"):
        Arena((), (), 0, size)


def big_form(*shapes: tuple[int, int]) -> Form:
    """All arrays written by the first launch and read by the second."""
    names = [f"t{k}" for k in range(len(shapes))]
    tensors = tuple(Tensor(name, Layout(shape, "i8", 1)) for name, shape in zip(names, shapes, strict=True))
    return Form("big", tensors, (), (Launch("make", (), tuple(names)), Launch("use", tuple(names), ())), (), frozenset(), frozenset())


def test_P1_offsets_past_31_bits():
    form = big_form((8 * 1024 * 1024 * 3, 128), (8192, 128))
    arena = place(form)
    assert form.tensors[0].bytes == 3 * GiB
    assert arena.find("t1").offset == 3 * GiB
    assert arena.find("t1").row == 3 * GiB // 128
    assert arena.bytes == 3 * GiB + MiB


def test_P1_more_rows_than_an_index_can_name_are_refused():
    assert place(big_form((2**31 - 8, 128))).rows == 2**31 - 8
    with pytest.raises(ValueError, match=r"cannot fit in 274877906816 bytes: it needs at least 274877906944"):
        place(big_form((2**31 - 8, 128), (8, 128)))


def test_scratch_of_a_launch():
    asked = (Scratch("partials", "f32", 64), Scratch("arrivals", "i32", 4, counter=True))
    form = Form("f", (), (), (Launch("a", (), ()), Launch("b", (), (), asked)), (), frozenset(), frozenset())
    assert scratch(form, 0) == ()
    assert scratch(form, 1) == asked
    with pytest.raises(ValueError, match="launches 0 to 1, got 2"):
        scratch(form, 2)
