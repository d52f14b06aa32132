"""What pictures show: the boxes are the placement, and kinds have their colours."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from jaxarena.plan import Plan
from jaxarena.report.scene import OTHER, PALETTE, ink_on, kinds_of, scene
from tests.report.plans import chain, looped, random_plans


def test_names_that_begin_with_one_word_are_one_kind_labelled_by_what_they_share() -> None:
    families = {
        "project": ["project.3", "project_dx.1", "kept project_swiglu.2"],
        "rms_norm": ["rms_norm.1", "rms_norm_dx.4"],
        "add_rms_norm": ["add_rms_norm.1"],
        "gated_delta_rule": ["gated_delta_rule_forward.1", "gated_delta_rule_backward.1"],
        "moe": ["moe_gate_up.1", "moe_down.9"],
        "scan": ["scan.1 enters.1"],
        "x": ["x1", "layer0/x2 part:4", "carry x.3", "join layer1/x.1"],
        "kept": ["kept.1"],
        "unnamed": ["7"],
    }
    labels = {name: label for label, names in families.items() for name in names}
    assert kinds_of(labels) == labels


def test_an_array_has_the_kind_of_its_launch() -> None:
    drawn = scene(looped())
    kinds = {box.name: drawn.kinds[box.kind][0] for box in drawn.boxes}
    assert kinds == {
        "embed.1": "embed",
        "kept project.1": "project",
        "quantized": "quantized",
        "rms_norm.1": "rms_norm",
        "project_dx.1": "project",
        "attention_forward.1 partials": "attention_forward",
    }
    of_launches = ["embed", "rms_norm", "project", "attention_forward", "project", "rms_norm", "xla"]
    assert [drawn.kinds[k][0] for k in drawn.launch_kinds] == of_launches


def test_a_box_knows_who_writes_and_reads_it() -> None:
    kept = next(box for box in scene(looped()).boxes if box.name == "kept project.1")
    assert (kept.writes, kept.reads, kept.first, kept.last, kept.slots) == ((2,), (3, 4), 1, 4, 5)
    assert kept.detail == "f32 [3, 37, 224], 5 slots"


def test_the_largest_kind_comes_first_and_the_last_share_a_colour() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(PALETTE) + 3]
    drawn = scene(chain(list(letters)))
    assert [colour for _, colour in drawn.kinds] == [*PALETTE, OTHER]
    assert drawn.kinds[0][0] == letters[-2]  # the largest that lives for two launches
    assert drawn.kinds[-1][0] == "3 others"
    assert sum(kind == len(PALETTE) for kind in drawn.launch_kinds) == 3
    assert scene(chain(list(letters[:-2]))).kinds[-1] == ("a", OTHER)


@given(random_plans())
def test_the_boxes_are_the_placement(plan: Plan) -> None:
    drawn = scene(plan)
    arrays = [(p.name, p.bytes, p.offset, p.first, p.last) for p in plan.arena.placed]
    assert [(b.name, b.bytes, b.offset, b.first, b.last) for b in drawn.boxes if not b.scratch] == arrays
    assert len(drawn.boxes) == len(arrays) + len(plan.arena.scratch)
    assert all(plan.launches[b.first].name in b.name for b in drawn.boxes if b.scratch)
    assert max(drawn.live, default=0) == plan.bound
    assert max(drawn.xla, default=0) == plan.xla_bytes
    assert drawn.unshared >= plan.bytes
    for box in drawn.boxes:
        assert all(box.first <= t <= box.last for t in (*box.writes, *box.reads))


def test_labels_read_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for colour in (*PALETTE, OTHER):
        dark, light = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2 AA
    assert ink_on("#101820") == "#ffffff"
