import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import UnknownName
from stack_quant import qtype
from stack_quant.qtypes import QTYPES


def test_unknown_types_suggest() -> None:
    with pytest.raises(UnknownName, match=r"'int9'\. Did you mean 'int8'.*Types: int2, int3"):
        qtype("int9")


@pytest.mark.parametrize("name", QTYPES)
def test_limits_are_those_of_the_codes(name: str) -> None:
    kind = qtype(name)
    if kind.codebook is not None:
        assert len(kind.codebook) == 2**kind.bits and list(kind.codebook) == sorted(kind.codebook)
        assert (kind.smallest, kind.largest) == (kind.codebook[0], kind.codebook[-1])
    elif kind.is_integer:
        assert (kind.smallest, kind.largest) == (-(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1)
        codes = jnp.asarray([kind.smallest, kind.largest], jnp.float32).astype(kind.code_dtype)
        np.testing.assert_array_equal(codes.astype(jnp.float32), [kind.smallest, kind.largest])
    else:
        limits = jnp.finfo(kind.code_dtype)
        assert (kind.smallest, kind.largest, kind.bits) == (float(limits.min), float(limits.max), limits.bits)
