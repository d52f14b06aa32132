from __future__ import annotations

import pytest

from jaxarena.lifetime import Alias, Form, Launch, Loop, Slot, Tensor, home, live_ranges, placeable
from jaxarena.panels import Layout, View, columns, full_view, slice_rows

WIDE = Layout((16, 96), "f32", 1)  # three panels of 16 rows
VIEW = full_view(WIDE)
LEFT, RIGHT = columns(WIDE, VIEW, 0, 32), columns(WIDE, VIEW, 32, 96)
TOP, BOTTOM = slice_rows(WIDE, VIEW, 0, 8), slice_rows(WIDE, VIEW, 8, 16)


def form(launches, *, tensors=(), aliases=(), loops=(), inputs=(), outputs=()) -> Form:
    """``launches`` are strings ``"reads > writes"``, names apart by blanks; names of one letter that are nothing else are tensors
    ``WIDE``."""
    parsed = [Launch(text, *(tuple(side.split()) for side in text.split(">"))) for text in launches]
    known = {part.name for part in (*tensors, *aliases)}
    used = [name for launch in parsed for name in (*launch.reads, *launch.writes)] + [alias.of for alias in aliases]
    tensors = (*tensors, *(Tensor(name, WIDE) for name in dict.fromkeys(used) if len(name) == 1 and name not in known))
    return Form("f", tensors, tuple(aliases), tuple(parsed), tuple(loops), frozenset(inputs), frozenset(outputs))


def whole(name: str, of: str, slot: Slot) -> Alias:
    return Alias(name, of, WIDE, VIEW, slot)


def test_first_touch_to_last():
    f = form(["x > a", "a > b", "a b > c", "c > y"], inputs=["x"], outputs=["y"])
    assert live_ranges(f) == {"x": (0, 0), "a": (0, 2), "b": (1, 2), "c": (2, 3), "y": (3, 3)}
    assert placeable(f) == ("a", "b", "c")


def test_touches_through_any_alias_count():
    left = Alias("left", "a", *LEFT)
    f = form(["> a", "> b", "left > c"], aliases=[left, Alias("left again", "left", *LEFT)])
    assert home(f, "left again") == "a"
    assert live_ranges(f)["a"] == (0, 2)


def test_the_home_of_an_output_is_not_placed():
    f = form(["> a", "a >"], aliases=[Alias("left", "a", *LEFT)], outputs=["left"])
    assert placeable(f) == ()


def test_home_of_an_unknown_name():
    with pytest.raises(ValueError, match="no tensor or alias 'nothing'"):
        home(form(["> a"]), "nothing")


def test_a_quantized_alias_inside_a_block_is_a_home_of_its_own():
    words = Layout((16, 300), "int8", 1)
    part = columns(words, full_view(words), 128, 300)
    inside = Layout((16, 100), "int8", 1)
    assert columns(words, full_view(words), 100, 200) is None
    q = Tensor("q", words)
    f = form(["> q own", "part own >"], tensors=[q], aliases=[Alias("part", "q", *part), Alias("own", "q", inside, None)])
    assert (home(f, "part"), home(f, "own")) == ("q", "own")
    assert placeable(f) == ("q", "own")


@pytest.mark.parametrize("parts", [(LEFT, RIGHT), (TOP, BOTTOM)])
def test_join_in_place(parts):
    aliases = [Alias("one", "a", *parts[0]), Alias("two", "a", *parts[1])]
    assert placeable(form(["> one", "one > two", "a >"], aliases=aliases)) == ("a",)
    assert placeable(form(["> one", "a >", "> two"], aliases=aliases)) == ()
    assert placeable(form(["> one", "two >"], aliases=aliases)) == ()


def test_parts_cut_both_ways():
    aliases = [Alias(n, "a", *p) for n, p in zip(("left", "right", "top"), (LEFT, RIGHT, TOP), strict=True)]
    aliases.append(Alias("top_left", "a", *columns(*TOP, 0, 32)))
    assert placeable(form(["> left", "top_left >"], aliases=aliases)) == ("a",)
    assert placeable(form(["> left", "top >"], aliases=aliases)) == ()
    assert placeable(form(["> left right", "top >"], aliases=aliases)) == ("a",)


def test_reading_before_writing_in_one_launch():
    assert placeable(form(["a > a"])) == ()
    assert placeable(form(["> a", "a > a"])) == ("a",)


def test_a_temporary_of_a_loop_body_lives_within_it():
    f = form(["> x", "x > t", "t > u", "u > t", "x >"], loops=[Loop("l", 1, 3, 5)])
    assert live_ranges(f) == {"x": (0, 4), "t": (1, 3), "u": (2, 3)}
    f = form(["> x", "x > t", "t > u", "u >", "x >"], loops=[Loop("l", 0, 4, 5)])
    assert live_ranges(f)["t"] == (1, 2)


