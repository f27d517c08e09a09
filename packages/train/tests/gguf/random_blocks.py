"""Random blocks of GGUF's quantized types."""

import gguf
import numpy as np

# Bytes of each type's float16 numbers, which random bytes would make infinite or NaN.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "TQ1_0": (52,),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
# Weights of about .1: types with two levels of scales multiply the halves by integers of up to 127.
_SIZES = {"Q4_K": 3e-4, "Q5_K": 2e-4, "Q6_K": 1e-4, "Q2_K": 5e-3, "Q3_K": 2e-3, "Q8_0": 1e-3}


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Returns the bytes of a matrix of `shape` with random entries and scales, uint8[..., bytes]."""
    size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, size_bytes), np.uint8)
    for start in _HALVES[kind]:
        halves = rng.normal(0, _SIZES.get(kind, 0.02), blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
