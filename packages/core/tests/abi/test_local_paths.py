"""Paths that users give lead where the shell leads, and remote storage is refused before anything is made."""

from pathlib import Path

import pytest

from stack_core.abi.config import LocalAddress, LocalPath, config, parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.local_paths import hub_advice, local_address, local_path, refuse_remote


@config
class Paths:
    output: LocalPath = "run"
    start: LocalAddress | None = None
    name: str = ""
    several: tuple[str, ...] = ()


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "work" / "link").symlink_to(tmp_path / "far" / "inner")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("../run", "{root}/run"),
        ("a/../../run", "{root}/run"),
        ("link/../run", "{root}/far/run"),  # as the shell's, not the work/run of a path read as text
        ("~/run", "{root}/home/run"),
        ("runs/mine", "runs/mine"),
        ("/runs/mine", "/runs/mine"),
        ("file:///runs/mine", "/runs/mine"),
        ("12:30", "12:30"),
    ],
)
def test_paths_are_resolved_alone_and_behind_a_format(work, given, expected):
    expected = expected.format(root=work)
    assert local_path(given) == Path(expected)
    assert local_address(f"hf:{given}") == f"hf:{expected}"
    parsed = parse(Paths, {"output": given, "start": given})
    assert (parsed.output, parsed.start) == (expected, local_address(given))


REMOTE = ["gs://bucket/run", "s3://bucket/run", "gs:/bucket", "text:gs://bucket/*.txt", "GS://bucket", "jsonl:S3:/b"]


@pytest.mark.parametrize("address", REMOTE)
@pytest.mark.parametrize("key", ["output", "start", "name", "several"])
def test_remote_storage_is_refused_in_every_text_of_a_config(address, key):
    mapping = {key: [address] if key == "several" else address}
    with pytest.raises(
        ConfigError, match=rf"^{key}.*is an address of remote storage \((?i:gs|s3)\), which is not supp"
    ):
        parse(Paths, mapping)
    for read in (local_path, local_address, refuse_remote):
        with pytest.raises(ConfigError, match="Use a local path: mount the bucket"):
            read(address)


@pytest.mark.parametrize("text", ["https://host/v1", "runs/gs", "what is gs://x?", "mygs://x", "awgs:x", ""])
def test_other_texts_are_no_remote_storage(text):
    assert refuse_remote(text) == text


@pytest.mark.parametrize("address", ["https://host/run", "ftp://host/x", "Tape://x", "hf:http://host/model", "a+b://c"])
def test_a_path_with_any_other_scheme_is_refused_by_its_name(address):
    for key in ("output", "start"):
        with pytest.raises(ConfigError, match=rf"^{key}.*is an address of scheme '\S+'; a local path was expected"):
            parse(Paths, {key: address})
    with pytest.raises(ConfigError, match="a local path was expected"):
        local_path(address)


def test_an_unknown_home_is_named():
    with pytest.raises(ConfigError, match=r"'~nobody-here/run': .* Write out the full path"):
        local_path("~nobody-here/run")


def test_a_name_on_the_hub_is_answered_with_the_command_that_fetches_it(work):
    for address in ("HuggingFaceTB/SmolLM2-135M", "hf:HuggingFaceTB/SmolLM2-135M"):
        assert "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`" in hub_advice(address)
    assert {hub_advice(address) for address in ("/abs/path", "a/b/c", "../up", "name")} == {""}
    (work / "work" / "runs" / "mine").mkdir(parents=True)
    assert hub_advice("runs/mine") == ""
