"""Which JAX this package runs on, checked before anything of JAX is imported.

The kernels rest on Pallas' Mosaic GPU backend and on `jax.extend`, which change between minor releases of JAX. So the range
is closed on both sides, and a JAX outside it is refused by name here, not by an AttributeError deep inside.

Versions are read from the installed distributions: that works, and costs a millisecond, also where the JAX that is found is
too old to be imported at all. Only the release number counts (PEP 440): `0.12.0.dev2026` is taken as 0.12.0, because a
nightly build of a release has the interfaces of that release.
"""

from __future__ import annotations

import re
import warnings
from importlib import metadata

__all__ = ["SUPPORTED_JAX", "check_jax_version", "release"]

# pyproject.toml states the same range for installers; tests/test_versions.py keeps the two equal.
SUPPORTED_JAX = ">=0.11.2,<0.13"
_LOWEST = (0, 11, 2)
_BELOW = (0, 13)

_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def release(version: str) -> tuple[int, ...]:
    """The release number of a PEP 440 ``version``: ``(0, 12, 0)`` for ``"0.12.0.dev2026"``.

    Raises:
      ValueError: ``version`` does not start with a release number.
    """
    match = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise ValueError(f"version {version!r} does not start with a release number such as 0.12.0")
    return tuple(int(part) for part in match.group(1).split("."))


def check_jax_version() -> None:
    """Checks the installed JAX, and that an installed CUDA plugin fits the installed jaxlib.

    Raises:
      ImportError: there is no JAX, or it lies outside :data:`SUPPORTED_JAX`. The message names the range, the version found
        and the command that installs one that fits.

    Warns:
      RuntimeWarning: a CUDA plugin of another release than jaxlib is installed. JAX leaves such a plugin out, so every step
        would run on the CPU.
    """
    found = _installed("jax")
    if found is None:
        raise ImportError(f"jaxarena needs jax {SUPPORTED_JAX}, and no jax is installed here. {_advice()}")
    if not _LOWEST <= release(found) < _BELOW:
        raise ImportError(f"jaxarena needs jax {SUPPORTED_JAX}, but jax {found} is installed here. {_advice()}")
    jaxlib = _installed("jaxlib")
    for plugin in _CUDA_PLUGINS:
        version = _installed(plugin)
        if jaxlib is not None and version is not None and release(version) != release(jaxlib):
            warnings.warn(
                f"{plugin} {version} does not fit jaxlib {jaxlib}: JAX will not use it, and steps will run on the CPU. {_advice()}",
                RuntimeWarning,
                stacklevel=2,
            )


def _installed(distribution: str) -> str | None:
    """The version of an installed ``distribution``, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _advice() -> str:
    """What to type, keeping the CUDA extra that is in use."""
    extras = [plugin.removeprefix("jax-").removesuffix("-plugin") for plugin in _CUDA_PLUGINS if _installed(plugin) is not None]
    extra = f"[{','.join(extras)}]" if extras else ""
    return f"To install one that fits: python -m pip install --upgrade 'jax{extra}{SUPPORTED_JAX}'"
