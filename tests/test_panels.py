"""Views against addresses: where every value of a part lies, computed from the formula, is where the array's own value lies."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxarena import panels
from jaxarena.arena import ALIGN, array_bytes
from jaxarena.panels import Layout, View, columns, full_view, quant_parts, reshape, row_spans, slice_groups, slice_rows

STORAGES = ["f32", "bf16", "i8", "int8", "int8x2"]


def addresses(layout: Layout, view: View) -> np.ndarray:
    """The byte, from the home's first, at which each value starts, in the layout's shape (of its words when quantized)."""
    n = np.arange(math.prod(layout.shape))
    if layout.flat:
        return (view.row * 128 + n * layout.itemsize).reshape(layout.shape)
    column_bytes = n % layout.columns * layout.itemsize
    row = n // layout.columns
    group, row = row // layout.rows_per_group, row % layout.rows_per_group
    arena_row = view.row + column_bytes // 128 * view.panel_stride + group * view.group_stride + row
    return (arena_row * 128 + column_bytes % 128).reshape(layout.shape)


def covered(layout: Layout, view: View) -> set[int]:
    return {byte for start, stop in row_spans(layout, view) for byte in range(start * 128, stop * 128, layout.itemsize)}


def assert_is_part(part: panels.Part, expected: np.ndarray, whole: Layout) -> None:
    """The part's values lie where expected, and what it would pad holds no value of the array it is a part of."""
    layout, view = part
    np.testing.assert_array_equal(addresses(layout, view), expected.reshape(layout.shape))
    pads = covered(layout, view) - set(expected.ravel().tolist())
    assert not pads & set(addresses(whole, full_view(whole)).ravel().tolist())
    assert covered(layout, view) <= covered(whole, full_view(whole))


@st.composite
def layouts(draw) -> Layout:
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, width = draw(st.sampled_from([1, 5, 8, 13, 16, 24])), draw(st.sampled_from([7, 64, 128, 200, 256, 384]))
    return Layout((*leading, rows, width), draw(st.sampled_from(STORAGES)), 1)


def test_docstring_example():
    assert doctest.testmod(panels).failed == 0


def test_geometry():
    layout = Layout((2, 3, 13, 5, 30), "f32", 2)
    assert (layout.groups, layout.rows_per_group, layout.padded_rows, layout.rows) == (6, 13, 16, 96)
    assert (layout.columns, layout.row_bytes, layout.panels, layout.part_rows) == (150, 600, 5, 480)
    assert layout.bytes == array_bytes(layout) == 480 * 128
    assert full_view(layout) == View(0, 96, 16)


def test_geometry_flat():
    layout = Layout((3, 100), "bf16", 0)
    assert (layout.groups, layout.rows_per_group, layout.rows, layout.columns, layout.panels) == (1, 5, 8, 300, 1)
    assert layout.bytes == ALIGN
    assert Layout((), "i32", 0).bytes == ALIGN


@pytest.mark.parametrize(("storage", "row_ndim"), [("f32", 1), ("f32", 0), ("int8x2", 1)])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5)])
def test_zero_sizes(shape, storage, row_ndim):
    layout = Layout(shape, storage, row_ndim)
    assert layout.bytes == 0
    assert row_spans(layout, full_view(layout)) == ()


def test_quantized_parts():
    layout = Layout((3, 10, 300), "int8x2", 1)  # 3 panels of 3 * 16 rows; 144 scales
    assert quant_parts(layout, 5120) == (5120, 5120 + 144 * 128, 5120 + 2 * 144 * 128)
    assert layout.bytes == 2 * 144 * 128 + 1024
    one = Layout((3, 10, 300), "int8", 1)
    assert quant_parts(one, 0) == (0, None, 144 * 128)
    with pytest.raises(ValueError, match="storage 'f32' has one part"):
        quant_parts(Layout((8, 128), "f32", 1), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8, 128), "f64", 1), "storage 'f64' is unknown; supported: f32"),
        (((8, -1), "f32", 1), "no negative size"),
        (((8,), "f32", 2), "row_ndim must be 0 to 1"),
        (((8,), "int8", 0), "row_ndim must be at least 1"),
    ],
)
def test_layout_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data())
def test_columns(layout, data):
    start = data.draw(st.integers(0, layout.columns), "start")
    stop = data.draw(st.integers(start, layout.columns), "stop")
    if data.draw(st.booleans(), "whole panels"):
        start, stop = (128 // layout.itemsize * (n * layout.itemsize // 128) for n in (start, stop))
    part = columns(layout, full_view(layout), start, stop)
    whole_panels = start * layout.itemsize % 128 == 0 and (stop * layout.itemsize % 128 == 0 or stop == layout.columns)
    assert (part is not None) == whole_panels
    if part and start < stop:
        assert_is_part(part, addresses(layout, full_view(layout))[..., start:stop], layout)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data())
