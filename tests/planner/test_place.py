"""Plans of random forms, run on a memory of stamps and checked by the validator."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxarena.arena import ALIGN, Arena, GiB, MiB, Placed, PlacedScratch, Scratch, place
from jaxarena.lifetime import Form, Launch, Loop, Tensor
from jaxarena.panels import Layout
from jaxarena.planner import PlanError, bound, validate
from jaxarena.planner.place import intervals_of
from tests.planner.forms import forms, simulate


@settings(max_examples=150, deadline=None)
@given(forms())
def test_P4_every_read_finds_what_was_written(form):
    # The validator, which works out on its own what must be placed and for how long, agrees with the planner on both counts.
    for reuse in (True, False):
        arena = place(form, reuse=reuse)
        validate(form, arena)
        simulate(form, arena)


@settings(max_examples=50, deadline=None)
@given(forms(), st.data())
def test_renaming_and_reordering_change_no_total(form, data):
    order = data.draw(st.permutations(range(len(form.tensors))), "order")
    shuffled = dataclasses.replace(form, tensors=tuple(form.tensors[k] for k in order))
    assert place(shuffled).bytes == place(form).bytes
    assert {p.name: p for p in place(shuffled).placed} == {p.name: p for p in place(form).placed}


@settings(max_examples=50, deadline=None)
@given(forms())
def test_at_least_the_bound(form):
    arrays, scratch = intervals_of(form)
    arena = place(form)
    limit = bound([*arrays, *(interval for _, interval in scratch)])
    assert limit <= arena.bytes <= place(form, reuse=False).bytes
    assert limit == max((arena.live_bytes(t) for t in range(len(form.launches))), default=0)


SMALL, LARGE = Layout((8, 32), "f32", 1), Layout((8, 96), "f32", 1)
FORM = Form(
    "f",
    (Tensor("a", LARGE), Tensor("b", SMALL), Tensor("c", LARGE), Tensor("y", SMALL)),
    (),
    (
        Launch("make a", (), ("a",)),
        Launch("a to b", ("a",), ("b",), (Scratch("partials", "f32", 1000), Scratch("arrivals", "i32", 8, counter=True))),
        Launch("b to c", ("b",), ("c",), (Scratch("arrivals", "i32", 1032, counter=True), Scratch("more", "u32", 4, counter=True))),
        Launch("c to y", ("c",), ("y",)),
    ),
    (Loop("l", 1, 2, 2),),
    frozenset(),
    frozenset({"y"}),
)


def test_a_plan_by_hand():
    # a is read in the loop and made outside it: through the loop. c is written in the loop and read after it: the same. b is the
    # loop body's own. Largest first, ties to the earlier: a at 0, c beside it, then b, then scratch, which lives beside all three.
    assert place(FORM) == Arena(
        placed=(Placed("a", 3072, 0, 0, 2), Placed("b", 1024, 6144, 1, 2), Placed("c", 3072, 3072, 1, 3)),
        scratch=(PlacedScratch("partials", 1000, 7168, 1),),
        counters=3 * ALIGN,
        bytes=8192,
    )


def test_P4_reuse_off_shares_nothing():
    arena = place(FORM, reuse=False)
    spans = sorted((p.offset, p.end) for p in (*arena.placed, *arena.scratch))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert arena.bytes == 3072 + 1024 + 3072 + 1024


def test_P1_a_small_array_past_31_bits():
    # 3 GiB beside 1 MiB: the small one's offset, or the large one's end, is past 2**31; both lie at rows that an int32 holds.
    rows = 3 * GiB // 128
    big, small = Tensor("big", Layout((rows, 32), "f32", 1)), Tensor("small", Layout((8192, 32), "f32", 1))
    launches = (Launch("make", (), ("big", "small")), Launch("use", ("big", "small"), ()))
    form = Form("f", (big, small), (), launches, (), frozenset(), frozenset())
    arena = place(form)
    validate(form, arena)
    assert arena.bytes == 3 * GiB + MiB
    assert [p.offset for p in arena.placed] == [0, 3 * GiB]
    assert all(p.row < 2**31 for p in arena.placed)


def test_P1_an_arena_past_the_last_row_is_refused_with_what_makes_it_so():
    huge = [Tensor(f"huge{k}", Layout((2**30, 32), "f32", 1)) for k in range(2)]
    scratch = Scratch("partials", "f32", 4096)
    launches = (Launch("make", (), ("huge0",)), Launch("both", ("huge0",), ("huge1",), (scratch,)), Launch("use", ("huge1",), ()))
    form = Form("f", tuple(huge), (), launches, (), frozenset(), frozenset())
    message = (
        r"form 'f' cannot fit in 274877906816 bytes: it needs at least 274877911040, and 274877911040 as planned. "
        r"Launch 1 \(both\) needs the most: 274877911040 bytes live at time 1: "
        r"huge0 \(137438953472\), huge1 \(137438953472\), scratch 'partials' \(4096\)"
    )
    with pytest.raises(ValueError, match=message):
        place(form)


def test_a_capacity_that_was_not_met():
    assert place(FORM, capacity=8192).bytes == 8192
    with pytest.raises(ValueError, match=r"form 'f' cannot fit in 8191 bytes: .* Launch 1 \(a to b\) needs the most"):
        place(FORM, capacity=8191)
    straight = dataclasses.replace(FORM, loops=())
    with pytest.raises(ValueError, match=r"form 'f' was not found to fit in 8191 bytes: it needs at least 5120, and 8192 as planned"):
        place(straight, capacity=8191, reuse=False)


def test_a_form_without_arrays():
    assert place(Form("f", (), (), (Launch("nothing", (), ()),), (), frozenset(), frozenset())) == Arena((), (), 0, 0)
    assert place(Form("f", (), (), (), (), frozenset(), frozenset())) == Arena((), (), 0, 0)


def broken(which: int | None = None, **changes) -> Arena:
    """The plan of FORM with its array number ``which`` (3: the scratch, None: the arena itself) changed."""
    arena = place(FORM)
    if which is None:
        return dataclasses.replace(arena, **changes)
    if which == 3:
        return dataclasses.replace(arena, scratch=(dataclasses.replace(arena.scratch[0], **changes),))
    placed = list(arena.placed)
    placed[which] = dataclasses.replace(placed[which], **changes)
    return dataclasses.replace(arena, placed=tuple(placed))


PARTIALS = "scratch 'partials' of launch 1"


@pytest.mark.parametrize(
    ("arena", "verdicts"),
    [
        (broken(placed=place(FORM).placed[1:]), {("missing", ("a",))}),
        (broken(scratch=()), {("missing", (PARTIALS,))}),
        (broken(1, name="y"), {("unknown", ("y",)), ("missing", ("b",))}),
        (broken(3, launch=2), {("unknown", ("scratch 'partials' of launch 2",)), ("missing", (PARTIALS,))}),
        (broken(placed=(*place(FORM).placed, place(FORM).placed[1])), {("duplicate", ("b",))}),
        (broken(1, bytes=512), {("wrong size", ("b",))}),
        (broken(3, bytes=1004), {("wrong size", (PARTIALS,))}),
        (broken(0, bytes=3071, offset=8192), {("wrong size", ("a",)), ("past the end", ("a",))}),
        (broken(3, offset=7172), {("misaligned", (PARTIALS,))}),
        (broken(3, offset=8192), {("past the end", (PARTIALS,))}),
        (broken(0, offset=-1024), {("past the end", ("a",))}),
        (broken(0, last=1), {("wrong lifetime", ("a",))}),
        (broken(2, first=2), {("wrong lifetime", ("c",))}),
        (broken(1, offset=2048), {("overlap", ("a", "b"))}),
        (broken(3, offset=6144), {("overlap", ("b", PARTIALS))}),
        (broken(counters=1024), {("wrong counters", ())}),
    ],
)
def test_a_broken_plan_gets_its_verdict(arena, verdicts):
    with pytest.raises(PlanError) as error:
        validate(FORM, arena)
    assert {(fault.verdict, fault.names) for fault in error.value.faults} == verdicts
    assert isinstance(error.value, ValueError)
    assert all(verdict in str(error.value) for verdict, _ in verdicts)


@settings(max_examples=60, deadline=None)
@given(forms(), st.data())
def test_a_moved_array_is_caught_or_harmless(form, data):
    arena = place(form)
    if not arena.placed:
        return
    k = data.draw(st.integers(0, len(arena.placed) - 1), "which")
    offset = ALIGN * data.draw(st.integers(0, max(0, arena.bytes - arena.placed[k].bytes) // ALIGN), "granule")
    placed = [dataclasses.replace(p, offset=offset) if i == k else p for i, p in enumerate(arena.placed)]
    moved = dataclasses.replace(arena, placed=tuple(placed))
    try:
        validate(form, moved)
    except PlanError as error:
        assert {fault.verdict for fault in error.faults} == {"overlap"}
    else:
        simulate(form, moved)