def test_what_a_loop_only_reads_lives_through_it():
    f = form(["> w", "> t", "w t > u", "u >"], loops=[Loop("l", 1, 3, 2)])
    assert live_ranges(f)["w"] == (0, 3)
    assert live_ranges(f)["t"] == (1, 2)


def test_a_carried_array_lives_through_the_loop():
    f = form(["> c", "> t", "c > t", "t > c", "> z"], loops=[Loop("l", 1, 4, 3)])
    assert live_ranges(f)["c"] == (0, 4)
    # Read before written, even without a touch outside: not placeable, but carried.
    f = form(["> t", "c > t", "t > c", "> z"], loops=[Loop("l", 0, 3, 3)])
    assert live_ranges(f)["c"] == (0, 3)
    assert "c" not in placeable(f)


def test_half_carried():
    # The right half is read before the body writes it, so it comes from the iteration before.
    aliases = [Alias("left", "c", *LEFT), Alias("right", "c", *RIGHT)]
    loop = [Loop("l", 1, 4, 3)]
    assert live_ranges(form(["> z", "> left", "c >", "> right", "> z"], aliases=aliases, loops=loop))["c"] == (1, 4)
    assert live_ranges(form(["> z", "> z", "> left right", "c >", "> z"], aliases=aliases, loops=loop))["c"] == (2, 3)


def test_inner_loops_are_settled_first():
    # t is written in the outer body and read in the inner loop: through the inner loop, not the outer.
    f = form(["> a", "> t", "> b", "t >", "> c", "> d"], loops=[Loop("outer", 0, 5, 2), Loop("inner", 2, 4, 2)])
    assert live_ranges(f)["t"] == (1, 4)


def stack(*launches, slots=6, trips=4, moving):
    """Launch 0 is before the loop, the last after it."""
    return form(launches, tensors=[Tensor("s", WIDE, slots)], aliases=moving, loops=[Loop("l", 1, len(launches) - 2, trips)])


def test_stacked_by_one_loop_and_read_backwards_by_another():
    f = form(
        ["> kept", "kept >"],
        tensors=[Tensor("s", WIDE, 4)],
        aliases=[whole("kept", "s", Slot("fwd", 0, 1))],
        loops=[Loop("fwd", 0, 1, 4)],
    )
    assert live_ranges(f) == {"s": (0, 1)}
    aliases = [whole("kept", "s", Slot("fwd", 0, 1)), whole("back", "s", Slot("bwd", 3, -1))]
    loops = [Loop("fwd", 0, 1, 4), Loop("bwd", 2, 3, 4)]
    f = form(["> kept", "> t", "t >", "back >"], tensors=[Tensor("s", WIDE, 4)], aliases=aliases, loops=loops)
    assert live_ranges(f)["s"] == (0, 3)
    assert placeable(f) == ("s", "t")
    short = [Loop("fwd", 0, 1, 3), Loop("bwd", 2, 3, 4)]
    assert placeable(form(["> kept", "> t", "t >", "back >"], tensors=[Tensor("s", WIDE, 4)], aliases=aliases, loops=short)) == ("t",)


CARRY = [
    whole("first", "s", Slot(None, 0)),
    whole("in", "s", Slot("l", 0, 1)),
    whole("out", "s", Slot("l", 1, 1)),
    whole("two_on", "s", Slot("l", 2, 1)),
    whole("last", "s", Slot(None, 4)),
    Alias("kept", "s", WIDE, VIEW, Slot(None, 1), 4),
]


def test_a_carry_written_to_the_next_slot():
    assert placeable(stack("> first", "in >", "> out", "last kept >", moving=CARRY)) == ("s",)


def test_a_carry_without_its_first_slot():
    assert placeable(stack("> t", "in >", "> out", "last >", moving=CARRY)) == ("t",)


def test_a_carry_that_skips_a_slot():
    assert placeable(stack("> first", "in >", "> two_on", "> t", moving=CARRY)) == ("t",)


def test_a_slot_read_in_the_iteration_that_writes_it():
    assert placeable(stack("> t", "> in", "in >", "t >", moving=CARRY)) == ("s", "t")
    assert placeable(stack("> t", "in >", "> in", "t >", moving=CARRY)) == ("t",)


def test_a_slot_of_an_earlier_iteration():
    # Every read is of something written, but from the second iteration on of what the first wrote: through all of the loop.
    f = form(["> z", "> in", "> t", "first t >", "> z"], tensors=[Tensor("s", WIDE, 6)], aliases=CARRY, loops=[Loop("l", 0, 4, 4)])
    assert placeable(f) == ("s", "z", "t")
    assert live_ranges(f) == {"s": (0, 4), "z": (0, 4), "t": (2, 3)}