def test_rows_then_columns_then_groups(layout, data):
    rows = layout.rows_per_group
    start = data.draw(st.sampled_from(range(0, rows, 8)), "start")
    stop = data.draw(st.sampled_from([*range(start + 8, rows, 8), rows]), "stop")
    expected = addresses(layout, full_view(layout))[..., start:stop, :]
    part = slice_rows(layout, full_view(layout), start, stop)
    assert part
    assert_is_part(part, expected, layout)
    first = 128 // layout.itemsize
    if layout.columns > first:
        part = columns(*part, first, layout.columns)
        expected = expected[..., first:]
        assert part
        assert_is_part(part, expected, layout)
    if len(layout.shape) > 2:
        part = slice_groups(*part, layout.shape[0] - 1, layout.shape[0])
        assert part
        assert_is_part(part, expected[-1:], layout)


@pytest.mark.parametrize(("start", "stop"), [(4, 8), (0, 5), (8, 13)])
def test_a_row_slice_whose_pads_are_rows_is_no_view(start, stop):
    layout = Layout((20, 64), "f32", 1)
    assert slice_rows(layout, full_view(layout), start, stop) is None


@pytest.mark.parametrize(
    ("shape", "row_ndim", "new", "new_row_ndim"),
    [
        ((2, 16, 60), 1, (2, 16, 5, 12), 2),  # columns split
        ((2, 13, 5, 12), 2, (2, 13, 60), 1),  # and joined, with pads
        ((2, 16, 60), 1, (32, 60), 1),  # groups joined: rows fill whole granules
        ((2, 13, 60), 1, (26, 60), None),  # not where pads get in between
        ((48, 60), 1, (3, 16, 60), 1),  # rows split
        ((48, 60), 1, (4, 12, 60), None),
        ((2, 24, 60), 1, (3, 16, 60), 1),  # regrouped
        ((2, 13, 60), 1, (1, 2, 13, 1, 60), 2),  # axes of size one: the row axis stays the row axis
        ((13, 60), 1, (1, 13, 60), 1),
        ((60,), 1, (1, 60), 1),
        ((16, 60), 1, (32, 30), None),  # a row must stay a row
        ((16, 60), 1, (960,), None),
        ((16, 60), 0, (960,), 0),  # flat: always
    ],
)
def test_reshape(shape, row_ndim, new, new_row_ndim):
    layout = Layout(shape, "f32", row_ndim)
    part = reshape(layout, full_view(layout), new)
    if new_row_ndim is None:
        assert part is None
        return
    assert part
    assert (part[0].shape, part[0].row_ndim) == (new, new_row_ndim)
    assert_is_part(part, addresses(layout, full_view(layout)), layout)


def test_reshape_of_a_row_slice_keeps_its_gaps():
    layout = Layout((2, 24, 64), "f32", 1)
    part = slice_rows(layout, full_view(layout), 0, 16)
    assert part
    assert reshape(*part, (32, 64)) is None
    split = reshape(*part, (2, 16, 2, 32))
    assert split
    assert_is_part(split, addresses(layout, full_view(layout))[:, :16], layout)


def test_reshape_checks_the_size():
    layout = Layout((4, 6), "f32", 1)
    with pytest.raises(ValueError, match=r"24 values, \(5, 5\) has 25"):
        reshape(layout, full_view(layout), (5, 5))


def test_flat_slices():
    layout = Layout((5, 256), "f32", 0)
    part = slice_groups(layout, full_view(layout), 1, 4)
    assert part
    assert_is_part(part, addresses(layout, full_view(layout))[1:4], layout)
    assert slice_rows(layout, full_view(layout), 1, 4) == part
    odd = Layout((5, 200), "f32", 0)
    assert slice_groups(odd, full_view(odd), 1, 5) is None
    assert columns(layout, full_view(layout), 0, 128) is None


def test_slices_are_checked():
    layout = Layout((2, 16, 64), "f32", 1)
    for cut, size in ((columns, 64), (slice_rows, 16), (slice_groups, 2)):
        with pytest.raises(ValueError, match=rf"\[0, {size + 1}\) is outside \[0, {size}\)"):
            cut(layout, full_view(layout), 0, size + 1)


def test_contiguous_rows_are_one_span():
    layout = Layout((2, 13, 300), "f32", 1)
    assert row_spans(layout, full_view(layout)) == ((0, 10 * 32),)
    part = columns(layout, full_view(layout), 32, 96)
    assert part and row_spans(*part) == ((32, 96),)
    rows = slice_rows(layout, full_view(layout), 8, 13)
    assert rows and len(row_spans(*rows)) == 20
