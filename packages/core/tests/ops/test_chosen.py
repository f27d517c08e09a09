import json

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.ops.dispatch import chosen


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_noted", {})


def test_every_kind_of_call_is_listed_once_with_what_it_got_and_why() -> None:
    for _ in range(2):
        jax.jit(lambda x, w: ops.linear(ops.linear(x, w, implementation="reference"), w))(
            jnp.ones((2, 4)), jnp.ones((4, 4))
        )
    forward, backward = ops.choices()
    assert forward["call"]["arrays"] == {"x": "float32[2,4]", "weight": "float32[4,4]"}
    assert (forward["op"], forward["direction"], backward["direction"]) == ("linear", "forward", "backward")
    assert forward["implementation"]
    assert forward["reason"]
    assert json.loads(json.dumps(ops.choices())) == ops.choices()


def test_another_shape_is_another_call_and_a_later_choice_replaces_an_earlier() -> None:
    x = jnp.ones((2, 8))
    ops.norm(x)
    ops.norm(x, implementation="reference")
    ops.norm(jnp.ones((3, 8)))
    forward = [entry for entry in ops.choices() if entry["direction"] == "forward"]
    assert [entry["call"]["arrays"]["x"] for entry in forward] == ["float32[2,8]", "float32[3,8]"]
    assert (forward[0]["implementation"], forward[0]["reason"]) == ("reference", "named by the caller")


def test_explaining_a_call_chooses_nothing() -> None:
    ops.explain(ops.norm, jnp.ones((2, 8)))
    assert ops.choices() == []


def test_what_changed_is_said_of_the_calls_of_both() -> None:
    ops.norm(jnp.ones((3, 8)), implementation="reference")
    before = ops.choices()
    ops.norm(jnp.ones((2, 8)))
    assert ops.changed_choices(before, ops.choices()) == []
    other = [
        {**entry, "implementation": "fast", "config": "rows=8"} for entry in before if entry["direction"] == "forward"
    ]
    assert ops.changed_choices(other, ops.choices()) == [
        "ops.norm forward x float32[3,8]: reference, was fast (rows=8)"
    ]
