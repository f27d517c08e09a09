"""What holds for every registered analysis: no data is not zero, and a share says what it is of."""

import dataclasses

import pytest

from stack_core.abi.plugins import registries
from stack_core.report.fields import title
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

COUNTS = ("devices", "programs", "functions")


@pytest.mark.parametrize("name", registries.analyses.names())
def test_of_an_empty_trace_nothing_is_known_and_a_note_says_so(build, name):
    answer = registries.analyses[name](trace_of([read_space(build.space(build.plane("/host:CPU")))]))
    assert answer.rows == () and answer.plots == ()
    assert any(note.startswith("No data") for note in answer.notes)
    known = {fact: value for fact, value in answer.facts.items() if value is not None}
    assert set(known) <= set(COUNTS) and set(known.values()) <= {0}


@pytest.mark.parametrize("name", registries.analyses.names())
def test_the_whole_that_a_share_is_of_stands_beside_it(trace, name):
    answer = registries.analyses[name](trace)
    rows = [field.name for field in dataclasses.fields(answer.row_type)]
    for share in (each for each in (*rows, *answer.facts) if each.endswith("_share")):
        whole = share.removesuffix("_share").split("_")[-1]
        assert any(whole in each.split("_") and not each.endswith("_share") for each in (*rows, *answer.facts)), share


@pytest.mark.parametrize("name", registries.analyses.names())
def test_no_two_facts_and_no_two_columns_have_one_title(trace, name):
    answer = registries.analyses[name](trace)
    for names in (list(answer.facts), answer.columns):
        assert len({title(each) for each in names}) == len(names)


@pytest.mark.parametrize("name", registries.analyses.names())
def test_shares_of_a_real_trace_are_shares(trace, name):
    answer = registries.analyses[name](trace)
    shares = [
        value
        for each in (answer.facts, *map(dataclasses.asdict, answer.rows))
        for field, value in each.items()
        if field.endswith("_share") and not field.startswith(("ideal", "deviation")) and value is not None
    ]
    assert all(0 <= share <= 1 + 1e-9 for share in shares)


def test_what_is_put_in_a_place_and_what_is_not_are_all_of_it(trace):
    facts = registries.analyses["ops"](trace).facts
    assert facts["attributed_s"] + facts["unattributed_s"] == pytest.approx(facts["busy_s"])
    assert facts["attributed_busy_share"] == pytest.approx(facts["attributed_s"] / facts["busy_s"])
    assert 0 < facts["in_layers_busy_share"] < 1
    facts = registries.analyses["roofline"](trace, chip="h100").facts
    assert facts["counted_s"] + facts["uncounted_s"] == pytest.approx(facts["busy_s"])
