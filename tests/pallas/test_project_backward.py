"""Gradients of a projection in int8 on the CPU: all of their launches over one arena, interpreted, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.project_quantized import exact_product
from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.project_backward import dweight_int8
from tests.pallas.arenas import assert_no_race, launch_writing, lower, relative_error
from tests.pallas.backward import Backward


@pytest.mark.slow  # six interpreted kernels, twice
def test_all_launches_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    case = Backward(m=192, n=256, k=128)

    def kernel(ref: object, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return case.launches(ref, w, product=TileConfig(128, 128, 2, 2), small=True, multiprocessors=2, interpret=True)

    after, scales = launch_writing(kernel, case.arena.array(), case.written, case.w)
    case.check(after, *scales)
    assert_no_race(capsys)


def test_float32_result_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    m, n, k = 256, 96, 72
    random = np.random.default_rng(3)
    x, dy = (jnp.asarray(random.standard_normal((m, columns)), jnp.float32) for columns in (k, n))
    x_columns, (words, scales) = row_parts(x.T, "int8"), tile_parts(dy, "int8")
    config = TileConfig(64, 64, 1, 3, together=2)  # its piece is halved
    dw = dweight_int8(None, x_columns, words, scales, m=m, n=n, k=k, config=config, multiprocessors=2, interpret=True)
    assert dw is not None and dw.dtype == jnp.float32
    assert relative_error(dw, exact_product(x_columns, (words, scales))) < 8 * 2.0**-24
    assert_no_race(capsys)


def test_lowers_for_cuda() -> None:
    case = Backward(m=320, n=384, k=640)
    lower(lambda ref, w: case.launches(ref, w, product=None, small=False), case.arena.array(), case.w)


def test_says_what_result_it_does_not_take() -> None:
    words, scales = jnp.zeros((8, 128), jnp.int8), jnp.zeros((1, 8))
    weight, weight_scales = jnp.zeros((96, 128), jnp.int8), jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        dweight_int8(None, (words, scales), weight, weight_scales, m=128, n=96, k=8, out_dtype=jnp.float16)
