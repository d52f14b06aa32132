"""The demo, start to end: held-out bits a byte beside what simple models reach on the same bytes, and how long it took.

    python benchmarks/demo.py            # writes results/demo-<device>.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import jax
import results

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_text


def main() -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = train_text.main(["--quiet", "--out", folder])
    seconds = time.perf_counter() - start
    ours, baselines = found["held_out"], found["baselines"]
    peers = {"zlib -9 on each window": "zlib", "bigram, smoothed": "bigram", "unigram": "unigram"}
    rows = [
        results.Row("demo held out", "bits/byte", ours, name, baselines[key], baselines[key] / ours, "below all three")
        for name, key in peers.items()
    ]
    rows.append(results.Row(f"demo, {len(found['losses'])} steps, from start to end", "s", seconds, target="under 180"))
    print(results.write("demo", jax.devices()[0].platform, rows, results.device_name()))


if __name__ == "__main__":
    main()
