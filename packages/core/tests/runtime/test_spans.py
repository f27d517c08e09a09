"""Without a capture, spans are not encoded; integration_tests/test_profiled_requests.py reads those of a capture."""

import jax
import pytest

from stack_core.runtime.spans import listen_to_spans, record_span, spans_recorded


def test_only_a_capture_encodes_spans(tmp_path):
    record_span("request", 0.1, request=object())
    with jax.profiler.trace(str(tmp_path)):
        assert spans_recorded()
        with pytest.raises(TypeError):
            record_span("request", 0.1, request=object())
    assert not spans_recorded()


def test_a_listener_receives_recorded_spans_until_its_block_ends(tmp_path):
    found = []
    with listen_to_spans(lambda *span: found.append(span)):
        record_span("request", 0.1, tokens=1)
        with jax.profiler.trace(str(tmp_path)):
            record_span("request", 0.1, tokens=2)
    with jax.profiler.trace(str(tmp_path)):
        record_span("request", 0.1, tokens=3)
    assert found == [("request", 0.1, {"tokens": 2})]
