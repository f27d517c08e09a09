"""Images and captions give the same batches from every format, and the mistakes in each format are named."""

import gzip
import io
import json
import shutil
import sys
import tarfile
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.contrastive.siglip import SiglipModelConfig
from stack_train.data.captions import CaptionRows, Captions
from stack_train.data.image_files import read_bucketed_images
from stack_train.data.image_settings import open_image_source
from stack_train.data.kinds.captioned import CaptionedData
from stack_train.data.kinds.image_texts import ImageTextsData
from stack_train.data.kinds.images import ImagesData
from stack_train.diffusion.dit import DitConfig
from stack_train.diffusion.unet import UnetConfig

from ..diffusion import shapes

SIDE, IMAGES, SHARD = 8, 12, 7
TOWER = {"embed": 8, "heads": 2, "mlp": 8, "layers": 1}
TEXTS = {**TOWER, "vocab_size": 20, "max_positions": 3}
MODEL = parse(SiglipModelConfig, {"vision": {**TOWER, "image_size": SIDE, "patch": 4}, "text": TEXTS})
PIXELS = DitConfig(image_size=SIDE, channels=3, classes=0, layers=1, heads=1, head_dim=4)
CLASSES = DitConfig(image_size=SIDE, channels=3, classes=3, layers=1, heads=1, head_dim=4)
FIELDS = {"files": {}, "tar": {"caption_field": "json.text"}, "parquet": {}, "datasets": {}}


@pytest.fixture(scope="module")
def records():
    """Encoded images of two sizes with captions: a text, or three with weights."""
    rng, colors = np.random.default_rng(0), list(shapes.COLOURS)
    found = []
    for number in range(IMAGES):
        pixels, file = rng.integers(0, 256, (8, 8 + 6 * (number % 2), 3), np.uint8), io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        texts = [f"a {colors[(number + each) % len(colors)]}" for each in range(3 if number % 3 == 0 else 1)]
        found.append((f"{number:03}", file.getvalue(), texts, [1.0, 2.5, 0.5][: len(texts)]))
    return found


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, contents in members:
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
    return path


def tar_members(records):
    for name, image, texts, weights in records:
        yield f"{name}.png", image
        record = {"text": texts[0]} if len(texts) == 1 else {"text": texts, "weights": weights}
        yield f"{name}.json", json.dumps(record).encode()


