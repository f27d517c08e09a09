"""What checks annotations in tests: functions of one signature share a check, and no other."""

import typing
from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped
from type_checks import CHECKED_CALLS, checked


def inner(annotation: Any, returned: Any) -> Callable[..., Any]:
    """A function that is defined anew in every call, always at this place."""

    @jaxtyped(typechecker=checked)
    def function(x: annotation, times: int = 1) -> returned:
        return x if times == 1 else str(x)

    return function


def test_each_annotation_holds_where_it_stands() -> None:
    for _ in range(2):
        assert inner(int, int)(3) == 3
        assert inner(str, str)("3") == "3"
        with pytest.raises(TypeCheckError, match="parameters"):
            inner(int, int)("3")
        with pytest.raises(TypeCheckError, match="parameters"):
            inner(int, int)(3, times="2")
        with pytest.raises(TypeCheckError, match="return value"):
            inner(int, int)(3, times=2)


def test_axes_of_one_call_agree_and_of_two_may_differ() -> None:
    function = inner(Float[Array, "rows 2"], Float[Array, "rows 2"])
    for rows in (1, 3):
        assert function(jnp.ones((rows, 2))).shape == (rows, 2)
    with pytest.raises(TypeCheckError, match="parameters"):
        function(jnp.ones((3, 3)))
    with pytest.raises(TypeCheckError, match="return value"):
        inner(Float[Array, "rows 2"], Float[Array, "2 rows"])(jnp.ones((3, 2)))


def test_an_annotation_without_a_hash_is_checked() -> None:
    assert inner(Annotated[int, []], int)(3) == 3
    with pytest.raises(TypeCheckError, match="parameters"):
        inner(Annotated[int, []], int)("3")


@jaxtyped(typechecker=checked)
def twice(x: int) -> int:
    return 2 * x


def test_a_definition_is_checked_in_its_first_calls() -> None:
    for _ in range(CHECKED_CALLS):
        with pytest.raises(TypeCheckError, match="parameters"):
            twice("3")  # pyrefly: ignore[bad-argument-type]
    assert twice("3") == "33"  # pyrefly: ignore[bad-argument-type]
    assert typing.get_type_hints(twice) == {"x": int, "return": int}
