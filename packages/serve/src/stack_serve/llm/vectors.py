"""Post-processing of embeddings on the host."""

import numpy as np

from stack_core.abi.errors import GenerationError

__all__ = ["finished_vectors"]


def finished_vectors(vectors: np.ndarray, *, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """Cuts embeddings to their first dimensions and scales them to length 1.

    Args:
      vectors: float32[prompts, embed].
      dimensions: number of dimensions that remain, as for models trained with Matryoshka losses (Kusupati et al., 2022,
        arXiv:2205.13147); None keeps all.
      normalize: divides each vector by its Euclidean length.

    Raises:
      GenerationError: the vectors have fewer dimensions.
    """
    available = vectors.shape[1]
    if dimensions is not None and not 1 <= dimensions <= available:
        raise GenerationError(
            f"dimensions={dimensions}: the model's embeddings have {available}. Give 1 to {available}.",
            parameter="dimensions",
        )
    vectors = vectors[:, :dimensions]
    if not normalize:
        return vectors
    # In float64, because squares of float32 overflow beyond 1.8e19. A zero vector stays zero.
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
