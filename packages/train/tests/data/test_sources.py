"""What every data source must do, and the mistakes that each one names."""

import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.data import DataSource
from stack_core.abi.errors import ConfigError, DataError, UnknownName
from stack_core.abi.plugins import registries
from stack_train.data.array_record import ArrayRecordSource
from stack_train.data.hf_datasets import DatasetsSource
from stack_train.data.jsonl import JsonlSource
from stack_train.data.kinds.text import TextData
from stack_train.data.parquet import ParquetSource
from stack_train.data.pipeline import Pipeline
from stack_train.data.prepared.prepare import prepare
from stack_train.data.settings import TextSettings
from stack_train.data.source import check_unchanged, open_source
from stack_train.data.split import split_documents, text_digest
from stack_train.data.stdlib import StdlibSource
from stack_train.data.streamed import StreamSource
from stack_train.data.tar import TarSource
from stack_train.data.text import TextSource, divided


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


@pytest.fixture
def write_records(tmp_path: Path) -> Callable[..., Path]:
    """Writes an ArrayRecord file."""
    module = pytest.importorskip("array_record.python.array_record_module", reason="needs stack-train[arrayrecord]")

    def write(*records: bytes, name: str = "0.arrayrecord") -> Path:
        writer = module.ArrayRecordWriter(str(tmp_path / name), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture
def write_tar(tmp_path: Path) -> Callable[..., Path]:
    """Writes an archive of members; the mode of `tarfile` chooses the compression."""

    def write(members: dict[str, str], name: str = "0.tar", mode: str = "w") -> Path:
        with tarfile.open(tmp_path / name, mode) as archive:
            for member, text in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
        return tmp_path / name

    return write


@pytest.fixture
def records_in_groups(write_records: Callable[..., Path]) -> Path:
    return write_records(*(f"text {number}".encode() for number in range(5)))


@pytest.fixture
def archive(write_tar: Callable[..., Path]) -> Path:
    return write_tar({"a/1.txt": "one", "a/1.json": "{}", "b.txt": "two"})


@pytest.fixture
def folder_of_records(records: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one JSONL file, which `datasets` streams without the hub."""
    pytest.importorskip("datasets", reason="needs stack-train[datasets]")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = records.parent / "stream"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return folder


@pytest.fixture
def prepared_set(archive: Path, pipeline: Callable[..., Pipeline], tmp_path: Path) -> Path:
    tokenizer = pipeline(source=f"tar:{archive}", vocab_size=259).tokenizer
    prepare(TextSettings(source=f"tar:{archive}"), tokenizer, tmp_path / "set", workers=1, shard_tokens=3)
    return tmp_path / "set"


FIXTURES = {
    "stdlib": "small_stdlib",
    "text": "texts",
    "jsonl": "records",
    "parquet": "tables",
    "arrayrecord": "records_in_groups",
    "tar": "archive",
    "prepared": "prepared_set",
    "datasets": "dataset",
    "stream": "folder_of_records",
}


@pytest.fixture(params=list(FIXTURES))
def source(request: pytest.FixtureRequest) -> DataSource:
    path = request.getfixturevalue(FIXTURES[request.param])
    suffix = {"text": "/**/*", "parquet": "/*.parquet", "datasets": ":train"}.get(request.param, "")
    return registries.data_sources[request.param](f"{path}{suffix}")


def test_every_registered_source_is_here() -> None:
    assert set(FIXTURES) == set(registries.data_sources.names())


class TestEverySource:
    def test_reads_the_same_documents_in_the_same_order_again(self, source: DataSource) -> None:
        first = list(source.documents())
        assert first
        assert first == list(source.documents())

    def test_names_each_document_differently(self, source: DataSource) -> None:
        names = [document.name for document in source.documents()]
        assert len(set(names)) == len(names)

    def test_its_parts_are_the_documents(self, source: DataSource, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stack_train.data.file_source._PART_BYTES", 1)
        monkeypatch.setattr("stack_train.data.hf_datasets._ROWS_OF_A_PART", 1)
        parts = getattr(source, "document_parts", lambda: [source])()
        assert [document for part in parts for document in part.documents()] == list(source.documents())

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


def test_a_single_file_is_divided_after_paragraphs_and_can_be_held_out(tmp_path: Path) -> None:
    book = "".join(f"Paragraph {number}.\nIt has two lines.\n\n" for number in range(1500))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    source = TextSource(f"{tmp_path}/*.txt")
    parts = [document.text for document in source.documents()]
    assert "".join(parts) == book and 20 <= len(parts) <= 40
    assert all(part.startswith("Paragraph") and part.endswith("\n\n") for part in parts)
    training, validation = split_documents(np.array([text_digest(part) for part in parts], np.uint64), 0.05)
    assert len(validation) == round(0.05 * len(parts)) and len(training) == len(parts) - len(validation)
    (tmp_path / "note.txt").write_text("Another file.", encoding="utf-8")
    both = TextSource(f"{tmp_path}/*.txt")
    assert [document.text for document in both.documents()] == [book, "Another file."]
    (alone, *_) = source.document_parts()
    assert [document.text for document in alone.documents()] == parts


@pytest.mark.parametrize("text", ["x" * 100_000, "line\n" * 20_000, "a b\r\n\r\n" * 9_000, "short\n\n" * 100])
def test_any_text_divides_into_parts_that_join_to_it(text: str) -> None:
    parts = list(divided(text))
    assert "".join(parts) == text
    assert len(parts) == 1 if len(text) < 40_960 else 20 <= len(parts) <= 40
    assert all(part.endswith("\n") for part in parts) == ("\n" in text)


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


def test_braces_of_a_glob_are_alternatives(tmp_path: Path) -> None:
    for name in ("a.md", "b.rst", "c.txt", "{x,y}.txt"):
        (tmp_path / name).write_text(name)

    def texts(pattern: str) -> list[str]:
        return [each.text for each in registries.data_sources["text"](f"{tmp_path}/{pattern}").documents()]

    assert texts("*.{md,rst}") == ["a.md", "b.rst"]
    assert texts("{a,b,c}.{md,txt,*}") == ["a.md", "b.rst", "c.txt"]
    assert texts("{x,y}.txt") == ["{x,y}.txt"]


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
        with pytest.raises(DataError, match=r"torn.parquet' as Parquet: .*It may be cut short"):
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

    def test_a_dataset_whose_file_was_cut_short(self, dataset: Path) -> None:
        (file,) = (dataset / "train").glob("*.arrow")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(DataError, match=r"is not a dataset on disk: .*all of its files complete"):
            DatasetsSource(f"{dataset}:train")


class TestArrayRecord:
    def test_records_are_texts_or_objects(self, write_records: Callable[..., Path]) -> None:
        path = write_records("né".encode(), b'{"body": "two"}')
        assert [each.text for each in ArrayRecordSource(str(path)).documents()] == ["né", '{"body": "two"}']
        with pytest.raises(DataError, match=r"0.arrayrecord:1: the line is not JSON"):
            list(ArrayRecordSource(str(path), text_field="body").documents())
        path = write_records(b'{"body": "two"}', name="1.arrayrecord")
        assert [(each.name, each.text) for each in ArrayRecordSource(str(path), text_field="body").documents()] == [
            (f"{path}:1", "two")
        ]
        with pytest.raises(DataError, match=r"there is no column 'bodi'. Did you mean 'body'"):
            list(ArrayRecordSource(str(path), text_field="bodi").documents())

    def test_a_file_cut_short_or_gone(self, write_records: Callable[..., Path]) -> None:
        path = write_records(*(b"x" * 1000 for _ in range(200)))
        contents = path.read_bytes()
        for size in (len(contents) - 9, len(contents) // 2, 0):
            path.write_bytes(contents[:size])
            with pytest.raises(DataError, match=r"0.arrayrecord' as ArrayRecord: .*It may be cut short"):
                list(ArrayRecordSource(str(path)).documents())
        source = ArrayRecordSource(str(path))
        path.unlink()
        with pytest.raises(DataError, match=r"Cannot read .*0.arrayrecord': No such file"):
            list(source.documents())


class TestTar:
    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_members_are_chosen_by_their_extension(self, mode: str, write_tar: Callable[..., Path]) -> None:
        path = write_tar({"1.txt": "né", "1.json": '{"body": "eins"}', "2.en.txt": "no"}, mode=mode)
        assert [(each.name, each.text) for each in TarSource(str(path)).documents()] == [(f"{path}:1.txt", "né")]
        assert [each.text for each in TarSource(str(path), text_field="json.body").documents()] == ["eins"]
        with pytest.raises(DataError, match=r"no member with the extension 'md'; it has 'en.txt', 'json', 'txt'"):
            list(TarSource(str(path), text_field="md").documents())

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_an_archive_cut_short_anywhere(self, mode: str, write_tar: Callable[..., Path]) -> None:
        path = write_tar({f"{number}.txt": f"{number}" * 700 for number in range(4)}, mode=mode)
        contents = path.read_bytes()
        # Between two members, within a header, and within a text.
        for size in (
            (0, 512 * 3, 512 * 3 + 100, 512 * 4 + 9) if mode == "w" else (0, len(contents) // 2, len(contents) - 9)
        ):
            path.write_bytes(contents[:size])
            with pytest.raises(DataError, match=r"(?s)0.tar' as a tar archive: .*It may be cut short"):
                list(TarSource(str(path)).documents())

    @pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
    def test_an_archive_with_damaged_bytes(self, mode: str, write_tar: Callable[..., Path]) -> None:
        texts = {f"{number}.txt": "".join(map(str, range(number, 20_000 + number))) for number in range(4)}
        path = write_tar(texts, mode=mode)
        contents = bytearray(path.read_bytes())
        start = len(contents) // 2
        contents[start : start + 1024] = bytes([0xA5]) * 1024
        path.write_bytes(contents)
        with pytest.raises(DataError, match=r"Cannot read .*0.tar"):
            list(TarSource(str(path)).documents())


class TestStreams:
    def test_splits_and_fields(self, folder_of_records: Path, advance_time: Callable[[Path], None]) -> None:
        (folder_of_records / "test.jsonl").write_text('{"text": "three"}\n')
        source = StreamSource(f"{folder_of_records}:test")
        assert [(each.name, each.text) for each in source.documents()] == [(f"{folder_of_records}:1", "three")]
        before = source.fingerprint()
        assert before != StreamSource(f"{folder_of_records}").fingerprint()
        advance_time(folder_of_records / "test.jsonl")
        (folder_of_records / "test.jsonl").write_text('{"text": "four"}\n')
        assert source.fingerprint() != before

    def test_mistakes_are_named(self, folder_of_records: Path) -> None:
        with pytest.raises(DataError, match=r"cannot be streamed: .*tset.*'train'.*Write 'stream:.*:SPLIT'"):
            list(StreamSource(f"{folder_of_records}:tset").documents())
        with pytest.raises(DataError, match=r"no column 'body'. Its columns: 'text'"):
            list(StreamSource(str(folder_of_records), text_field="body").documents())
        with pytest.raises(DataError, match="neither a folder of data files nor a dataset of the hub"):
            StreamSource("Org/none")

    def test_a_stream_that_breaks_off(self, folder_of_records: Path) -> None:
        source = StreamSource(str(folder_of_records))
        (folder_of_records / "a.jsonl").write_text('{"text": "one"}\n{"te')
        with pytest.raises(DataError, match=r"The stream of .* broke off after row \d+: "):
            list(source.documents())
        (folder_of_records / "a.jsonl").unlink()
        with pytest.raises(DataError, match="broke off after row 0: "):
            list(source.documents())


@pytest.mark.parametrize(
    ("scheme", "module", "extra"),
    [
        ("parquet", "pyarrow", "parquet"),
        ("arrayrecord", "array_record.python.array_record_module", "arrayrecord"),
        ("datasets", "datasets", "datasets"),
        ("stream", "datasets", "datasets"),
    ],
)
def test_a_missing_package_is_answered_with_its_extra(
    scheme: str, module: str, extra: str, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"Install it: .*train\S*\[{extra}\]"):
        registries.data_sources[scheme](str(records))
