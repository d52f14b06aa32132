"""``python -m jaxarena tune``: the fastest configs of the products of a step, found on the GPU at hand and written to a file.

Steps launch with them once :func:`jaxarena.pallas.configs.load` has read the file.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax

from jaxarena.kernels import kernel_device
from jaxarena.pallas import configs, tuning

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Adds the command's arguments; returns what runs it."""
    parser.add_argument("--kernel", nargs="+", choices=tuple(tuning.KERNELS), default=list(tuning.KERNELS), help="which kernels (all)")
    parser.add_argument("--shape", nargs="+", required=True, metavar="MxNxK", help="results of m rows and n columns, summed over k")
    parser.add_argument("--trials", type=int, default=24, metavar="N", help="candidates of a product at most (24)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    return run


def run(arguments: argparse.Namespace) -> int:
    """Tunes every kernel for every shape; the file is written after each, so that what was found stays when a later one fails."""
    shapes = [_shape(text) for text in arguments.shape]
    device = kernel_device(True)
    if device is None:
        found = jax.devices()[0]
        raise ValueError(f"tune needs an NVIDIA GPU of compute capability 9.0, got {found.platform} ({found.device_kind})")
    about = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
    }
    tuned: list[configs.Tuned] = []
    for kernel in arguments.kernel:
        for shape in shapes:
            print(f"{kernel} {'x'.join(map(str, shape))}", flush=True)
            best = tuning.tune(configs.Product(kernel, *shape, device.multiprocessors), trials=arguments.trials)
            print(f"  {best.default_milliseconds:.4f} ms as it was, {best.milliseconds:.4f} ms with {best.config}", flush=True)
            tuned.append(best)
            configs.write(arguments.out, tuned, about)
    return 0


def _shape(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise ValueError(f"--shape must be MxNxK, such as 8192x8192x2048, got {text}")
    m, n, k = map(int, text.split("x"))
    return m, n, k
