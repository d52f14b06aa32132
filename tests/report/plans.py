"""Plans to report on: a small step with a loop, one with next to nothing in it, and random ones."""

from __future__ import annotations

import hypothesis.strategies as st

from jaxarena.arena import Scratch, place
from jaxarena.lifetime import Alias, Form, Launch, Loop, Slot, Tensor
from jaxarena.panels import Layout, full_view
from jaxarena.plan import Plan, Temporary

LAUNCH_NAMES = ("embed.1", "rms_norm.1", "project.1", "attention_forward.1", "project_dx.1", "rms_norm_dx.1", "xla.1")


def looped() -> Plan:
    """Launches 1 to 3 run five times; ``kept project.1`` has a slot for each of them and is read after the loop. Launch 3 has scratch."""
    row, wide = Layout((3, 37, 96), "bf16", 1), Layout((3, 37, 224), "f32", 1)
    vector = Tensor("project_dx.1", Layout((111,), "f32", 0))
    tensors = (Tensor("embed.1", row), Tensor("rms_norm.1", row), Tensor("kept project.1", wide, 5), vector)
    aliases = (
        Alias("kept project.1/part.1", "kept project.1", wide, full_view(wide), Slot("scan.1", 0, 1)),
        Alias("kept project.1/part.2", "kept project.1", wide, full_view(wide), Slot(None, 4)),
        Alias("quantized", "rms_norm.1", Layout((3, 37, 96), "int8", 1), None),
    )
    work = (Scratch("partials", "f32", 5000), Scratch("arrivals", "i32", 12, counter=True))
    reads = ((), ("embed.1",), ("rms_norm.1",), ("kept project.1/part.1", "embed.1"), ("kept project.1/part.2",), ("project_dx.1",), ())
    writes = (("embed.1",), ("rms_norm.1",), ("kept project.1/part.1",), ("quantized",), ("project_dx.1",), (), ())
    launches = tuple(
        Launch(name, r, w, work if name.startswith("attention") else ()) for name, r, w in zip(LAUNCH_NAMES, reads, writes, strict=True)
    )
    form = Form("train_step", tensors, aliases, launches, (Loop("scan.1", 1, 3, 5),), frozenset(), frozenset())
    return Plan(form, place(form), (Temporary("xla.1:f32[7]", 7_000_000, 2, 5), Temporary("small", 28, 0, 6)))


def chain(names: list[str], loops: tuple[Loop, ...] = (), form: str = "step", scratch: int = 0) -> Plan:
    """One array a name, of sizes all different; each launch makes one and reads the one before."""
    tensors = tuple(Tensor(name, Layout((11 + 3 * k, 130 + 57 * k), "f32", 1)) for k, name in enumerate(names))
    work = (Scratch("work", "f32", scratch),) if scratch else ()
    launches = tuple(Launch(name, (names[k - 1],) if k else (), (name,), work) for k, name in enumerate(names))
    built = Form(form, tensors, (), launches, loops, frozenset(), frozenset())
    return Plan(built, place(built))


def bare() -> dict[str, Plan]:
    """Plans with next to nothing in them."""
    idle = Form("idle", (), (), (Launch("xla.1", (), ()),), (), frozenset(), frozenset())
    return {"no launches": chain([]), "no arrays": Plan(idle, place(idle)), "one array": chain(["x"])}


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Up to 30 arrays of any length of life, some loops, scratch and temporaries."""
    count = draw(st.integers(1, 30))
    numbers = st.integers(0, count - 1)
    tensors, reads = [], [set() for _ in range(count)]
    for k in range(count):
        shape = draw(st.tuples(st.integers(1, 70), st.integers(1, 300)))
        layout = Layout(shape, draw(st.sampled_from(["f32", "bf16", "int8", "int8x2"])), 1)
        tensors.append(Tensor(f"array.{k}", layout, draw(st.integers(1, 3))))
        reads[draw(st.integers(k, count - 1))].add(f"array.{k}")
    launches = tuple(
        Launch(f"launch.{k}", tuple(sorted(reads[k] - {f"array.{k}"})), (f"array.{k}",), (Scratch("s", "u8", draw(st.integers(0, 9000))),))
        for k in range(count)
    )
    a, b = sorted((draw(numbers), draw(numbers)))
    loops = (Loop("scan.1", a, b, draw(st.integers(0, 9))),) if draw(st.booleans()) else ()
    outputs = draw(st.frozensets(st.sampled_from([t.name for t in tensors])))
    form = Form("random", tuple(tensors), (), launches, loops, frozenset(), outputs)
    first, last = sorted((draw(numbers), draw(numbers)))
    return Plan(form, place(form), (Temporary("t", draw(st.integers(0, 10**7)), first, last),))
