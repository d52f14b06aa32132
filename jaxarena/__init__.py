"""jaxarena runs a JAX training or inference step as a planned sequence of launches over one donated arena buffer."""

from jaxarena._versions import check_jax_version

check_jax_version()

from jaxarena import checkpoint_policies, ops  # noqa: E402  (the version is checked before anything of JAX is touched)
from jaxarena.arena import ALIGN, GiB, KiB, MiB  # noqa: E402
from jaxarena.plan import ArenaBuffer, Plan  # noqa: E402
from jaxarena.program import Program, ProgramPlan  # noqa: E402
from jaxarena.sizing import max_batch  # noqa: E402
from jaxarena.step import Step, jit  # noqa: E402

__all__ = [
    "ALIGN",
    "ArenaBuffer",
    "GiB",
    "KiB",
    "MiB",
    "Plan",
    "Program",
    "ProgramPlan",
    "Step",
    "checkpoint_policies",
    "jit",
    "max_batch",
    "ops",
]
__version__ = "0.1.0"
