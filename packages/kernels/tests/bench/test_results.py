import json

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_kernels.bench.results import Results

from .fakes import results, row


def test_what_is_written_is_read(tmp_path):
    found = results(row([0.5, 0.6, 0.7]), row([1.0, 1.1, 1.2], dtype="bfloat16", bound_s=None, denominator=None))
    found.write(tmp_path / "found.json")
    assert Results.read(tmp_path / "found.json") == found


def test_a_row_speaks_of_medians():
    one = row([0.5, 0.9, 0.7], reference_s=2e-3, asked="xla_cpu")
    assert one.ratio == pytest.approx(0.7)
    assert one.timing.median_s == pytest.approx(1.4e-3)
    assert one.roofline_share == pytest.approx(0.1 / 1.4)
    assert one.title == "norm 66m rms float32 forward xla_cpu"
    assert row([1.0], bound_s=None).roofline_share is None


def changed(**fields):
    return lambda content: {**content, **fields}


def with_row(**fields):
    return lambda content: {**content, "rows": [{**content["rows"][0], **fields}]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(format="stack bench ops 2"), "its format is 'stack bench ops 2', expected 'stack bench ops 1'"),
        (lambda content: [content], "its format is 'list'"),
        (changed(versoin=1), "versoin"),
        (lambda content: {**content, "rows": content["rows"] * 2}, "a call is in it twice"),
        (changed(rows=[{}]), "KeyError"),
        (changed(versions=["0.1"]), "its versions are"),
        (with_row(wall_s=[1.0, -1.0]), "not all positive"),
        (with_row(wall_s=[1.0, "1.0"]), r"cannot be used"),
        (with_row(wall_s=[], reference_wall_s=[]), "norm 66m rms float32 forward are not all"),
        (with_row(wall_s=[1.0]), "has 1 rounds, its reference 2"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path, damage, message):
    path = tmp_path / "base.json"
    results(row([0.5, 0.6])).write(path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(BenchmarkError, match=message) as refused:
        Results.read(path)
    assert f"Make it anew with `stack bench ops --json {path}`" in str(refused.value)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(BenchmarkError, match=r"cannot be read: .*No such file"):
        Results.read(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"format": "stack be')
    with pytest.raises(BenchmarkError, match="it is no JSON"):
        Results.read(tmp_path / "cut.json")
    with pytest.raises(BenchmarkError, match="cannot be written"):
        results().write(tmp_path / "nowhere" / "found.json")
