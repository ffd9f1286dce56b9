"""Shards behind a URL: ranges of bytes, not whole files; a cache within its bound; trouble with the server."""

import http.server
import io
import multiprocessing
import os
import tarfile
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moco.data.loader import readable
from moco.data.sources import open_source, ranges
from moco.data.sources.cache import BLOCK_BYTES, BlockCache, Cache, digest, locked
from moco.data.sources.ranges import RemoteFile
from moco.errors import UserError

SIZES = [3_000_000, 10, 2_500_000, 0, 700_000, 20, 4_000_000, 5]


def tar(sizes, seed: int = 0) -> bytes:
    file, random = io.BytesIO(), np.random.default_rng(seed)
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = size
            archive.addfile(info, io.BytesIO(random.bytes(size)))
    return file.getvalue()


@pytest.fixture
def memory():
    """fsspec's memory:// and what was asked of it: (path, start, end)."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def asked(memory, monkeypatch):
    requests = []
    cat_file = type(memory).cat_file

    def counted(self, path, start=None, end=None, **rest):
        requests.append((path, start, end))
        return cat_file(self, path, start=start, end=end, **rest)

    monkeypatch.setattr(type(memory), "cat_file", counted)
    monkeypatch.setattr(ranges, "_PAUSES", (0, 0))
    monkeypatch.setattr(ranges, "_failures", 0)
    return requests


def images(source) -> list[bytes]:
    return [source[index].image for index in range(len(source))]


def disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("blocks/*") if path.name != "used")


def test_only_ranges_are_read(memory, asked, tmp_path):
    data = tar(SIZES)
    memory.pipe("/shards/0.tar", data)
    source = open_source("memory://shards/0.tar", cache=tmp_path)
    assert sum(end - start for _, start, end in asked) < len(data) / 4  # the headers are enough for the index
    asked.clear()
    source = open_source("memory://shards/0.tar", cache=tmp_path)
    assert asked == []  # it is kept
    assert len(source[4].image) == 700_000
    assert sum(end - start for _, start, end in asked) <= 700_000 + 2 * BLOCK_BYTES
    assert all(start % BLOCK_BYTES == 0 for _, start, _ in asked)
    assert len(asked) <= 2  # neighbouring blocks in one request, around one that is there already
    asked.clear()
    assert len(source[4].image) == 700_000
    assert asked == []
    whole = tmp_path / "0.tar"
    whole.write_bytes(data)
    assert images(source) == images(open_source(whole, cache=tmp_path))
    assert source[1].name == "0.tar/1.png"


def test_small_members_are_read_in_few_requests(memory, asked, tmp_path):
    memory.pipe("/s.tar", tar([3000] * 2000))
    assert len(open_source("memory://s.tar", cache=tmp_path)) == 2000
    assert len(asked) <= 6
    asked.clear()
    open_source("memory://s.tar", cache=tmp_path / "other")
    open_source("memory://s.tar", cache=tmp_path)[1999]
    assert len(asked) <= 6


def test_patterns_and_workers(memory, tmp_path):
    for number in range(12):
        memory.pipe(f"/set/d-{number:02}.tar", tar([number + 1], seed=number))
    for url in ("memory://set/d-{00..11}.tar", "memory://set/*.tar", "memory://set/"):
        source = open_source(url, cache=tmp_path)
        assert list(map(len, images(source))) == list(range(1, 13))
    wanted = images(source)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # forked, they have the memory of this process
        assert [sample.image for sample in pool.map(source.__getitem__, range(12))] == wanted


def test_a_changed_file_is_another_file(memory, tmp_path):
    memory.pipe("/x.tar", tar([10], seed=1))
    first = open_source("memory://x.tar", cache=tmp_path)[0].image
    memory.pipe("/x.tar", tar([10], seed=2))
    assert open_source("memory://x.tar", cache=tmp_path)[0].image != first


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 900)), max_size=12), st.sampled_from([0, 150, 10_000]))
def test_any_range_is_right(tmp_path_factory, wanted, bound):
    system = fsspec.filesystem("memory")
    data = np.random.default_rng(3).bytes(1000)
    system.pipe("/range", data)
    before, ranges.BLOCK_BYTES = ranges.BLOCK_BYTES, 64
    try:
        file = RemoteFile("memory://range", Cache(tmp_path_factory.mktemp("cache"), bound))
        for offset, size in wanted:
            assert file.read(offset, size) == data[offset : offset + size]
    finally:
        ranges.BLOCK_BYTES = before


def test_the_bound_holds_and_the_oldest_go_first(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 10_000)
    for number in range(50):
        cache.put(digest(f"{number}"), bytes([number]) * 990)
        assert disk(tmp_path) <= 10_000
        assert cache.get(digest("0")) == bytes(990)  # in use all the time, so it stays
    assert cache.get(digest("49")) == bytes([49]) * 990
    assert cache.get(digest("20")) is None
    cache.put(digest("large"), bytes(20_000))
    assert cache.get(digest("large")) is None
    (tmp_path / "blocks" / "used").unlink()
    for number in range(50, 60):
        cache.put(digest(f"{number}"), bytes(990))
        assert disk(tmp_path) <= 10_000


def fill(folder: str, seed: int) -> None:
    cache = BlockCache(Path(folder), 50_000)
    for number in np.random.default_rng(seed).integers(0, 200, 300):
        content = cache.get(digest(f"{number}"))
        assert content in (None, bytes([number]) * 999)
        cache.put(digest(f"{number}"), bytes([number]) * 999)
        with locked(Path(folder, "used")):
            assert sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name != "used") <= 50_000


def test_several_processes_share_the_cache(tmp_path):
    workers = [
        multiprocessing.get_context("fork").Process(target=fill, args=(str(tmp_path / "blocks"), seed))
        for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_damaged_blocks_are_fetched_again(memory, asked, tmp_path):
    memory.pipe("/x.tar", tar([600_000]))
    source = open_source("memory://x.tar", cache=tmp_path)
    wanted = source[0].image
    for number, block in enumerate(path for path in (tmp_path / "blocks").iterdir() if path.name != "used"):
        content = bytearray(block.read_bytes())
        content[100] ^= 1
        block.write_bytes([content, content[:50], b""][number % 3])
    asked.clear()
    assert source[0].image == wanted
    assert len(asked) == 1


def test_without_a_cache_everything_still_works(memory, asked, tmp_path):
    (tmp_path / "file").touch()
    memory.pipe("/x.tar", tar([600_000]))
    source = open_source("memory://x.tar", cache=tmp_path / "file")
    assert len(source[0].image) == 600_000
    assert len(open_source("memory://x.tar", cache=tmp_path, cache_bytes=1)[0].image) == 600_000
    assert disk(tmp_path) == 0


def test_trouble_is_retried_then_an_unreadable_picture_then_the_end(memory, asked, tmp_path, monkeypatch):
    memory.pipe("/x.tar", tar([10_000] * 30))
    source = open_source("memory://x.tar", cache=tmp_path, cache_bytes=1)
    cat_file, trouble = type(memory).cat_file, [2]

    def flaky(self, *args, **rest):
        if trouble[0] > 0:
            trouble[0] -= 1
            raise RuntimeError("connection lost\nsomewhere")  # not an OSError, like those of many clients
        return cat_file(self, *args, **rest)

    monkeypatch.setattr(type(memory), "cat_file", flaky)
    assert len(source[3].image) == 10_000
    trouble[0] = 3
    with pytest.raises(OSError, match="connection lost somewhere"):
        source[3]
    trouble[0] = 10**9
    with pytest.raises(UserError, match=r"20 reads in a row failed: connection lost somewhere; check the connection"):
        readable(source, 0, 3)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing.tar", ["cannot open memory://nothing.tar"]),
        ("memory://none-{0..3}.tar", ["cannot open memory://none-0.tar"]),
        ("memory://none/*.tar", ["no file is called like", "none/*.tar"]),
        ("nonsense://x.tar", ["cannot open nonsense://x.tar", "nonsense"]),
        ("memory://x.tar.gz", ["only uncompressed .tar"]),
        ("memory://x.parquet", ["only uncompressed .tar"]),
        ("memory://broken.tar", ["memory://broken.tar", "no tar file"]),
    ],
)
def test_what_is_refused(memory, tmp_path, url, words):
    memory.pipe("/broken.tar", b"hello" * 300)
    with pytest.raises(UserError) as caught:
        open_source(url, cache=tmp_path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


class Server(http.server.BaseHTTPRequestHandler):
    content = b""
    partial = True

    def do_HEAD(self):
        self.answer(b"", len(self.content))

    def do_GET(self):
        start, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        part = self.content[int(start) : int(end) + 1] if start and self.partial else self.content
        self.answer(part, len(part))

    def answer(self, data, length):
        self.send_response(206 if data and self.partial else 200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def compare(source, wanted) -> None:
    assert images(source) == wanted


def test_http(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "content", tar([600_000, 100]))
    source = open_source(f"{server}/x.tar", cache=tmp_path)
    wanted = images(source)
    assert list(map(len, wanted)) == [600_000, 100]
    source = open_source(f"{server}/x.tar", cache=tmp_path / "nothing", cache_bytes=0)
    worker = multiprocessing.get_context("fork").Process(target=compare, args=(source, wanted), daemon=True)
    worker.start()  # the thread of fsspec, and its connection, stay behind
    worker.join(20)
    assert worker.exitcode == 0
    monkeypatch.setattr(Server, "partial", False)
    with pytest.raises(UserError, match="may not know byte ranges"):
        open_source(f"{server}/x.tar", cache=tmp_path / "other")
