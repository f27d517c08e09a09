"""Hosts that delay others are named with cause and line; transfers between hosts have their bytes and times."""

import dataclasses

import numpy as np
import pytest

from stack_profile.analyses.hosts import hosts
from stack_profile.analyses.transfers import transfers
from stack_profile.exports import write
from stack_profile.report.events import recorded_events
from stack_profile.report.page import Section, page
from stack_profile.traces.host_stacks import HostStacks, Pauses
from stack_profile.traces.short_paths import short_paths

RUNS = 12
ARRAY_BYTES = 64 * 64 * 4
# Host 1 comes 1 ms after host 0 in nine runs, and 0.2 ms before it in the others.
LATE = [[200, 1200]] * 9 + [[400, 200]] * 3


@pytest.fixture(scope="module")
def slow(formation):
    return formation(LATE, clocks=(0, 250_000))


def test_the_host_that_comes_last_is_named_with_its_delay_and_line(slow):
    answer = hosts(slow)
    late, other = answer.rows
    assert (late.name, late.clock, late.collectives, late.last) == ("host1", "corrected", RUNS, 9)
    assert (other.name, other.clock, other.last) == ("host0", "kept", 3)
    error_s = late.error_s
    assert late.delay_s == pytest.approx(9e-3, abs=9 * error_s) and other.delay_s == pytest.approx(
        6e-4, abs=3 * error_s
    )
    assert late.wait_s == pytest.approx(other.delay_s) and other.wait_s == pytest.approx(late.delay_s)
    # The first run has no previous collective, so what both did before it is unknown.
    assert (late.cause, late.line) == ("device work", "/home/me/model.py:12")
    assert late.excess_s == pytest.approx(8e-3, rel=0.02)
    assert answer.facts["straggler"] == "host1"
    assert answer.facts["delay_s"] == late.delay_s + other.delay_s
    assert answer.notes[0].startswith("host1 arrives last at 9 of 12 collectives")
    assert any("host1 is 250 ms ahead of that of host0" in note for note in answer.notes)


def test_causes_are_the_times_of_both_hosts_before_the_same_collectives(formation):
    rows = {(row.name, row.cause): row for row in hosts(formation(LATE, waits="next_batch"), by="cause").rows}
    waited = rows["host1", "input"]
    assert waited.own_s == pytest.approx(8 * 1190e-6, rel=0.01) and waited.others_s == pytest.approx(
        8 * 190e-6, rel=0.01
    )
    assert waited.excess_s == waited.own_s - waited.others_s
    assert max(rows, key=lambda each: rows[each].excess_s) == ("host1", "input")


def test_idle_time_of_a_garbage_collection_is_its_and_other_idle_time_is_the_hosts(formation):
    trace = formation(LATE, waits="some annotation")
    assert hosts(trace).rows[0].cause == "host code"
    start_ps = np.sort(trace.devices[2].start_ps)[::3] + 20 * 10**6
    pauses = Pauses(start_ps, start_ps + 900 * 10**6, np.full(RUNS, 2), np.zeros(RUNS, np.int64))
    stacks = HostStacks((), (), np.zeros(0, np.int64), np.zeros((0, 4), np.int64), pauses)
    collected = dataclasses.replace(trace, host_stacks=(None, stacks))
    (late, *_) = hosts(collected).rows
    assert (late.name, late.cause) == ("host1", "garbage collection")
    assert late.excess_s == pytest.approx(8 * 900e-6, rel=0.01)


def test_arrivals_within_the_error_of_the_clocks_have_no_last_host(formation):
    trace = formation([[200, 201]] * RUNS)
    assert {row.last for row in hosts(trace).rows} == {0} and hosts(trace).facts["straggler"] is None


def test_transfers_have_what_hosts_send_and_the_time_after_the_last_arrival(slow):
    answer = transfers(slow)
    (row,) = answer.rows
    assert (row.name, row.kind, row.hosts, row.occurrences) == (
        "jit_step: all-reduce.2",
        "all-reduce",
        "host0, host1",
        RUNS,
    )
    # A host of two sends half of the array to reduce it, and half of the result.
    assert row.sent_bytes == RUNS * ARRAY_BYTES
    assert row.time_s == pytest.approx(RUNS * 22e-6, rel=0.15)
    assert row.rate_bytes_s == row.sent_bytes / row.time_s
    assert row.wait_s == pytest.approx((9e-3 + 6e-4) / 2, rel=0.01)
    # Nothing runs beside it.
    assert (row.slack_s, row.required_bytes_s) == (pytest.approx(0.0, abs=1e-9), None)
    assert row.stall_s == pytest.approx(row.time_s + row.wait_s, rel=0.01)
    assert {name: getattr(row, name) for name in ("sent_bytes", "time_s", "stall_s")}.items() <= answer.facts.items()


def test_a_permutation_has_senders_and_receivers(formation):
    trace = formation([[200, 1200, 300]] * RUNS, clocks=(0, 0, 0), permutes=True, second=[(0, 1, 2)])
    rows = {row.kind: row for row in transfers(trace).rows}
    assert rows["collective-permute"].hosts == "host0 -> host1, host1 -> host2, host2 -> host0"
    assert rows["collective-permute"].sent_bytes == RUNS * 2 * ARRAY_BYTES
    assert rows["all-reduce"].sent_bytes == pytest.approx(RUNS * 2 * 2 / 3 * ARRAY_BYTES)


def test_the_report_has_a_lane_for_each_host_whose_waits_are_those_of_the_table(slow, browser, tmp_path):
    recorded = recorded_events(slow, short_paths(slow))
    lanes = {lane.name: lane for lane in recorded.lanes if lane.group == "hosts"}
    rows = {row.name: row for row in hosts(slow).rows}
    assert list(lanes) == ["host0", "host1"] and recorded.lanes[0].group == "hosts"
    for name, lane in lanes.items():
        waits = [recorded.kinds[kind]["category"] == "wait for a host" for kind in lane.kind.tolist()]
        assert lane.duration_ps[waits].sum() * 1e-12 == pytest.approx(rows[name].wait_s)
    found = [Section(name, "", analysis(slow)) for name, analysis in (("hosts", hosts), ("transfers", transfers))]
    write([page(slow, found)], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    for name, fields in (
        ("hosts", ("delay_s", "wait_s", "offset_s")),
        ("transfers", ("sent_bytes", "time_s", "stall_s")),
    ):
        cells = browser.values(f"#{name} tbody tr", "[...each.cells].map(cell => Number(cell.dataset.value))")
        section = next(each for each in found if each.name == name)
        for shown, row in zip(cells, section.answer.rows, strict=True):
            assert {getattr(row, field) for field in fields} <= set(shown)
    assert "wait for a host" in browser.values(".legend span", "each.textContent.trim()")
    assert browser.complaints == []
