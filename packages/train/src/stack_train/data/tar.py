"""The source `tar:GLOB`: one document per member of tar archives, such as WebDataset shards."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record
from stack_train.data.fields import check_field, text_of
from stack_train.data.file_source import FileSource, damaged
from stack_train.data.files import undecodable, unreadable

__all__ = ["TarSource", "check_end"]


class TarSource(FileSource):
    """The texts of all archives that match a glob, in the order of archives and members; one member is in memory.

    `text_field` is the file extension of the members to read, "txt" by default, or "json.KEY" for a key of `.json`
    members. Members with other extensions are skipped. Archives may be compressed by gzip, bzip2 or xz. A document's
    name is "path:member".
    """

    scheme = "tar"

    def __init__(self, address: str = "", *, text_field: str = "txt") -> None:
        super().__init__(address, text_field)
        self._extension, _, self._key = text_field.partition(".")

    def documents_of(self, path: Path) -> Iterator[Document]:
        other: set[str] = set()
        is_empty = True
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    extension = PurePosixPath(member.name).name.partition(".")[2]
                    if member.isfile() and extension == self._extension:
                        is_empty = False
                        name = f"{path}:{member.name}"
                        yield Document(name, self._text(name, _contents(archive, member)))
                    elif member.isfile():
                        other.add(extension)
                    setattr(archive, "members", [])  # noqa: B010  it would keep the header of every member
                check_end(archive)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise damaged(path, "a tar archive", error) from error
        except OSError as error:
            raise unreadable(path, error) from error
        if is_empty and other:
            raise DataError(
                f"{str(path)!r} has no member with the extension {self._extension!r}; it has "
                f"{', '.join(map(repr, sorted(other)))}. Set data.text_field to one of them, or to 'json.KEY'."
            )

    def _text(self, name: str, contents: bytes) -> str:
        if self._key:
            record = parse_record(name, contents)
            check_field(name, record, self._key)
            return text_of(name, record[self._key], self._key)
        try:
            return contents.decode("utf-8")
        except UnicodeDecodeError as error:
            raise undecodable(name, error) from error


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # a regular file
    return file.read()


def check_end(archive: tarfile.TarFile) -> None:
    """Checks that an archive ends with a block of zeros: `tarfile` accepts one cut between two members."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    block = archive.fileobj.read(tarfile.BLOCKSIZE)
    if block != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the end of the archive is missing")
    while archive.fileobj.read(1 << 20):  # decompression checks its sum at the end of the file
        pass
