import json
from pathlib import Path

import pytest

from stack_core.abi.errors import ClusterError
from stack_core.abi.events import CheckpointSaved, FormationFormed, RunFailed, RunStarted, StepFinished
from stack_core.runtime.event_frames import from_frame, to_frame


@pytest.mark.parametrize(
    "event",
    [
        StepFinished(3, {"loss": 1.5}, 0.1, 10.0, None),
        CheckpointSaved(4, Path("/runs/a/4"), 0.25),
        RunStarted(
            first_step=2,
            steps=9,
            parameters=10,
            work=("tokens", 64),
            flops_per_step=5,
            ideal_step_s=None,
            compile_s=1.0,
            directory=Path("/runs/a"),
        ),
    ],
)
def test_an_event_is_the_same_after_its_way_through_json(event):
    assert from_frame(json.loads(json.dumps(to_frame(event)))) == event


def test_an_error_keeps_its_name_and_message():
    event = from_frame(json.loads(json.dumps(to_frame(RunFailed(ValueError("too small"))))))
    assert isinstance(event, RunFailed) and str(event.error) == "ValueError: too small"


def test_what_is_no_event_is_refused():
    for frame in ({"event": "Path"}, {"event": "StepFinished", "stride": 1}, {}, {"event": ["x"]}):
        with pytest.raises(ClusterError):
            from_frame(frame)
    assert to_frame(FormationFormed(1, (0, 1)))["hosts"] == (0, 1)
