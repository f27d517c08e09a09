"""QuaRot: rotations folded into the parameters of a model.

The matrices that read or write a residual stream x are changed such that the stream is x R, with an orthogonal R:

    norm(x) g W = norm(x R) (R^T diag(g) W),        x + y V becomes x R + y (V R)

An entry of x R is a sum of all entries of x, so single large channels do not determine the ranges of activations,
and outliers of the weights spread over all inputs. A rotation of the values of attention heads goes into the matrices
before and after attention. The model in float computes the same results, without further operations at run time.

Rotations are found from the trace of the model (`stack_quant.rotations`) instead of a list of its layers, so models
of any form can be rotated. A stream that layer norms or norms after a layer fix is an error that names the operation.

The scale of the last norm goes into the head, so a head that is tied to the embedding gets weights of its own
(`UntiesHead`). The report has the bytes that they add. A model that cannot untie its head is an error.

Options: stream=0 leaves the residual stream in place, heads=0 the remaining bases.

Source: Ashkboos et al., QuaRot, 2024 (arXiv:2404.00456), section 4; Liu et al., SpinQuant, 2024 (arXiv:2405.16406),
whose R1 and R2 these are, without learning. Departures:
1. For sizes without a Hadamard matrix the rotation is a Kronecker product of a DCT and a Hadamard matrix.
2. Online rotations before the last matrix of a layer are another algorithm, "quarot+hadamard", and can be combined.
3. Keys and queries are rotated only if nothing distinguishes their features, such as rotary positions.
"""

from stack_quant.algorithms import Algorithm

__all__ = ["QUAROT"]

QUAROT = Algorithm("quarot", needs_stream=False, folds=True, options={"stream": 1, "heads": 1})
