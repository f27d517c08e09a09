"""Category of work of an instruction, from its opcode or the heaviest opcode in its fusion.

Copies and fills that run as such on a GPU have categories of their own, by the name of their event.
"""

import re
from typing import Final

from stack_profile.traces.instructions import CONTAINERS, Instruction
from stack_profile.traces.operations import Operation

__all__ = ["HOST_COPY", "category", "category_of"]

HOST_COPY: Final = "copy to host"
_COPIES: Final = (
    (re.compile(r"(?i)memcpy_?(D2H|DtoH)"), HOST_COPY),
    (re.compile(r"(?i)memcpy_?(H2D|HtoD)"), "copy from host"),
    (re.compile(r"(?i)memcpy_?(P2P|PtoP)"), "copy between devices"),
    (re.compile(r"(?i)memcpy"), "copy on device"),
    (re.compile(r"(?i)memset"), "fill"),
)


def category_of(operation: Operation) -> str:
    """Returns the category of an operation, also of copies and fills without an instruction."""
    found = (name for pattern, name in _COPIES if operation.kernel and pattern.search(operation.kernel))
    return next(found, "") or category(operation.instruction)


# In order of precedence: the first kind that occurs in a fusion names the fusion.
_KINDS: Final = (
    ("matrix product", {"dot", "ragged-dot", "scaled-dot"}),
    ("convolution", {"convolution"}),
    (
        "collective",
        {
            "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
            "reduce-scatter", "send", "recv",
        },
    ),
    ("sort", {"sort", "topk"}),
    ("gather and scatter", {"gather", "scatter", "select-and-scatter"}),
    ("random numbers", {"rng", "rng-bit-generator", "rng-get-and-update-state"}),
    ("custom call", {"custom-call"}),
    ("reduction", {"reduce", "reduce-window"}),
    ("slice and update", {"dynamic-slice", "dynamic-update-slice", "slice", "pad", "concatenate"}),
    ("input and output", {"infeed", "outfeed"}),
    ("factorization", {"cholesky", "triangular-solve", "fft"}),
)  # fmt: skip
_MOVES: Final = frozenset({"copy", "transpose", "reshape", "bitcast", "broadcast", "reverse", "bitcast-convert"})
_PASSIVE: Final = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "iota"})
_PRODUCTS_OF_LIBRARIES: Final = ("__cublas$", "__cudnn$conv", "__onednn$matmul")


def category(instruction: Instruction | None) -> str:
    """Returns the category, such as "matrix product" or "elementwise"; "unknown" for None."""
    if instruction is None:
        return "unknown"
    if instruction.opcode in CONTAINERS:
        return "loops and calls"
    if instruction.target.startswith(_PRODUCTS_OF_LIBRARIES):
        return "convolution" if "conv" in instruction.target else "matrix product"
    # An asynchronous operation has the category of its work.
    opcodes = {each.removesuffix("-start").removesuffix("-done") for each in instruction.opcodes}
    for name, kinds in _KINDS:
        if opcodes & kinds:
            return name
    # A fusion of moves also contains its parameters and constants.
    if opcodes - _PASSIVE <= _MOVES:
        return "copy and layout"
    return "elementwise"
