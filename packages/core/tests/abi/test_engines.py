"""A registered engine derives from `Engine`, whose optional members have defaults."""

import pytest

from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import PluginError


class Minimal(Engine):
    """An engine with the required methods only."""

    def start(self): ...

    def close(self, *, drain_s=0.0): ...

    def submit(self, request, receive=None): ...

    def stream(self, request_id):
        return iter(())

    def abort(self, request_id): ...

    def update_weights(self, params, *, version=None, kv="keep", donate=False): ...

    def stats(self):
        raise NotImplementedError


def test_optional_members_have_defaults():
    engine = Minimal()
    assert checked_engine("minimal", engine) is engine
    engine.expect(4)
    engine.warm_up()
    assert (engine.keeps_missing, engine.reports_experts, engine.adapters) == (False, False, ())


def test_another_class_is_refused_by_name():
    with pytest.raises(PluginError, match=r"engines 'odd' constructed a dict; expected .*abi.engines.Engine"):
        checked_engine("odd", {})
