"""What the tests of every op share beside ``jaxarena.testing``: the formats they run in, and errors expected with their words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import jaxtyping
import pytest

DTYPES = (jnp.float32, jnp.bfloat16)


@contextlib.contextmanager
def raises(error: type[Exception], *texts: str) -> Iterator[None]:
    """Expects ``error`` with a message that holds every one of ``texts``, with the run-time annotation checker out of the way."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(error) as caught:
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    for text in texts:
        assert text in str(caught.value)
