"""Tar shards: the index finds what Python's tarfile finds, whatever happens to the file, and to the index."""

import io
import json
import os
import tarfile
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moco.data.loader import readable
from moco.data.sources import open_source, ranges, shards
from moco.data.sources.opening import expand_braces
from moco.data.sources.tar import DamagedTar, members
from moco.errors import UserError


def tar(entries, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of (name, bytes) or (TarInfo, bytes)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for name, data in entries:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def kind(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def listed(data: bytes) -> tuple[list, str]:
    """The members that the index sees, and how it ends."""
    found = []
    try:
        found.extend(members(lambda offset, size: data[offset : offset + size], len(data)))
    except DamagedTar as error:
        return found, error.reason
    return found, ""


def content(source) -> list[tuple[str, bytes, int | None]]:
    return [(sample.name, sample.image, sample.label) for sample in map(source.__getitem__, range(len(source)))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moco"


LETTERS = st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/")
PART = st.text(LETTERS, min_size=1, max_size=70)
NAMES = st.lists(PART, min_size=1, max_size=5).map("/".join)
NAMES = NAMES | NAMES.map(lambda name: f"{'longer/' * 20}{name}")
ENTRIES = st.lists(st.tuples(NAMES, st.binary(max_size=1200)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(ENTRIES, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_members_are_those_that_tarfile_finds(entries, form):
    try:
        data = tar(entries, form)
    except ValueError:  # USTAR knows no long names
        return
    found, end = listed(data)
    assert end == ""
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as archive:
        wanted = [(info.name, info.offset_data, info.size) for info in archive]
    assert [(member.name, member.offset, member.size) for member in found if not member.folder] == wanted
    assert [data[member.offset : member.offset + member.size] for member in found] == [data for _, data in entries]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_a_cut_gives_what_is_whole_before_it(data, form):
    archive = tar(
        [(f"{'long/' * 30 if form != tarfile.USTAR_FORMAT else ''}é{n}.jpg", bytes(n * 300)) for n in range(5)], form
    )
    whole, _ = listed(archive)
    cut = data.draw(st.integers(0, len(archive)))
    found, end = listed(archive[:cut])
    assert found == [member for member in whole if member.offset + member.size <= cut]
    marked = whole[-1].offset + 1536 + 512 <= cut  # the last one has 1,200 bytes
    assert bool(end) == (not marked)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_damage_never_does_worse_than_end_the_list(data):
    archive = bytearray(tar([(f"{'n' * 120}{n}.jpg", bytes(n * 100)) for n in range(4)]))
    for _ in range(data.draw(st.integers(1, 6))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    found, _ = listed(bytes(archive))
    assert all(member.offset >= 0 and member.offset + member.size <= len(archive) for member in found)


def test_links_folders_and_sparse_files_have_no_picture(tmp_path):
    sparse = tarfile.TarInfo("sparse.png")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "sparse.png"}
    old = bytearray(tar([(kind("old.png", tarfile.REGTYPE), b"")], tarfile.GNU_FORMAT)[:512])
    old[156:157], old[482], old[148:156] = b"S", 1, b" " * 8
    old[124:136] = b"00000001000\0"  # 512 bytes are stored
    old[148:156] = b"%06o\0 " % sum(old)
    more = bytes(504) + b"\1" + bytes(7) + bytes(512)  # two more blocks of the map
    first = tar(
        [
            (kind("d.png", tarfile.DIRTYPE), b""),
            ("a.png", b"aaa"),
            (kind("b.png", tarfile.LNKTYPE, "a.png"), b""),
            (kind("c.png", tarfile.SYMTYPE, "/etc/passwd"), b""),
            (sparse, b"1\n0\n"),
        ]
    )
    first = first[: 512 * (len(first.rstrip(b"\0")) // 512 + 1)]  # without the mark at the end
    (tmp_path / "x.tar").write_bytes(first + bytes(old) + more + b"s" * 512 + tar([("e.png", b"eee")]))
    source = open_source(tmp_path / "x.tar")
    assert content(source) == [("x.tar/a.png", b"aaa", None), ("x.tar/e.png", b"eee", None)]
    assert len(source.notices) == 1
    assert "4 links or sparse members" in source.notices[0]


def test_big_numbers_and_signed_checksums():
    block = bytearray(tar([("ü.png", b"")], tarfile.GNU_FORMAT)[:512])
    block[124:136] = b"\x80" + (5).to_bytes(11, "big")
    for signed in (False, True):
        block[148:156] = b" " * 8
        total = sum(byte - 256 * (signed and byte > 127) for byte in block)
        block[148:156] = b"%06o\0 " % total
        (member,), end = listed(bytes(block) + b"12345" + bytes(507 + 512))
        assert (member.name, member.size, end) == ("ü.png", 5, "")
    block[124:136] = b"\xff" * 12
    block[148:156] = b"%06o\0 " % (sum(block[:148] + block[156:]) + 256)
    assert listed(bytes(block)) == ([], "it is no tar file")
    block[150] ^= 1
    assert listed(bytes(block)) == ([], "it is no tar file")


def test_samples_and_labels_as_webdataset_has_them(tmp_path):
    entries = [
        ("a/0001.cls", b"5"),
        ("a/0001.jpg", b"one"),
        ("a/0001.json", b'{"label": 9}'),
        ("b/0001.seg.png", b"not this"),
        ("b/0001.JPG", b"two"),
        ("b/0001.json", b'{"width": 3, "cls": 6}'),
        ("b/0002.txt", b"no picture"),
        ("b/.0002.jpg", b"hidden"),
        ("b/0003.png", b"three"),
        ("b/0003.json", b"{not json"),
        ("noextension", b"x"),
        ("v1.2/0004.webp", b"four"),
        ("v1.2/0004.cls", b" 7\n"),
    ]
    (tmp_path / "x.tar").write_bytes(tar(entries))
    source = open_source(tmp_path / "x.tar")
    assert content(source) == [
        ("x.tar/a/0001.jpg", b"one", 5),
        ("x.tar/b/0001.JPG", b"two", 6),
        ("x.tar/b/0003.png", b"three", -1),
        ("x.tar/v1.2/0004.webp", b"four", 7),
    ]
    assert source.classes is None
    assert ["left out 1 image" in line for line in source.notices] == [True]
    by_folder = open_source(tmp_path / "x.tar", labels="folder")
    assert (by_folder.labels.tolist(), by_folder.classes) == ([0, 1, 1, 2], ["a", "b", "v1.2"])
    (tmp_path / "y.tar").write_bytes(tar([("./b/1.png", b"1"), ("./a/1.png", b"2")]))  # as `tar c .` has it
    by_folder = open_source(tmp_path / "y.tar", labels="folder")
    assert (by_folder.labels.tolist(), by_folder.classes) == ([1, 0], ["a", "b"])


def test_class_names_are_merged_over_shards(tmp_path):
    for number, name in enumerate(["dog", "cat"]):
        (tmp_path / f"{number}.tar").write_bytes(
            tar([("x.png", b"1"), ("x.json", json.dumps({"class": name}).encode()), ("y.png", b"2")])
        )
    for data in (
        tmp_path,
        tmp_path / "*.tar",
        f"{tmp_path}/{{0..1}}.tar",
        [tmp_path / "0.tar", f"file://{tmp_path}/1.tar"],
    ):
        source = open_source(data)
        assert source.classes == ["cat", "dog"]
        assert source.labels.tolist() == [1, -1, 0, -1]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.tar.gz", b"\x1f\x8b and so on", ["compressed", "gunzip"]),
        ("x.tar", b"\x28\xb5\x2f\xfd and so on", ["compressed", "plain .tar"]),
        ("x.tar", b"", ["no tar file"]),
        ("x.tar", b"hello " * 200, ["no tar file"]),
        ("x.tar", bytes(10240), ["no images", "no files"]),
        ("x.tar", tar([("a.npy", b"1"), ("b.npy", b"2"), ("c.txt", b"")]), ["no images", "2 × .npy"]),
    ],
)
def test_what_is_refused(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    for place in (tmp_path / name, tmp_path / ("*.tar" if name == "x.tar" else name)):
        with pytest.raises(UserError) as caught:
            open_source(place)
        assert "\n" not in str(caught.value)
        for word in [name, *words]:
            assert word in str(caught.value)


def test_truncated_shard_gives_its_readable_part(tmp_path, photographs):
    data = tar([(f"{n}.png", b"x" * 1000) for n in range(4)])
    (tmp_path / "x.tar").write_bytes(data[:3500])
    source = open_source(tmp_path / "x.tar")
    assert [name for name, _, _ in content(source)] == ["x.tar/0.png", "x.tar/1.png"]
    for again in (source, open_source(tmp_path / "x.tar")):  # the line comes from the kept index as well
        assert again.notices == [
            f"{tmp_path}/x.tar: it is cut off at byte 3,072 of 3,500; the 2 images before that are used"
        ]


def test_index_is_kept_and_made_anew_for_a_changed_shard(tmp_path, cache, monkeypatch):
    path = tmp_path / "x.tar"
    path.write_bytes(tar([("a.png", b"1"), ("a.cls", b"5"), ("ü" * 200 + ".png", b"22")]))
    wanted = content(open_source(path))
    calls = []
    index_tar = shards.index_tar
    monkeypatch.setattr(shards, "index_tar", lambda file: calls.append(file.name) or index_tar(file))
    assert content(open_source(path)) == wanted
    assert calls == []
    state = path.stat()
    path.write_bytes(tar([("b.png", b"3"), ("a.cls", b"5"), ("ü" * 200 + ".png", b"22")]))
    assert path.stat().st_size == state.st_size
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert open_source(path)[0].image == b"3"
    path.write_bytes(tar([("c.png", b"4")]))
    assert [name for name, _, _ in content(open_source(path))] == ["x.tar/c.png"]
    assert len(calls) == 2
    assert [file.suffix for file in (cache / "index").iterdir()] == [".npz"]


def test_damaged_index_is_made_anew(tmp_path, cache):
    path = tmp_path / "x.tar"
    path.write_bytes(tar([(f"{n}.png", b"picture") for n in range(20)]))
    wanted = content(open_source(path))
    (index,) = (cache / "index").iterdir()
    good = index.read_bytes()
    random = np.random.default_rng(1)
    torn = [good[:cut] for cut in (0, 1, 100, len(good) // 2, len(good) - 1)]
    for _ in range(40):
        bad = bytearray(good)
        bad[random.integers(len(bad))] ^= int(random.integers(1, 256))
        torn.append(bytes(bad))
    for bad in torn:
        index.write_bytes(bad)
        assert content(open_source(path)) == wanted


@pytest.mark.parametrize("column", ["offsets", "sizes", "codes", "ends", "texts", "blob"])
def test_an_index_that_points_elsewhere_is_not_believed(tmp_path, cache, column):
    path = tmp_path / "x.tar"
    path.write_bytes(tar([(f"{n}.png", b"picture") for n in range(3)]))
    wanted = content(open_source(path))
    (index,) = (cache / "index").iterdir()
    with np.load(index) as archive:
        arrays = dict(archive)
    original = arrays[column].copy()
    for change in (original + np.array(100_000).astype(original.dtype), original[:-1], original * 1.0, -original):
        with warnings.catch_warnings(action="ignore"):
            np.savez(index, **(arrays | {column: change}))
        found = content(open_source(path))
        assert [sample[1:] for sample in found] == [sample[1:] for sample in wanted]
        assert found == wanted or column == "blob"  # names are only names


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "x.tar").write_bytes(tar([("a.png", b"1")]))
    assert len(open_source(tmp_path / "x.tar", cache=tmp_path / "file")) == 1


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "MOST_HANDLES", 3)
    ranges._handles.clear()
    for number in range(10):
        (tmp_path / f"{number}.tar").write_bytes(tar([("a.png", b"%d" % number)]))
    source = open_source(tmp_path)
    for number in (*range(10), 0, 9, 9):
        assert source[number].image == b"%d" % number
        assert len([link for link in map(os.readlink, descriptors()) if link.startswith(str(tmp_path))]) <= 3


def descriptors():
    for entry in os.scandir("/proc/self/fd"):
        if os.path.lexists(entry.path):
            yield entry.path


def test_a_shard_that_changes_under_way_is_an_unreadable_picture(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tar([("a.png", b"1" * 600)]))
    source = open_source(tmp_path)
    ranges._handles.clear()
    (tmp_path / "0.tar").write_bytes(tar([("other.png", b"2" * 600), ("a.png", b"1")]))
    with pytest.raises(OSError, match=r"changed while it was in use.*0\.tar"):
        source[0]
    os.truncate(tmp_path / "1.tar", 700)
    with pytest.raises(OSError, match=r"changed while|ends before"):
        source[1]
    with pytest.raises(UserError, match="none of the 2 images"):
        readable(source, 0, 1)


def test_folder_of_pictures_and_shards(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar([("a.png", b"1")]))
    (tmp_path / "b.png").write_bytes(b"2")
    source = open_source(tmp_path)
    assert len(source) == 1
    assert "1 .tar file beside images" in source.notices[0]


def test_braces():
    assert expand_braces("d-{08..11}.tar") == ["d-08.tar", "d-09.tar", "d-10.tar", "d-11.tar"]
    assert expand_braces("{a,b}-{0..1}") == ["a-0", "a-1", "b-0", "b-1"]
    assert expand_braces("{x}{") == ["{x}{"]
    assert expand_braces("p") == ["p"]
    assert expand_braces("{0..0010}")[-1] == "0010"
    with pytest.raises(UserError, match="more than"):
        expand_braces("{0..9}{0..99999999999}")
    with pytest.raises(UserError, match="no file"):
        expand_braces("{3..1}")


def test_a_gap_in_a_range_is_told(tmp_path):
    (tmp_path / "0.tar").write_bytes(tar([("a.png", b"1")]))
    with pytest.raises(UserError, match=r"1 of 2 files do not exist, the first: .*1\.tar"):
        open_source(f"{tmp_path}/{{0..1}}.tar")
    with pytest.raises(UserError, match="no file is called like"):
        open_source(f"{tmp_path}/*.tar.old")
