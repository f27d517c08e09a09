"""Parser of op names: named scopes, and the pass of a training step.

JAX names an operation by its path through the program: "jit(step)/transpose(jvp(mlp))/while/body/closed_call/
checkpoint/rematted_computation/attention/dot_general" is a product in the scope "mlp/attention" that the backward pass
recomputes. The parser drops JAX's names of transforms and control flow, and keeps the program's own scopes.
"""

import functools
import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Pass", "Scope", "parse_op_name"]

Pass = Literal["forward", "backward", "recomputed"]


@dataclass(frozen=True)
class Scope:
    """Parsed op name of an operation.

    Attributes:
      names: the program's named scopes, outermost first; a backward operation has the scopes of its forward operation.
      direction: pass of the training step.
      primitive: JAX's name of the operation.
    """

    names: tuple[str, ...]
    direction: Pass
    primitive: str

    @property
    def path(self) -> str:
        return "/".join(self.names)


@functools.lru_cache(maxsize=1 << 16)
def parse_op_name(op_name: str) -> Scope:
    """Parses a name such as "jit(step)/jvp(mlp)/dot_general"; of several that XLA joined by ";", the first."""
    *path, primitive = _split(op_name.partition(";")[0])
    names: list[str] = []
    transforms: set[str] = set()
    for part in path:
        _unwrap(part, names, transforms)
    direction: Pass = "forward"
    if "transpose" in transforms:
        direction = "recomputed" if "rematted_computation" in path else "backward"
    return Scope(tuple(names), direction, primitive)


_WRAPPED: Final = re.compile(r"(\w+)\((.*)\)")
_CONTROL_FLOW: Final = re.compile(
    r"while|body|cond|branch_\d+_fun|scan|checkpoint|remat2?|rematted_computation|closed_call|core_call|eval_jaxpr"
    r"|pjit|xla_call|shard_map|pallas_call|custom_(jvp|vjp)_call(_jaxpr)?|custom_lin|named_call|run_state"
)
_TRANSFORMS: Final = frozenset({"jvp", "transpose", "vmap", "pmap", "remat", "checkpoint", "shard_map"})


def _split(op_name: str) -> list[str]:
    """Splits a name at the slashes that are outside of parentheses."""
    parts, depth = [""], 0
    for character in op_name:
        depth += (character == "(") - (character == ")")
        # A damaged name may close more parentheses than it opens.
        if character == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _unwrap(part: str, names: list[str], transforms: set[str]) -> None:
    """Adds the scopes and transforms of one part, such as "transpose(jvp(mlp))"."""
    if wrapped := _WRAPPED.fullmatch(part):
        word, inner = wrapped.groups()
        if word in _TRANSFORMS:
            transforms.add(word)
            for piece in filter(None, _split(inner)):
                _unwrap(piece, names, transforms)
        return  # jit(name) is a function's name, not a scope
    # `jnp.einsum` names a scope after its equation.
    is_einsum = "->" in part
    if part and not is_einsum and not _CONTROL_FLOW.fullmatch(part):
        names.append(part)