def test_two_alternating_slots():
    turn = [whole("first", "s", Slot(None, 0)), whole("in", "s", Slot("l", 0, 1, 2)), whole("out", "s", Slot("l", 1, 1, 2))]
    f = stack("> first", "in > t", "t > out", "first >", moving=turn, slots=2, trips=5)
    assert placeable(f) == ("s", "t")
    assert live_ranges(f)["s"] == (0, 3)


def test_a_slot_of_a_run_moves_with_two_loops():
    run = Alias("run", "s", WIDE, VIEW, Slot("outer", 0, 3), 3)
    aliases = [run, whole("one", "run", Slot("inner", 0, 1)), whole("back", "run", Slot("again", 2, -1))]
    loops = [Loop("outer", 0, 2, 2), Loop("inner", 0, 0, 3), Loop("again", 1, 1, 3)]
    f = form(["> one", "back >", "run >", "s >"], tensors=[Tensor("s", WIDE, 6)], aliases=aliases, loops=loops)
    assert placeable(f) == ("s",)
    loops[1] = Loop("inner", 0, 0, 2)
    assert placeable(form(["> one", "back >", "run >", "s >"], tensors=[Tensor("s", WIDE, 6)], aliases=aliases, loops=loops)) == ()


def test_many_iterations_cost_little():
    n = 100_000
    aliases = [whole("kept", "s", Slot("fwd", 0, 1)), whole("back", "s", Slot("bwd", n - 1, -1))]
    loops = [Loop("fwd", 0, 0, n), Loop("bwd", 1, 1, n)]
    assert placeable(form(["> kept", "back >"], tensors=[Tensor("s", WIDE, n)], aliases=aliases, loops=loops)) == ("s",)


def test_a_loop_that_never_runs_writes_nothing():
    assert placeable(form(["> a", "a >"], loops=[Loop("l", 0, 0, 0)])) == ()
    assert placeable(form(["> b", "a >"], loops=[Loop("l", 1, 1, 0)])) == ("b", "a")


def test_arrays_without_values():
    empty = Tensor("e", Layout((0, 4), "f32", 1), 2)
    assert placeable(form(["e >", "> e"], tensors=[empty])) == ("e",)


QUANTIZED = Tensor("q", Layout((16, 256), "int8", 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensors": [Tensor("a", WIDE), Tensor("a", WIDE)]}, "'a' is used twice"),
        ({"aliases": [Alias("v", "nothing", WIDE, VIEW)]}, "alias 'v' names 'nothing'"),
        ({"inputs": ["nothing"]}, "inputs names 'nothing'"),
        ({"outputs": ["nothing"]}, "outputs names 'nothing'"),
        ({"aliases": [Alias("v", "w", WIDE, VIEW), Alias("w", "v", WIDE, VIEW)]}, r"\['v', 'w'\] are parts of each other"),
        ({"tensors": [Tensor("s", WIDE, 0)]}, "'s' must have at least one slot, got 0"),
        ({"loops": [Loop("l", 0, 0, 1), Loop("l", 1, 1, 1)]}, "loop name 'l' is used twice"),
        ({"loops": [Loop("l", 1, 3, 1)]}, "loop 'l' runs launches 1 to 3 1 times; the form has launches 0 to 2"),
        ({"loops": [Loop("l", 0, 1, -1)]}, "-1 times"),
        ({"loops": [Loop("l", 0, 1, 1), Loop("m", 1, 2, 1)]}, "loops 'l' and 'm' cross"),
        ({"aliases": [Alias("v", "a", WIDE, None)]}, "only quantized storage of its own"),
        ({"aliases": [Alias("v", "a", QUANTIZED.layout, full_view(QUANTIZED.layout))]}, "stored as int8 within 'a', stored as f32"),
        ({"tensors": [QUANTIZED], "aliases": [Alias("v", "q", WIDE, VIEW)]}, "stored as f32 within 'q', stored as int8"),
        ({"aliases": [Alias("v", "a", WIDE, View(8, 16, 16))]}, "covers rows outside the 48 of a slot of 'a'"),
        ({"aliases": [Alias("v", "a", WIDE, VIEW, Slot("l", 0, 1))]}, "depends on 'l', which is no loop"),
        ({"aliases": [Alias("v", "a", WIDE, VIEW, Slot(None, 1))]}, "reaches slots 1 to 1 of 1"),
        ({"aliases": [Alias("v", "a", WIDE, VIEW, Slot(None, 0, 0, 0))]}, "modulus must be at least 1, got 0"),
        ({"tensors": [Tensor("s", WIDE, 3)], "aliases": [Alias("v", "s", *LEFT, Slot(), 2)]}, "must be of whole slots"),
    ],
)
def test_a_form_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        form(["> a" if not any(t.name == "a" for t in arguments.get("tensors", [])) else ">", ">", ">"], **arguments)


def test_a_slot_outside_its_loop():
    with pytest.raises(ValueError, match=r"launch 3 .* touches 'in', whose slot depends on loop 'l'"):
        stack("> first", "in >", "> out", "in >", moving=CARRY)
