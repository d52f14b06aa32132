"""Reading and writing minimalloc's CSV."""

from __future__ import annotations

import pytest

from jaxarena.planner import Interval, minimalloc, solve
from tests.planner.problems import instance


def test_reads_what_it_writes(tmp_path):
    found = instance("A")
    assert len(found) == 154
    assert found[0] == Interval("0", 656_384, 995_328, 1_000_447, 1)
    offsets = solve(found, nodes=0).offsets
    minimalloc.write(tmp_path / "out.csv", found, offsets)
    again = minimalloc.read(tmp_path / "out.csv")
    assert {i.name: i.offset for i in again} == offsets
    assert solve(again).offsets == offsets


def test_optional_columns(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("id,size,lower,upper,offset,alignment\na,5,0,2,,16\nb,7,1,3,32,\n")
    assert minimalloc.read(path, alignment=8) == [Interval("a", 5, 0, 1, 16), Interval("b", 7, 1, 2, 8, 32)]
    minimalloc.write(path, minimalloc.read(path, alignment=8), {"a": 0, "b": 32})
    assert path.read_text() == "id,lower,upper,size,alignment,offset\na,0,2,5,16,0\nb,1,3,7,8,32\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name the columns id, lower, upper, size; missing: id, lower, upper, size"),
        ("id,lower,upper\n", "missing: size"),
        ("id,lower,upper,size\na,0,1,2\nb,0,x,2\n", "line 3: upper must be a whole number, got 'x'"),
        ("id,lower,upper,size\na,0,1\n", "line 2: has fewer values than the first line names columns"),
        ("id,lower,upper,size\na,1,1,4\n", "line 2: upper must be above lower, got 1 and 1"),
        ("id,lower,upper,size\na,0,1,-4\n", "line 2: Interval 'a': needs bytes >= 0"),
        ("id,lower,upper,size,alignment,offset\na,0,1,4,8,4\n", "line 2: Interval 'a': offset must be a multiple of 8"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "in.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        minimalloc.read(path)
    assert str(error.value).startswith(str(path))
