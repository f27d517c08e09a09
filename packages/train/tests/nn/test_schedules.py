"""Tables of schedules: every microbatch passes every piece once, in order, and nothing that is kept is overwritten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core.abi.errors import ConfigError
from stack_train.nn.schedules import schedule

NAMES = st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(1, 5), st.integers(1, 11))
def test_every_microbatch_passes_every_piece_with_what_its_neighbour_made(named, stages, microbatches):
    """Plays the table: slots hold (microbatch, piece), and a piece finds in its slots what it needs."""
    name, chunks = named
    made = schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    pieces = stages * chunks
    inputs, gradients, forward, backward = {}, {}, set(), set()
    for tick in range(len(made.table["forward"])):
        now = [{column: int(values[tick, stage]) for column, values in made.table.items()} for stage in range(stages)]
        arriving = []
        for stage, row in enumerate(now):
            if row["forward"] >= 0:
                piece = row["forward_chunk"] * stages + stage
                found = (row["forward"], piece)
                assert piece == 0 or inputs[stage, row["forward_slot"]] == found
                assert found not in forward
                forward.add(found)
                if piece + 1 < pieces:
                    arriving.append((inputs, "arriving_slot", (stage + 1) % stages, (row["forward"], piece + 1)))
            if row["backward"] >= 0:
                piece = row["backward_chunk"] * stages + stage
                found = (row["backward"], piece)
                assert found in forward and found not in backward
                assert piece == 0 or inputs[stage, row["backward_slot"]] == found
                assert piece == pieces - 1 or gradients[stage, row["gradient_slot"]] == found
                backward.add(found)
                if piece > 0:
                    arriving.append(
                        (gradients, "arriving_gradient_slot", (stage - 1) % stages, (row["backward"], piece - 1))
                    )
        for kept, column, stage, what in arriving:
            slot = now[stage][column]
            assert 0 <= slot < (made.slots if kept is inputs else made.gradient_slots)
            kept[stage, slot] = what
        arrivals = sum(row[column] >= 0 for row in now for column in ("arriving_slot", "arriving_gradient_slot"))
        assert arrivals == len(arriving)
    everything = {(microbatch, piece) for microbatch in range(microbatches) for piece in range(pieces)}
    assert forward == backward == everything


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_time_is_that_of_the_paper(name):
    for stages, microbatches in ((2, 4), (4, 8), (8, 16)):
        made = schedule(name, stages=stages, microbatches=microbatches)
        assert made.work == pytest.approx((microbatches + stages - 1) / (microbatches * stages))


def test_interleaved_pieces_fill_and_drain_the_pipeline_faster():
    made = schedule("interleaved", stages=4, microbatches=8, chunks=2)
    assert made.work == pytest.approx((8 * 2 + 3) / (8 * 2 * 4))


def test_what_is_kept_does_not_grow_with_microbatches_but_for_gpipe():
    kept = {
        (name, microbatches): schedule(name, stages=4, microbatches=microbatches, chunks=chunks).slots
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("gpipe", 1))
        for microbatches in (8, 128)
    }
    assert kept["1f1b", 8] == kept["1f1b", 128] <= 2 * 4
    assert kept["interleaved", 8] == kept["interleaved", 128] <= 2 * 4 * 2
    assert (kept["gpipe", 8], kept["gpipe", 128]) == (8, 128)


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(1, 5), st.integers(1, 11))
def test_recent_microbatches_are_those_between_forward_and_backward_of_a_chunk(named, stages, microbatches):
    """A value that each forward pass stores at `microbatch % recent_microbatches` is there in its backward pass."""
    made = schedule(named[0], stages=stages, microbatches=microbatches, chunks=named[1])
    size, stored, most = made.recent_microbatches, {}, 0
    for tick in range(len(made.table["forward"])):
        for stage in range(stages):
            row = {column: int(values[tick, stage]) for column, values in made.table.items()}
            if (microbatch := row["forward"]) >= 0:
                stored[stage, row["forward_chunk"], microbatch % size] = microbatch
            if (microbatch := row["backward"]) >= 0:
                chunk = row["backward_chunk"]
                assert stored[stage, chunk, microbatch % size] == microbatch
                newest = max(value for (*place, _), value in stored.items() if place == [stage, chunk])
                most = max(most, newest - microbatch + 1)
    assert size == most


def test_a_program_has_three_loops_at_most():
    phases = schedule("1f1b", stages=4, microbatches=8).phases
    assert [(phase.end - phase.start, phase.forward, phase.backward) for phase in phases] == [
        (3, True, False),
        (8, True, True),
        (3, False, True),
    ]


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("interleaved", 1)])
def test_chunks_belong_to_interleaved(name, chunks):
    with pytest.raises(ConfigError, match=f"run.pipeline.chunks is {chunks} with schedule '{name}'"):
        schedule(name, stages=2, microbatches=4, chunks=chunks)
