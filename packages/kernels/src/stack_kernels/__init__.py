"""Fast implementations of stack's ops for TPU, GPU and CPU, and tuned tables that choose among them.

Installing the package is enough: models that call ops use its implementations. Which one, and why::

    import jax
    import jax.numpy as jnp

    import stack_kernels
    from stack_core import ops

    x, weight = jnp.ones((64, 512), jnp.bfloat16), jnp.ones((512, 2048), jnp.bfloat16)
    print(jax.jit(ops.linear)(x, weight).shape)
    print(ops.explain(ops.linear, x, weight))
    print(stack_kernels.expected("linear", {"x": (8, 4096), "weight": (4096, 14336)}, "h200"))
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_kernels.expectations import expected as expected
    from stack_kernels.mesh_types import untyped as untyped
    from stack_kernels.tuning.search import tune as tune
    from stack_kernels.tuning.sources import tuned as tuned
    from stack_kernels.user_kernels import implementation as implementation

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_kernels.expectations": ["expected"],
            "stack_kernels.mesh_types": ["untyped"],
            "stack_kernels.tuning.search": ["tune"],
            "stack_kernels.tuning.sources": ["tuned"],
            "stack_kernels.user_kernels": ["implementation"],
        },
    )
