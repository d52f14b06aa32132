"""What holds for every test: JAX on the CPU, shapes checked as annotated, reproducible hypothesis runs, gpu tests skipped."""

from __future__ import annotations

import importlib.util
import os

# Before JAX is imported. The GPU tests name their platform themselves: JAX_PLATFORMS=cuda,cpu (see `make gpu-test`).
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    # A test runs a program once or twice: without LLVM's optimizations the suite takes two thirds of the time. `make slow` keeps them.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    # Pallas' interpret mode has a thread for every warpgroup, and XLA runs their callbacks in a pool of a thread a core. With fewer
    # of those than warpgroups that wait for each other, a launch hangs.
    os.environ.setdefault("PJRT_NPROC", "16")

import hypothesis
import jaxtyping
import pytest

# Before jaxarena is imported: every function of jaxarena.ops then checks the shapes and dtypes of its annotations when called. An
# environment given by PYTHON=... may lack beartype; then they go unchecked there.
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook("jaxarena.ops", "beartype.beartype")

# derandomize: a failure in one run is a failure in all. No deadline: the first example of a shape waits for XLA to compile.
hypothesis.settings.register_profile(
    "jaxarena", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jaxarena")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import jax  # a run without gpu tests starts no backend here

    if jax.default_backend() != "gpu":
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX_PLATFORMS=cuda,cpu"))
