"""Hadamard rotations: inputs and weights are rotated, which spreads outliers over all inputs of a block.

For y = x W and R = R^T = R^-1 with entries +-1 / sqrt(block):

    y = (x R) (R W)

An entry of x R is a sum of all entries of a block, so single large entries no longer determine the range of a row.

Sources: Chee et al., QuIP, 2023 (arXiv:2307.13304); Ashkboos et al., QuaRot, 2024 (arXiv:2404.00456). Departures:
1. Rotations act online, on the inputs of a product. QuaRot folds the rotation of the residual stream into
   the matrices around it, which needs norms without weights before and after. An online rotation acts on any product.
2. Blocks are the largest power of two that divides the inputs, at most `block`, instead of a Hadamard matrix of the
   complete size, which does not exist for all sizes.
3. The signs are not randomized.

Inputs whose largest block would be smaller than `least` are an error; with least=1 they are not rotated.
"""

from stack_quant.algorithms import Algorithm

__all__ = ["HADAMARD"]

HADAMARD = Algorithm("hadamard", needs_stream=False, rotates=True, options={"block": 512, "least": 16})