def write_parquet(path, records, **columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": image, "path": f"{name}.png"} for name, image, _, _ in records]
    table = {"image": images, "text": [texts for *_, texts, _ in records]} | columns
    parquet.write_table(pyarrow.table({"weights": [each for *_, each in records], **table}), path, row_group_size=5)
    return path


@pytest.fixture(scope="module")
def sources(records, tmp_path_factory):
    """The same images and captions as files and in each format; the address of each."""
    datasets = pytest.importorskip("datasets", reason="needs stack-train[datasets]")
    root, lines = tmp_path_factory.mktemp("sources"), []
    shapes.word_tokenizer().save(root / "tokenizer")
    for name in ("files", "tar", "parquet"):
        (root / name).mkdir()
    for name, image, texts, weights in records:
        (root / "files" / f"{name}.png").write_bytes(image)
        if len(texts) == 1:
            (root / "files" / f"{name}.txt").write_text(texts[0] + "\n")
        else:
            lines.append(json.dumps({"file_name": f"{name}.png", "text": texts, "weights": weights}))
    (root / "files" / "metadata.jsonl").write_text("\n".join(lines))
    for number, part in enumerate((records[:SHARD], records[SHARD:])):
        write_tar(root / "tar" / f"{number}.tar", tar_members(part))
        write_parquet(root / "parquet" / f"{number}.parquet", part)
    columns = {"image": [{"bytes": image, "path": None} for _, image, _, _ in records]}
    columns |= {"text": [texts for *_, texts, _ in records], "weights": [each for *_, each in records]}
    types = {"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))}
    features = datasets.Features({**types, "weights": datasets.List(datasets.Value("float64"))})
    saved = datasets.DatasetDict(train=datasets.Dataset.from_dict(columns, features=features))
    saved.save_to_disk(str(root / "datasets"))
    globs = {"tar": f"tar:{root}/tar/*.tar", "parquet": f"parquet:{root}/parquet/*.parquet"}
    return globs | {"files": f"{root}/files/*.png", "datasets": f"datasets:{root}/datasets:train", "root": root}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pairs(sources, name, **fields):
    section = {"tokenizer": str(sources["root"] / "tokenizer"), "batch_size": 4, "validation_fraction": 0.2}
    return ImageTextsData(**{**section, "source": sources[name], **FIELDS[name], **fields})


def made(section, model=MODEL, steps=9):
    section.check(model)
    batches = section.build(seed=3, model=model)
    found = [*islice(batches.train_iterator(), steps), *batches.validation_batches()]
    return [{name: array.tolist() for name, array in batch.items()} for batch in found]


@pytest.mark.parametrize("name", ["tar", "parquet", "datasets"])
def test_every_format_gives_the_batches_of_the_files(sources, name):
    expected = made(pairs(sources, "files"))
    assert made(pairs(sources, name)) == expected
    assert made(pairs(sources, name)) == expected  # from the cache
    options = {"sizes": [(8, 8), (8, 12)], "channels": 3, "unreadable": "error", "source": name}
    files, others = (
        read_bucketed_images(open_image_source(pairs(sources, each), "caption"), **options) for each in ("files", name)
    )
    assert list(files) == list(others) == [(8, 8), (8, 12)]
    for size, read in files.items():
        np.testing.assert_array_equal(read.pixels, others[size].pixels)
        assert read.originals == others[size].originals and len(read.names) == IMAGES // 2


def test_parquet_is_read_at_any_row(sources, records, monkeypatch):
    monkeypatch.setattr("stack_train.data.image_tables._ROWS_AT_ONCE", 2)
    images = open_image_source(pairs(sources, "parquet"))
    for place in (11, 3, 4, 0, 7, 6, 6):
        with images.open(place) as file:
            assert file.read() == records[place][1]


def test_captions_are_chosen_with_their_shares_by_seed_and_row():
    captions = [Captions.parse("a", ["x", "y", "z"], [7, 2, 1]), Captions.parse("b", "y"), Captions.parse("c", ["w"])]
    rows = CaptionRows.index(captions)
    assert rows.texts == ["w", "x", "y", "z"]
    count = 4000
    ids, places = np.arange(3 * count), np.arange(3 * count) % 3
    chosen = rows.choose(places, ids, seed=5)
    assert set(chosen[places == 1]) == {2} and set(chosen[places == 2]) == {0}
    counts = np.bincount(chosen[places == 0], minlength=4)
    for row, share in ((1, 0.7), (2, 0.2), (3, 0.1)):
        # Five standard deviations of a binomial count; a correct choice fails once in 10**6.
        assert abs(counts[row] - count * share) < 5 * np.sqrt(count * share * (1 - share))
    some = np.random.default_rng(0).permutation(3 * count)[:500]
    np.testing.assert_array_equal(rows.choose(places[some], ids[some], seed=5), chosen[some])
    others = (rows.choose(places, ids, seed=6), rows.choose(places, -1 - ids, seed=5))
    # Two independent choices agree with probability 0.7**2 + 0.2**2 + 0.1**2 = 0.54.
    for other in others:
        assert abs(np.mean(chosen[places == 0] == other[places == 0]) - 0.54) < 5 * np.sqrt(0.54 * 0.46 / count)


def test_a_resumed_iterator_chooses_the_same_captions(sources):
    batches = pairs(sources, "tar").build(seed=1, model=MODEL)
    iterator, found, states = batches.train_iterator(), [], []
    for _ in range(8):
        states.append(iterator.get_state())
        found.append(next(iterator))
    texts = {}
    for batch in found:
        for name, tokens in zip(batches.describe_rows(batch["row_ids"]), batch["tokens"], strict=True):
            texts.setdefault(name, set()).add(tuple(tokens.tolist()))
    assert max(map(len, texts.values())) > 1  # images have several captions over time
    for step in (1, 4, 7):
        again = batches.train_iterator()
        again.set_state(states[step])
        for expected, batch in zip(found[step:], again, strict=False):
            np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
            np.testing.assert_array_equal(batch["pixels"], expected["pixels"])
    heavier = sources["root"] / "heavier"
    shutil.copytree(sources["root"] / "files", heavier)
    table = heavier / "metadata.jsonl"
    table.write_text(table.read_text().replace("2.5", "9"))
    other = pairs(sources, "files", source=f"{heavier}/*.png").build(seed=1, model=MODEL)
    with pytest.raises(DataError, match="the captions"):
        other.train_iterator().set_state(states[1])


def test_classes_are_numbers_or_names_of_a_field(records, tmp_path):
    members = [(f"{name}.png", image) for name, image, *_ in records]
    members += [(f"{name}.cls", b"%d\n" % (int(name) % 3)) for name, *_ in records]
    write_tar(tmp_path / "a.tar", members)
    numbers = [number % 3 for number in range(IMAGES)]
    write_parquet(tmp_path / "a.parquet", records, label=numbers, kind=["abc"[number] for number in numbers])
    settings = {"batch_size": 6, "validation_fraction": 0.0}
    tar = ImagesData(source=f"tar:{tmp_path}/a.tar", **settings)
    table = ImagesData(source=f"parquet:{tmp_path}/a.parquet", **settings)
    named = ImagesData(source=f"parquet:{tmp_path}/a.parquet", label_field="kind", **settings)
    expected = made(tar, CLASSES)
    assert {label for batch in expected for label in batch["labels"]} == {0, 1, 2}
    assert made(table, CLASSES) == made(named, CLASSES) == expected
    with pytest.raises(ConfigError, match=r"have the classes 2, and model.classes is 2"):
        made(tar, DitConfig(image_size=SIDE, channels=3, classes=2, layers=1, heads=1, head_dim=4))
    with pytest.raises(ConfigError, match=r"have 3 classes, a, b, c, and model.classes is 2"):
        made(named, DitConfig(image_size=SIDE, channels=3, classes=2, layers=1, heads=1, head_dim=4))
    with pytest.raises(ConfigError, match=r"model.classes is 0, so data.label_field='kind' would have no effect"):
        named.check(PIXELS)


def refused(message, section, model=MODEL, error=DataError):
    with pytest.raises(error, match=message):
        made(section, model)


def test_a_cut_shard_is_named_with_its_member_and_its_rest_can_be_skipped(sources, records, tmp_path):
    whole = (sources["root"] / "tar" / "0.tar").read_bytes()
    with tarfile.open(sources["root"] / "tar" / "0.tar") as archive:
        place = archive.getmember("005.png").offset_data
    path = tmp_path / "cut.tar"
    path.write_bytes(whole[: place + 40])
    section = pairs(sources, "tar", source=f"tar:{path}", batch_size=2)
    refused(r"1 of 6 files(.|\n)*cut\.tar: .* in member '005\.png'(.|\n)*data\.unreadable to skip", section)
    skipped = pairs(sources, "tar", source=f"tar:{path}", batch_size=2, unreadable="skip")
    with pytest.warns(UserWarning, match=r"1 of 6 files(.|\n)*cut\.tar"):
        batches = skipped.build(seed=0, model=MODEL)
    assert len(batches.training) + len(batches.validation) == 5
    path.write_bytes(whole[: place - tarfile.BLOCKSIZE])  # between two members
    refused(r"cut\.tar: .*the end of the archive is missing", section)
    path.write_bytes(whole[:100])
    refused(r"cut\.tar: it cannot be read as a tar archive", section)
    path.write_bytes(gzip.compress(whole))
    refused(r"cut\.tar' is compressed", section)


def test_examples_without_image_or_caption_are_named_or_skipped(sources, records, tmp_path):
    (one, image, *_), (two, other, *_), (three, third, *_) = records[:3]
    members = [(f"{one}.png", image), (f"{one}.txt", b"a red"), (f"{two}.txt", b"a red"), (f"{three}.png", third)]
    members += [
        ("b/4.jpg", b"no image"),
        ("b/4.txt", b"a blue"),
        ("__meta__.txt", b""),
        ("5.png", other),
        ("5.txt", b" "),
    ]
    members += [("6.png", other), ("6.jpg", other), ("6.txt", b"a red"), ("7.png", third), ("7.txt", b"a red")]
    path = write_tar(tmp_path / "a.tar", members)
    section = {"source": f"tar:{path}", "caption_field": None, "batch_size": 2, "validation_fraction": 0.0}
    reasons = [
        "5 of 7 files cannot be read as images",
        "a.tar:001: it has no image, only txt",
        "a.tar:002: it has no member 'txt' .data.caption_field., only png",
        "a.tar:5.txt: the caption is blank",
        r"a.tar:6: it has several images .jpg, png, txt.. Set data.image_field",
        "a.tar:b/4.jpg: UnidentifiedImageError",
    ]
    refused(r"(.|\n)*".join(reasons), pairs(sources, "tar", **section))
    with pytest.warns(UserWarning, match="5 of 7"):
        batches = pairs(sources, "tar", **section, unreadable="skip").build(seed=0, model=MODEL)
    assert [name.partition(":")[0] for name in batches.describe_rows(np.arange(2))] == [str(path)] * 2
    # A chosen extension decides between two images.
    (tmp_path / "b.tar").write_bytes(b"")
    write_tar(tmp_path / "b.tar", [("6.png", other), ("6.jpg", b""), ("7.png", third)])
    assert len(made(ImagesData(source=f"tar:{tmp_path}/b.tar", image_field="png", batch_size=1), PIXELS)) >= 9


def test_wrong_fields_are_named_with_the_nearest(sources):
    columns = r"Its columns: 'weights', 'image', 'text'"
    refused(
        rf"0\.parquet: there is no column 'imag'. Did you mean 'image'\? {columns}. Set data.image_field",
        pairs(sources, "parquet", image_field="imag"),
    )
    refused(r"no column 'txt'. Did you mean 'text'\?", pairs(sources, "datasets", caption_field="txt"))
    refused(r"no column 'weight'. Did you mean 'weights'", pairs(sources, "parquet", weights_field="weight"))
    refused(r"column 'text' holds a list; bytes or a struct", pairs(sources, "parquet", image_field="text"))
    refused(
        r"0\.tar:000\.json: there is no key 'txt' .data.caption_field.. Did you mean 'text'",
        pairs(sources, "tar", caption_field="json.txt"),
    )
    refused(
        r"no member 'txt' .data.caption_field., only json, png.*'json.KEY'", pairs(sources, "tar", caption_field=None)
    )
    refused(r"no key 'w' .data.weights_field", pairs(sources, "tar", weights_field="w", unreadable="error"))
    refused(r"no member 'cls' .data.label_field", ImagesData(source=sources["tar"]), CLASSES)
    refused(r"holds the splits train", pairs(sources, "datasets", source=f"datasets:{sources['root']}/datasets"))
    refused(r"has the scheme 'tra'. Did you mean 'tar'\?", pairs(sources, "tar", source="tra:a.tar"), error=ConfigError)
    fields = {"caption_field": "a", "image_field": "b"}
    refused(
        r"for which data.image_field and data.caption_field would", pairs(sources, "files", **fields), error=ConfigError
    )
    refused(
        r"weights_field is a key of .json",
        pairs(sources, "tar", caption_field=None, weights_field="w"),
        error=ConfigError,
    )


def test_captions_and_weights_that_do_not_fit_are_named(sources, records, tmp_path):
    one = records[:1]
    for texts, weights, message in (
        (["a red"], [1.0, 2.0], "there are 1 captions and 2 weights"),
        (["a red", "a blue"], [1.0, -2.0], "-2.0 is not the weight"),
        (["a red", "a blue"], [float("nan"), 1.0], "nan is not the weight"),
        (["a red", " "], [1.0, 2.0], "' ' is in the list of captions"),
        ([], [], "there is no caption in column 'text'"),
    ):
        write_parquet(tmp_path / "a.parquet", one, text=[texts], weights=[weights])
        refused(rf"a\.parquet:1: {message}", pairs(sources, "parquet", source=f"parquet:{tmp_path}/a.parquet"))
    (tmp_path / "000.png").write_bytes(one[0][1])
    for line, message in (
        ('{"file_name": "000.png", "text": ["a", "b"], "weights": [1]}', "jsonl:1: there are 2 captions and 1 weights"),
        ('{"file_name": "000.png", "text": "a", "weights": [1]}', 'jsonl:1: "weights" are of a list'),
        ('{"file_name": "000.png", "text": 5}', "jsonl:1: the caption is a int"),
    ):
        (tmp_path / "metadata.jsonl").write_text(line)
        refused(message, pairs(sources, "files", source=f"{tmp_path}/*.png"))
    # A number beside a caption is not its weight.
    write_parquet(tmp_path / "a.parquet", records, text=["a red"] * IMAGES, weights=[0.5] * IMAGES)
    assert made(pairs(sources, "parquet", source=f"parquet:{tmp_path}/a.parquet"), steps=1)


def test_damaged_tables_and_images_outside_of_them_are_named(sources, records, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", records)
    section = pairs(sources, "parquet", source=f"parquet:{path}")
    path.write_bytes(path.read_bytes()[:-100])
    refused(r"a\.parquet' as Parquet", section)
    write_parquet(path, records, image=[{"bytes": None, "path": "x.png"}] * IMAGES)
    refused(r"12 of 12 files(.|\n)*a.parquet:1: ValueError: .*no bytes, only the path 'x.png'", section)
    write_parquet(tmp_path / "b.parquet", records, extra=[0] * IMAGES)
    write_parquet(path, records, other=[0] * IMAGES)
    refused(r"b.parquet lacks the columns other of", pairs(sources, "parquet", source=f"parquet:{tmp_path}/*.parquet"))


@pytest.mark.parametrize(("name", "module"), [("parquet", "pyarrow.parquet"), ("datasets", "datasets")])
def test_a_missing_library_is_named_with_the_extra(sources, name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    if module == "pyarrow.parquet":
        monkeypatch.delattr("pyarrow.parquet", raising=False)
    refused(rf"Install it: .*\[{name}\]", pairs(sources, name))


def test_control_images_need_files(sources):
    controls = {"folder": "edges"}
    section = parse(CaptionedData, {"source": sources["tar"], "pipeline": "encoders", "controls": controls})
    with pytest.raises(ConfigError, match=r"data.controls are files .* Unpack them into a folder"):
        section.check(UnetConfig())
