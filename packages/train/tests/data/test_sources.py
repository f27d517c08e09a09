"""What every data source must do, and the mistakes that each one names."""

import json
import os
import re
from pathlib import Path

import pytest

from stack_core.abi.data import DataSource
from stack_core.abi.errors import ConfigError, DataError, UnknownName
from stack_core.abi.plugins import registries
from stack_train.data.hf_datasets import DatasetsSource
from stack_train.data.jsonl import JsonlSource
from stack_train.data.kinds.text import TextData
from stack_train.data.parquet import ParquetSource
from stack_train.data.source import check_unchanged, open_source
from stack_train.data.stdlib import StdlibSource
from stack_train.data.text import TextSource


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one", "body": "eins"}\n\n{"text": "two\\n", "body": "zwei"}\n', encoding="utf-8")
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two Parquet files, one of several row groups."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs stack-train[parquet]")
    pyarrow = pytest.importorskip("pyarrow")
    for number, texts in enumerate((["one", "zwei", "três"], ["four\r\n"])):
        table = pyarrow.table({"text": texts, "body": [text.upper() for text in texts]})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
    return tmp_path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of Hugging Face on disk, with the splits train and test."""
    datasets = pytest.importorskip("datasets", reason="needs stack-train[datasets]")
    splits = {name: datasets.Dataset.from_dict({"text": [f"{name} one", "two"]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "dataset"))
    return tmp_path / "dataset"


@pytest.fixture(params=["stdlib", "text", "jsonl", "parquet", "datasets"])
def source(request: pytest.FixtureRequest) -> DataSource:
    fixture = {"text": "texts", "jsonl": "records", "parquet": "tables", "datasets": "dataset"}.get(request.param)
    path = "" if fixture is None else request.getfixturevalue(fixture)
    suffix = {"text": "/**/*", "parquet": "/*.parquet", "datasets": ":train"}.get(request.param, "")
    return registries.data_sources[request.param](f"{path}{suffix}")


class TestEverySource:
    def test_reads_the_same_documents_in_the_same_order_again(self, source: DataSource) -> None:
        first = list(source.documents())
        assert first
        assert first == list(source.documents())

    def test_names_each_document_differently(self, source: DataSource) -> None:
        names = [document.name for document in source.documents()]
        assert len(set(names)) == len(names)

    def test_fingerprint_stays(self, source: DataSource) -> None:
        assert source.fingerprint() == source.fingerprint()


def test_stdlib_holds_the_standard_library_but_not_its_tests() -> None:
    documents = {document.name: document.text for document in StdlibSource().documents()}
    assert documents["json/decoder.py"] == Path(json.decoder.__file__).read_bytes().decode()
    assert len(documents) > 400
    assert not any(name.startswith(("test/", "site-packages/")) or "/tests/" in name for name in documents)


def test_text_keeps_line_ends_and_descends_into_folders(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep.txt").write_bytes("é\r\n".encode())
    (document,) = TextSource(f"{tmp_path}/**/*").documents()
    assert document.text == "é\r\n"
    assert document.name == str(tmp_path / "a" / "b" / "deep.txt")


def test_jsonl_names_documents_by_line_and_reads_the_field_asked_for(records: Path) -> None:
    documents = list(JsonlSource(str(records), text_field="body").documents())
    assert [(item.name, item.text) for item in documents] == [(f"{records}:1", "eins"), (f"{records}:3", "zwei")]
    assert JsonlSource(str(records)).fingerprint() != JsonlSource(str(records), text_field="body").fingerprint()


@pytest.mark.parametrize("scheme", ["text", "jsonl"])
def test_fingerprint_changes_with_a_file(scheme: str, records: Path, advance_time) -> None:
    source = registries.data_sources[scheme](str(records))
    before = source.fingerprint()
    advance_time(records)
    assert source.fingerprint() != before
    with pytest.raises(DataError, match="changed while they were read"):
        check_unchanged(source, before)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"bad.jsonl:2: the line is not JSON"),
        (b"[1]", r"bad.jsonl:2: the line holds a list"),
        (b'{"txet": "x"}', r"bad.jsonl:2: the record has no field 'text'. Did you mean 'txet'\?"),
        (b'{"text": 3}', r"bad.jsonl:2: field 'text' holds a int"),
        (b'{"text": "\\ud800"}', r"bad.jsonl:2: field 'text' has half a surrogate pair at 0"),
        (
            b'{"text": "x", "meta": [{"a": "b\\udc00"}]}',
            r"bad.jsonl:2: field 'meta.0.a' has half a surrogate pair at 1",
        ),
        (b'{"text": ' + b"[" * 100_000, r"bad.jsonl:2: the line's lists and objects are nested too deeply"),
        (b'{"text": "\xff"}', r"bad.jsonl:2' is not UTF-8 text: byte 10 is 0xff"),
    ],
)
def test_jsonl_names_the_line_that_is_wrong(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(JsonlSource(str(path)).documents())


@pytest.mark.parametrize("scheme", ["text", "jsonl"])
class TestFilesThatCannotBeUsed:
    def test_nothing_matches(self, scheme: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=f"source '{scheme}:.*' matches nothing; relative paths start at"):
            registries.data_sources[scheme](f"{tmp_path}/*.none")

    def test_only_folders_match(self, scheme: str, texts: Path) -> None:
        with pytest.raises(DataError, match=r"matches 3 folder\(s\) but no file"):
            registries.data_sources[scheme](f"{texts}/*")

    def test_no_glob(self, scheme: str) -> None:
        with pytest.raises(DataError, match=f"Source '{scheme}:' lacks its glob"):
            registries.data_sources[scheme]("")

    def test_a_file_that_vanished(self, scheme: str, records: Path) -> None:
        source = registries.data_sources[scheme](str(records))
        records.unlink()
        with pytest.raises(DataError, match=r"Cannot read .*records.jsonl': No such file"):
            source.fingerprint()
        with pytest.raises(DataError, match=r"Cannot read .*records.jsonl': No such file"):
            list(source.documents())

    def test_a_pipe(self, scheme: str, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="pipe' is not a regular file"):
            registries.data_sources[scheme](f"{tmp_path}/*").fingerprint()


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin1.txt' is not UTF-8 text: byte 1 is 0xe9 .* Convert it to UTF-8"):
        list(TextSource(f"{tmp_path}/*").documents())


def test_stdlib_takes_no_address() -> None:
    with pytest.raises(DataError, match="'stdlib:json' was given"):
        StdlibSource("json")


def test_open_source_names_its_mistakes(records: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'jsonl'"):
        open_source(TextData(source="json:x"))
    for given, meant in (
        ("corpus/*.txt", "text:corpus/*.txt"),
        ("corpus/a.jsonl", "jsonl:corpus/a.jsonl"),
        (str(records.parent), f"text:{records.parent}/**/*"),
    ):
        with pytest.raises(UnknownName, match=re.escape(f"Did you mean '{meant}'?")):
            open_source(TextData(source=given))
    with pytest.raises(ConfigError, match=r"text_field is 'body', but documents of source 'text' have no fields"):
        open_source(TextData(source=f"text:{records}", text_field="body"))


class TestTables:
    def test_parquet_reads_files_and_row_groups_in_order(self, tables: Path) -> None:
        documents = list(ParquetSource(f"{tables}/*.parquet").documents())
        assert [document.text for document in documents] == ["one", "zwei", "três", "four\r\n"]
        assert [document.name for document in documents][2:] == [f"{tables}/0.parquet:3", f"{tables}/1.parquet:1"]
        assert [each.text for each in ParquetSource(f"{tables}/1.*", text_field="body").documents()] == ["FOUR\r\n"]

    def test_parquet_names_what_is_wrong(self, tables: Path) -> None:
        with pytest.raises(DataError, match=r"no column 'txt'. Did you mean 'text'.*'text', 'body'"):
            list(ParquetSource(f"{tables}/*.parquet", text_field="txt").documents())
        (tables / "torn.parquet").write_bytes((tables / "0.parquet").read_bytes()[:-9])
        with pytest.raises(DataError, match=r"torn.parquet' as Parquet"):
            list(ParquetSource(f"{tables}/torn.parquet").documents())

    def test_a_null_is_no_text(self, tables: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": ["a", None]}), tables / "n.parquet")
        with pytest.raises(DataError, match=r"n.parquet:2: column 'text' holds a NoneType"):
            list(ParquetSource(f"{tables}/n.parquet").documents())

    def test_datasets_are_read_by_split(self, dataset: Path) -> None:
        assert [each.text for each in DatasetsSource(f"{dataset}:test").documents()] == ["test one", "two"]
        assert [each.name for each in DatasetsSource(f"{dataset}/train").documents()][1] == f"{dataset}/train:2"

    def test_datasets_name_what_is_wrong(self, dataset: Path) -> None:
        with pytest.raises(DataError, match=r"holds the splits train, test. Did you mean 'train'"):
            DatasetsSource(f"{dataset}:trai")
        with pytest.raises(DataError, match="is not a dataset on disk"):
            DatasetsSource(f"{dataset.parent}/nothing")
        with pytest.raises(DataError, match="no column 'body'"):
            DatasetsSource(f"{dataset}:train", text_field="body")
