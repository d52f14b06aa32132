"""What keeping arrays for the backward pass in words costs and saves: the demo trained with each storage, the same steps.

python benchmarks/storage.py            # writes results/storage-<device>.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import results

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_text

TARGETS = {"int8": "within 1 %", "int8x2": "within 0.1 %"}


def train(*options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train_text.main(["--quiet", "--sample", "0", "--out", folder, *options])


def main() -> None:
    rows = []
    for dtype, storages in (("float32", ("bf16", "int8x2", "int8")), ("bfloat16", ("int8",))):
        plain = train("--dtype", dtype)
        name = "f32" if dtype == "float32" else "bf16"
        for storage in storages:
            found = train("--dtype", dtype, "--storage", storage)
            case = f"demo {name}, kept in {storage}"
            kept = found["plan"].kept_bytes[storage]
            as_is = kept + found["plan"].saved_bytes
            ours, theirs = found["held_out"], plain["held_out"]
            rows += [
                results.Row(f"{case}: held out", "bits/byte", ours, f"kept in {name}", theirs, theirs / ours, TARGETS.get(storage, "")),
                results.Row(f"{case}: those arrays", "bytes", kept, f"kept in {name}", as_is, as_is / kept),
                results.Row(
                    f"{case}: arena",
                    "bytes",
                    found["plan"].bytes,
                    f"kept in {name}",
                    plain["plan"].bytes,
                    plain["plan"].bytes / found["plan"].bytes,
                ),
            ]
    print(results.write("storage", jax.devices()[0].platform, rows, results.device_name()))


if __name__ == "__main__":
    main()
