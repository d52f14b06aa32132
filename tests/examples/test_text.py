"""The example's text: a split that cannot leak, batches addressed by step, baselines against sums written out."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from pathlib import Path

import chex
import hypothesis.strategies as st
import numpy as np
import pytest
import text
from hypothesis import given


def random_bytes(seed: int, size: int, values: int = 256) -> text.Bytes:
    return np.random.default_rng(seed).integers(0, values, size).astype(np.uint8)


def test_the_library_is_found_and_split_by_file() -> None:
    train, held_out = text.load_standard_library()
    chex.assert_type([train, held_out], np.uint8)
    chex.assert_rank([train, held_out], 1)
    assert len(train) > 5_000_000
    assert 0.02 < len(held_out) / len(train) < 0.12
    # The sources' own words, in one part or the other, and no machine's build values or generated tables.
    both = train.tobytes() + held_out.tobytes()
    assert b"class OrderedDict(dict):" in both
    assert b"build_time_vars" not in train.tobytes()[:100_000]
    assert b"generated from 'MAPPINGS" not in both


def test_the_same_text_every_time() -> None:
    chex.assert_trees_all_equal(text.load_standard_library(1_000_000), text.load_standard_library(1_000_000))


def test_a_limit_takes_whole_files_and_keeps_the_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number:03}.py").write_text(f"<{number:03}>" * (1 + number % 7))
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    full, small = text.load_standard_library(), text.load_standard_library(2000)
    sizes = {number: 5 * (1 + number % 7) for number in range(200)}
    for part, whole in zip(small, full, strict=True):
        assert numbers(part) < numbers(whole)
        assert len(part) == sum(sizes[number] for number in numbers(part))
    assert 2000 - 35 < sum(map(len, small)) <= 2000
    assert numbers(full.train).isdisjoint(numbers(full.held_out))
    # A sample of the library, not the first files of it.
    assert max(numbers(small.train)) > 150


def numbers(part: text.Bytes) -> set[int]:
    """Which of the numbered files are in ``part``."""
    return {int(number) for number in re.findall(rb"<(\d+)>", part.tobytes())}


def test_a_limit_too_small_for_both_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes=10 takes 0 files"):
        text.load_standard_library(10)


def test_an_installation_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="standard library"):
        text.load_standard_library()


def test_folders_of_others_and_generated_files_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = {
        "a.py": "kept a\r\n",
        "pkg/b.py": "kept b\n",
        "encodings/aliases.py": "kept c\n",
        "encodings/cp1252.py": '""" Mapping generated from a table """\n',
        "site-packages/numpy/x.py": "not ours\n",
        "test/test_a.py": "a test\n",
        "pkg/tests/test_b.py": "a test\n",
        "_sysconfigdata__linux.py": "build_time_vars = 1\n",
        "notes.txt": "no source\n",
    }
    for path, content in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content.encode())
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(text, "_hash", lambda purpose, path: 0 if path == "pkg/b.py" else 1)
    train, held_out = text.load_standard_library()
    assert train.tobytes() == b"kept a\nkept c\n"
    assert held_out.tobytes() == b"kept b\n"


@given(seed=st.integers(0, 2**31), step=st.integers(0, 10**6), batch=st.integers(1, 7), length=st.integers(1, 61))
def test_a_batch_depends_on_seed_and_step_alone(seed: int, step: int, batch: int, length: int) -> None:
    data = random_bytes(3, 211)
    batch_of = text.batches(data, seed=seed, batch=batch, length=length)
    drawn = batch_of(step)
    chex.assert_shape(drawn, (batch, length))
    batch_of(step + 1)
    chex.assert_trees_all_equal(drawn, batch_of(step), text.batches(data, seed=seed, batch=batch, length=length)(step))
    assert all(window.tobytes() in data.tobytes() for window in drawn)


def test_batches_differ_between_steps_and_seeds() -> None:
    data = random_bytes(5, 4001)
    drawn = {text.batches(data, seed=seed, batch=3, length=29)(step).tobytes() for seed in range(4) for step in range(5)}
    assert len(drawn) == 20


def test_batches_reach_the_first_and_the_last_byte() -> None:
    data = np.arange(9, dtype=np.uint8)
    windows = text.batches(data, seed=0, batch=300, length=4)(0)
    assert set(windows[:, 0].tolist()) == set(range(6))


def test_batches_of_too_short_a_text_are_refused() -> None:
    with pytest.raises(ValueError, match="data has 10 bytes, fewer than one window of length=11"):
        text.batches(random_bytes(0, 10), seed=0, batch=1, length=11)


@given(count=st.integers(1, 9), length=st.integers(2, 33), spare=st.integers(0, 100))
def test_held_out_windows_do_not_overlap_and_span_the_text(count: int, length: int, spare: int) -> None:
    data = np.arange(count * length + spare) % 251
    windows = text.held_out_windows(data, count, length)
    starts = np.arange(count * length + spare)[: len(data) - length + 1]
    positions = text.held_out_windows(np.arange(len(data)), count, length)
    chex.assert_shape(windows, (count, length))
    assert len(np.unique(positions)) == count * length
    assert positions[0, 0] == 0
    assert count == 1 or positions[-1, -1] == starts[-1] + length - 1


@pytest.mark.parametrize(("count", "length", "message"), [(0, 8, "count=0"), (3, 1, "length=1"), (7, 15, "data has 100 bytes")])
def test_held_out_windows_refuse_what_cannot_be(count: int, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text.held_out_windows(random_bytes(1, 100), count, length)


def test_baselines_equal_their_formulas_written_out() -> None:
    train, windows = random_bytes(7, 611, values=5), random_bytes(8, 3 * 37, values=6).reshape(3, 37)
    measured = text.baselines(train, windows)
    sequence = train.tolist()
    pairs = list(itertools.pairwise(sequence))

    def unigram(b: int) -> float:
        return (sequence.count(b) + 1) / (len(sequence) + 256)

    def bigram(a: int, b: int, alpha: float, left_out: int = 0) -> float:
        before = sum(first == a for first, _ in pairs) - left_out
        return (pairs.count((a, b)) - left_out + alpha * unigram(b)) / (before + alpha)

    def left_out_bits(alpha: float) -> float:
        return -sum(math.log2(bigram(a, b, alpha, left_out=1)) for a, b in set(pairs) for _ in range(pairs.count((a, b))))

    alphas = [2.0**power for power in range(-4, 13)]
    assert measured.bigram_alpha == min(alphas, key=left_out_bits)
    predicted = [(int(a), int(b)) for window in windows for a, b in itertools.pairwise(window)]
    assert measured.unigram == pytest.approx(-sum(math.log2(unigram(b)) for _, b in predicted) / len(predicted), rel=1e-12)
    expected = -sum(math.log2(bigram(a, b, measured.bigram_alpha)) for a, b in predicted) / len(predicted)
    assert measured.bigram == pytest.approx(expected, rel=1e-12)
    # zlib's stream is raw deflate between two bytes of header and four of checksum.
    deflated = sum(len(zlib.compress(window.tobytes(), 9)) - 6 for window in windows)
    assert measured.zlib == pytest.approx((8 * deflated - 8 * 3) / (3 * 36), rel=1e-12)


def test_baselines_of_noise_are_eight_bits() -> None:
    measured = text.baselines(random_bytes(11, 200_003), text.held_out_windows(random_bytes(12, 20_011), 16, 1024))
    assert measured.unigram == pytest.approx(8, abs=0.02)
    assert measured.bigram == pytest.approx(8, abs=0.1)
    assert 8 <= measured.zlib < 8.2


def test_baselines_are_ordered_on_real_text() -> None:
    train, held_out = text.load_standard_library()
    measured = text.baselines(train, text.held_out_windows(held_out, 64))
    assert 2.5 < measured.zlib < measured.bigram < measured.unigram < 5.5
