"""`page_layout` names the layout that the implementation of the highest priority reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.errors import ShapeError, UnknownName
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.ops.definitions.paged_attention import REFERENCE
from stack_core.ops.kv_cache import coded
from stack_core.ops.references.paged_pools import LAYOUTS

SIZES = {"p": 6, "h": 2, "s": 4, "2": 2, "d": 8}


def call(layout: str, **options: Any) -> dict[str, Any]:
    """A decoding step of three sequences, with pages in a layout."""
    pages = jnp.zeros([SIZES[axis] for axis in layout])
    places = {"block_tables": (3, 2), "kv_lengths": (3,), "query_starts": (4,)}
    return {
        "query": jnp.zeros((3, 4, SIZES["d"])),
        "key_pages": pages,
        "value_pages": None if "2" in layout else pages,
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in places.items()},
        "layout": layout,
        **options,
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers an implementation beside the reference that reads some layouts, by their names."""

    def reads(*layouts: str, priority: int = 1) -> None:
        def supports(call: Any, chip: Any, config: Any) -> bool | str:
            pools = [jax.tree.leaves(call.arrays[name]) for name in ("key_pages", "value_pages")]
            shape = tuple(SIZES[axis] for axis in call.options["layout"])
            assert not (pools[1] and "2" in call.options["layout"]), "one pool holds both"
            assert all(pool[0].shape[:-1] == shape[:-1] for pool in pools if pool), "pages are in the named layout"
            return call.options["layout"] in layouts or "another layout"

        kernel = dataclasses.replace(REFERENCE, name="kernel", supports=supports, priority=priority)
        found = {f"paged_attention/{each.name}": each for each in (REFERENCE, kernel)}
        entries = {name: Entry(name, each, "test") for name, each in found.items()}
        monkeypatch.setattr(registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)

    return reads


@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("wanted", LAYOUTS)
def test_the_layout_of_the_best_implementation_is_best(reads: Any, given: str, wanted: str) -> None:
    reads(wanted)
    assert ops.page_layout(**call(given)) == (None if given == wanted else wanted)


def test_a_layout_stays_that_is_as_good_as_any_other(reads: Any) -> None:
    for layouts in ((), ("phsd", "pshd"), tuple(LAYOUTS)):
        reads(*layouts)
        assert ops.page_layout(**call("pshd")) is None
    reads("hpsd", priority=-1)
    assert ops.page_layout(**call("pshd")) is None


def test_quantized_pages_and_the_names_of_their_axes_move_together(reads: Any) -> None:
    reads("hpsd")
    given = call("pshd")
    pages = dict.fromkeys(("key_pages", "value_pages"), coded(given["key_pages"], jnp.int8))
    names = {"query": (None, "act_heads", None), "key_pages": (None, None, "act_kv_heads", None)}
    assert ops.page_layout(**{**given, **pages}, axes=names) == "hpsd"
    reads("psh2d")
    assert ops.page_layout(**{**given, **pages}, axes=names) == "psh2d"


def test_one_pool_is_not_looked_for_where_values_do_not_fit_beside_keys(reads: Any) -> None:
    reads("psh2d")
    given = call("pshd")
    wider = jnp.zeros((*given["key_pages"].shape[:-1], 9))
    assert ops.page_layout(**{**given, "value_pages": wider}) is None
    assert ops.page_layout(**{**given, "value_pages": None, "value_dim": 5}) is None


def test_traced_arguments_are_answered(reads: Any) -> None:
    reads("phsd")
    answers = []

    def asked(query: Any) -> Any:
        answers.append(ops.page_layout(**{**call("pshd"), "query": query}))
        return query

    jax.eval_shape(asked, call("pshd")["query"])
    assert answers == ["phsd"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": "phds"}, UnknownName, "unknown layout 'phds'"),
        ({"sinks": jnp.zeros(3)}, ShapeError, "sinks"),
    ],
)
def test_what_the_op_refuses_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.page_layout(**{**call("pshd"), **options})
