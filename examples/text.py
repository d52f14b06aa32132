"""Real text to train on that is on every machine: the sources of Python's own standard library, as bytes.

Three things that a small language model needs of its data, in numpy alone:

- the text, split by *file* into a part to train on and a part held out, both decided by a hash of the file's path, so that
  the split is the same on every machine that has the same Python;
- a sampler that is addressed by step: batch n of a seed is the same bytes whether or not batches 0 to n - 1 were drawn, so a
  resumed run sees what an uninterrupted one sees;
- what simple models reach on the same held-out bytes, so that a loss in bits per byte means something:

  unigram:  p(b) = (n(b) + 1) / (N + 256), counts n of the training text (add-one smoothing);
  bigram:   p(b | a) = (n(a, b) + alpha p(b)) / (n(a) + alpha), the unigram as a Dirichlet prior (MacKay and Peto, "A
            hierarchical Dirichlet language model", 1995). alpha is the power of two that is best by leave-one-out on the
            training text: every training pair is predicted from the counts of all others. Held-out text chooses nothing;
  zlib:     each held-out window compressed on its own at level 9, as raw deflate, without zlib's 6 bytes of header and
            checksum.

How a window of L bytes is counted, the same for a model and for every baseline: its first byte is given and costs nothing,
the other L - 1 bytes are predicted, and the sum of bits is divided by L - 1. zlib cannot be given a byte, so 8 bits are taken
off its size instead: both that and the missing header favour the baseline.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["Baselines", "Text", "baselines", "batches", "held_out_windows", "load_standard_library"]

# One file in this many is held out.
HELD_OUT_ONE_IN = 16

# Folders that are not the library's own prose and code: packages of others, test suites, generated documentation.
_OTHER_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})

type Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Text(NamedTuple):
    """A text in two parts, each a uint8 array of one axis."""

    train: Bytes
    held_out: Bytes


class Baselines(NamedTuple):
    """Bits per predicted byte of three simple models, and the bigram's strength of smoothing that training text chose."""

    unigram: float
    bigram: float
    zlib: float
    bigram_alpha: float


def load_standard_library(limit_bytes: int | None = None) -> Text:
    """The standard library of the running Python, its files in the order of their paths.

    Args:
      limit_bytes: take files, in the order of a hash of their path (a fair sample of the library), while they fit into this
        many bytes in all. None takes every file.

    Raises:
      FileNotFoundError: this Python has no library sources as files (a frozen or zipped installation).
      ValueError: ``limit_bytes`` leaves no text to train on or none to hold out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = {path: (root / path).read_bytes().replace(b"\r\n", b"\n") for path in _library_paths(root)}
    files = {path: text for path, text in files.items() if not _is_generated(path, text)}
    if not files:
        raise FileNotFoundError(f"no .py files of the standard library in {root}: this Python carries its library in another form")
    if limit_bytes is not None:
        files = _within(files, limit_bytes)
    held_out = [path for path in files if _hash("split", path) % HELD_OUT_ONE_IN == 0]
    train = [path for path in files if _hash("split", path) % HELD_OUT_ONE_IN != 0]
    if not held_out or not train:
        raise ValueError(f"limit_bytes={limit_bytes} takes {len(train)} files to train on and {len(held_out)} to hold out: raise it")
    return Text(*(np.frombuffer(b"".join(files[path] for path in part), np.uint8) for part in (train, held_out)))


def _library_paths(root: Path) -> list[str]:
    """The library's sources below ``root``, as sorted posix paths relative to it."""
    found = []
    for folder, subfolders, names in root.walk():
        subfolders[:] = [name for name in subfolders if name not in _OTHER_FOLDERS]
        found += [(folder / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def _is_generated(path: str, text: bytes) -> bool:
    """Whether a script wrote this file: the tables of encodings, and the values of this machine's own build."""
    return (path.startswith("encodings/") and b"generated from" in text[:400]) or path.startswith("_sysconfigdata")


def _within(files: dict[str, bytes], limit_bytes: int) -> dict[str, bytes]:
    """The files that fit into ``limit_bytes``, taken in hash order until one does not, in the order of their paths."""
    taken, total = set(), 0
    for path in sorted(files, key=lambda path: _hash("sample", path)):
        total += len(files[path])
        if total > limit_bytes:
            break
        taken.add(path)
    return {path: text for path, text in files.items() if path in taken}


def _hash(purpose: str, path: str) -> int:
    """64 bits that depend on nothing but the arguments; different purposes give unrelated values."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{path}".encode()).digest()[:8], "big")


def batches(data: Bytes, *, seed: int, batch: int, length: int) -> Callable[[int], Bytes]:
    """A sampler of windows of ``data``: ``batches(...)(step)`` is uint8 ``(batch, length)``, a function of seed and step alone.

    Windows start anywhere, uniformly and independently. To train on ``n`` predictions a window, ask for ``length`` n + 1.

    Raises:
      ValueError: ``data`` is shorter than ``length``.
    """
    if len(data) < length:
        raise ValueError(f"data has {len(data)} bytes, fewer than one window of length={length}")

    def batch_of(step: int) -> Bytes:
        starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, size=batch, endpoint=True)
        return data[starts[:, None] + np.arange(length)]

    return batch_of


def held_out_windows(data: Bytes, count: int, length: int = 1024) -> Bytes:
    """``count`` windows of ``length`` bytes that do not overlap, spread evenly from the first byte to the last: ``(count, length)``.

    Raises:
      ValueError: ``data`` is shorter than ``count`` such windows, or a window has no byte to predict.
    """
    if count < 1 or length < 2:
        raise ValueError(f"count={count} and length={length}: at least one window of at least two bytes is needed")
    if len(data) < count * length:
        raise ValueError(f"data has {len(data)} bytes, fewer than count={count} windows of length={length}")
    starts = np.arange(count) * (len(data) - length) // max(count - 1, 1)
    return data[starts[:, None] + np.arange(length)]


def baselines(train: Bytes, windows: Bytes) -> Baselines:
    """Bits per byte of the three simple models, on the windows that a model is measured on.

    Args:
      train: uint8, the text that counts are taken from.
      windows: uint8 ``(count, length)``, from :func:`held_out_windows`. The first byte of each is given.
    """
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256 * 256).reshape(256, 256).astype(np.float64)
    unigram = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    alpha = _best_alpha(pairs, unigram)
    bigram = (pairs + alpha * unigram) / (pairs.sum(axis=1, keepdims=True) + alpha)

    given, predicted = windows[:, :-1], windows[:, 1:]
    return Baselines(
        unigram=float(-np.log2(unigram[predicted]).mean()),
        bigram=float(-np.log2(bigram[given, predicted]).mean()),
        zlib=sum(8 * _deflated_bytes(window) - 8 for window in windows) / predicted.size,
        bigram_alpha=alpha,
    )


def _best_alpha(pairs: np.ndarray, unigram: np.ndarray) -> float:
    """The power of two whose bigram predicts every pair of the training text best from all its other pairs.

    A pair (a, b) left out lowers n(a, b) and n(a) by one; all n(a, b) occurrences of it are predicted alike.
    """
    first, second = np.nonzero(pairs)
    count = pairs[first, second]
    total = pairs.sum(axis=1)[first]

    def left_out_bits(alpha: float) -> float:
        return float(-(count * np.log2((count - 1 + alpha * unigram[second]) / (total - 1 + alpha))).sum())

    return min((2.0**power for power in range(-4, 13)), key=left_out_bits)


def _deflated_bytes(window: Bytes) -> int:
    """The size of ``window`` as raw deflate at level 9."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return len(compressor.compress(window.tobytes()) + compressor.flush())
