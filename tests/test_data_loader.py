"""A batch is a function of (seed, epoch, step): not of workers, of processes, or of where one starts."""

import dataclasses
import multiprocessing
import pickle
from itertools import islice

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from moco.data import by_image
from moco.data.header import Header
from moco.data.loader import Batch, ViewStream, central_box, evaluation_batches, permutation
from moco.data.reading import stand_ins
from moco.data.sources import ArraySource, FolderSource
from moco.data.statistics import measure_statistics
from moco.data.views import apply_image, draw, parameters, recolour
from moco.errors import UserError
from moco.settings import ViewSettings

V2 = ViewSettings()
WEAK = ViewSettings(jitter_probability=0, blur_probability=0, grayscale_probability=0)


def stream(source, **changed):
    options = {
        "query": V2,
        "key": V2,
        "size": 24,
        "channels": 3,
        "batch_size": 8,
        "seed": 5,
        "workers": 0,
        "way": "image",
        "device": torch.device("cpu"),
    }
    return ViewStream(source, **(options | changed))


def same(first, second):
    return (
        torch.equal(first.query, second.query)
        and torch.equal(first.key, second.key)
        and torch.equal(first.ids, second.ids)
        and first.skipped == second.skipped
        and same_rest(first.rest, second.rest)
        and len(first.small) == len(second.small)
        and all(torch.equal(one, other) for one, other in zip(first.small, second.small, strict=True))
    )


def same_rest(first, second):
    if first is None or second is None:
        return first is second
    values, others = (sum((dataclasses.astuple(view) for view in rest), ()) for rest in (first, second))
    return all(np.array_equal(value, other) for value, other in zip(values, others, strict=True))


@pytest.fixture(scope="module")
def tiles(photographs):
    """48 tiles of two photographs, uint8 48 × 40 × 3."""
    return np.stack(
        [photo[y : y + 40, x : x + 40] for photo in photographs for y in (0, 150, 300) for x in range(0, 600, 75)]
    )


@pytest.fixture(scope="module")
def folder(tiles, tmp_path_factory):
    """21 files of different sizes, three of them damaged."""
    root = tmp_path_factory.mktemp("pictures")
    for number, tile in enumerate(tiles[:21]):
        Image.fromarray(tile[: 30 + number % 7, : 25 + number % 11]).save(root / f"{number:02}.png")
    (root / "05.png").write_bytes(b"no picture at all")
    (root / "06.png").write_bytes((root / "07.png").read_bytes()[:200])
    (root / "20.png").write_bytes(b"")
    return FolderSource(root)


def test_permutation_is_a_pure_function():
    order = permutation(3, 1, 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert (order == permutation(3, 1, 1000)).all()
    assert (order != permutation(3, 2, 1000)).any()
    assert (order != permutation(4, 1, 1000)).any()
    assert order.dtype == np.int64


def test_repeated_pictures_come_evenly_and_with_other_views(tiles):
    repeated = stream(ArraySource(tiles), repeat=3, batch_size=16)
    assert repeated.steps_per_epoch == 9
    ids = np.concatenate([repeated.ids(step) for step in range(18)])
    assert (np.bincount(ids) == 6).all()
    assert all(sorted(ids[start : start + 48]) == list(range(48)) for start in range(0, 288, 48))
    first, again = (repeated.batch(step) for step in (0, 3))
    seen = {int(number): view for number, view in zip(first.ids, first.query, strict=True)}
    pairs = zip(again.ids.tolist(), again.query, strict=True)
    shared = [(view, seen[number]) for number, view in pairs if number in seen]
    assert shared
    assert not any(torch.equal(one, other) for one, other in shared)
    few = stream(ArraySource(tiles[:5]), repeat=4, batch_size=16)  # a batch larger than the data
    assert (np.bincount(few.ids(0)) >= 3).all()
    with pytest.raises(UserError, match="10 images are fewer than one batch of 16"):
        stream(ArraySource(tiles[:5]), repeat=2, batch_size=16)


@pytest.mark.parametrize("way", ["image", "split", "batch"])
def test_shapes_and_types(tiles, way):
    batch = stream(ArraySource(tiles), way=way).batch(0)
    for views in (batch.query, batch.key):
        assert views.shape == (8, 3, 24, 24)
        assert views.dtype == (torch.float32 if way == "batch" else torch.uint8)
        assert views.device.type == "cpu"
    assert batch.ids.shape == (8,)
    assert batch.ids.dtype == torch.int64
    assert batch.skipped == []
    assert (batch.rest is not None) == (way == "split")
    assert not torch.equal(batch.query, batch.key)


def test_views_are_those_of_the_drawn_numbers(tiles):
    """The whole computation, written down again: order, table, one parameter row per view."""
    found = stream(ArraySource(tiles), key=WEAK).batch(13)
    epoch = 13 // 6
    ids = permutation(5, epoch, 48)[(13 - 6 * epoch) * 8 :][:8]
    table = draw(5, epoch, 13, 8)
    assert found.ids.tolist() == ids.tolist()
    for views, column, settings in ((found.query, 0, V2), (found.key, 1, WEAK)):
        for row, index in enumerate(ids):
            wanted = apply_image(tiles[index], parameters(table[:, column], 40, 40, settings), row, 24)
            assert (views[row].permute(1, 2, 0).numpy() == wanted).all()


SMALL = V2.model_copy(update={"crop_scale": (0.05, 0.14)})


@pytest.mark.parametrize("way", ["image", "split", "batch"])
def test_small_views_come_beside_the_same_two(tiles, way):
    source = ArraySource(tiles)
    few, many = stream(source, way=way).batch(13), stream(source, way=way, small=(SMALL,) * 3, small_size=10).batch(13)
    assert torch.equal(few.query, many.query)
    assert torch.equal(few.key, many.key)
    assert few.small == ()
    assert [view.shape for view in many.small] == [(8, 3, 10, 10)] * 3
    assert not torch.equal(many.small[0], many.small[1])
    table = draw(5, 2, 13, 8, small=2)
    assert not (table[:, :2] == table[:, 2:]).any()  # numbers of their own
    if way == "split":
        assert [len(drawn) for drawn in many.rest] == [8] * 5
    if way == "image":
        table, ids = draw(5, 2, 13, 8, small=3), many.ids
        for which, views in enumerate(many.small):
            drawn = parameters(table[:, 2 + which], 40, 40, SMALL)
            assert (drawn.height * drawn.width <= 0.16 * 40 * 40).all()
            for row, index in enumerate(ids):
                wanted = apply_image(tiles[index], drawn, row, 10)
                assert (views[row].permute(1, 2, 0).numpy() == wanted).all()


def test_small_views_are_the_same_whoever_makes_them(tiles):
    """Workers, processes, and a start at a later step: the same batch of the same step."""
    options = {"small": (SMALL,) * 2, "small_size": 10}
    source = ArraySource(tiles)
    alone = list(stream(source, **options).run(4, 8))
    for one, other in zip(alone, stream(source, workers=2, **options).run(4, 8), strict=True):
        assert same(one, other)
    parts = [stream(source, rank=rank, world=2, **options).batch(5) for rank in range(2)]
    for which in range(2):
        assert torch.equal(torch.cat([part.small[which] for part in parts]), alone[1].small[which])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("colour", [False, True])
def test_both_ways_agree(tiles, garments, channels, colour):
    source = ArraySource(tiles if colour else garments[:48])
    for step in range(6):
        one = stream(source, channels=channels).batch(step)
        many = stream(source, channels=channels, way="batch").batch(step)
        assert torch.equal(one.ids, many.ids)
        for first, second in ((one.query, many.query), (one.key, many.key)):
            assert (first.double() - second.double() * 255).abs().mean() < 0.75


def finished(batch):
    """The views of a batch of the way "split" with the rest done, in grey levels."""
    pairs = zip((batch.query, batch.key), batch.rest, strict=True)
    return [recolour(view, rest).double() * 255 for view, rest in pairs]


@pytest.fixture(scope="module")
def large(photographs, tmp_path_factory):
    """12 JPEGs of about 400 × 600, two of them turned by EXIF, one cut off behind its header."""
    root = tmp_path_factory.mktemp("large")
    for number in range(12):
        photo = np.roll(photographs[number % 2], 50 * number, axis=1)[number:, number:]
        exif = Image.Exif()
        exif[0x0112] = {3: 6, 4: 3}.get(number, 1)
        Image.fromarray(photo).save(root / f"{number:02}.jpg", quality=92, exif=exif)
    (root / "05.jpg").write_bytes((root / "05.jpg").read_bytes()[:9000])
    return FolderSource(root)


@pytest.mark.parametrize("channels", [1, 3])
def test_split_agrees_with_image(folder, large, tiles, channels):
    """Crops in the workers and the rest at once give the views that are made one by one, within rounding."""
    for source in (folder, large, ArraySource(tiles)):
        for step in range(2):
            one = stream(source, channels=channels, key=WEAK).batch(step)
            many = stream(source, channels=channels, key=WEAK, way="split").batch(step)
            assert torch.equal(one.ids, many.ids)
            assert one.skipped == many.skipped
            for first, second in zip((one.query, one.key), finished(many), strict=True):
                assert (first.double() - second).abs().mean((1, 2, 3)).max() < 1


def test_on_a_cpu_larger_views_of_whole_batches_are_made_one_by_one(tiles):
    """Which is faster there, and gives the same."""
    assert stream(ArraySource(tiles), way="batch", size=26).batch(0).query.dtype == torch.float32
    found, wanted = (stream(ArraySource(tiles), way=way, size=32).batch(3) for way in ("batch", "image"))
    assert same(found, wanted)


def test_every_epoch_visits_every_picture_once(tiles):
    source = ArraySource(tiles[:45])
    views = stream(source)
    assert views.steps_per_epoch == 5
    for epoch in range(2):
        seen = torch.cat([views.batch(step).ids for step in range(5 * epoch, 5 * epoch + 5)])
        assert len(set(seen.tolist())) == 40
    assert not torch.equal(views.batch(0).ids, views.batch(5).ids)
    assert not same(views.batch(0), stream(source, seed=6).batch(0))


@pytest.mark.parametrize("way", ["image", "split"])
def test_workers_and_start_do_not_matter(folder, way):
    alone = stream(folder, way=way)
    assert alone.steps_per_epoch == 2
    state = torch.get_rng_state()
    wanted = [alone.batch(step) for step in range(7)]
    assert sum(len(batch.skipped) for batch in wanted) > 0
    assert all(same(batch, again) for batch, again in zip(wanted, stream(folder, way=way).run(0, 7), strict=True))
    for workers in (1, 2):
        helped = stream(folder, way=way, workers=workers)
        assert all(same(batch, again) for batch, again in zip(wanted, helped.run(0, 7), strict=True))
        for _ in helped.run(0, 7):  # left in the middle, then resumed
            break
        assert all(same(batch, again) for batch, again in zip(wanted[3:6], helped.run(3, 6), strict=True))
        assert list(helped.run(4, 4)) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["image", "split", "batch"])
@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batch(tiles, way, world):
    source = ArraySource(tiles)
    whole = stream(source, way=way)
    ranks = [stream(source, way=way, rank=rank, world=world) for rank in range(world)]
    for step in (0, 4, 11):
        parts = [rank.batch(step) for rank in ranks]
        assert all(len(part.ids) == 8 // world for part in parts)
        wanted = whole.batch(step)
        assert torch.equal(torch.cat([part.ids for part in parts]), wanted.ids)
        for name in ("query", "key"):
            together = torch.cat([getattr(part, name) for part in parts])
            assert (together.float() - getattr(wanted, name).float()).abs().max() < 1e-5


def test_the_batched_way_repeats_exactly(garments):
    options = {"way": "batch", "channels": 1, "workers": 2, "batch_size": 50}
    first, second = stream(ArraySource(garments), **options), stream(ArraySource(garments), **options)
    assert all(same(one, two) for one, two in zip(first.run(3, 10), second.run(3, 10), strict=True))


def test_damaged_files_are_replaced_and_named(folder):
    views = stream(folder, batch_size=21)
    batch = views.batch(0)
    order = permutation(5, 0, 21)
    stand_in = {5: 18, 6: 19, 20: 12}  # 13 places on, which is 21 / 1.618 and has no divisor in common with 21
    assert batch.ids.tolist() == [stand_in.get(int(index), int(index)) for index in order]
    assert {name for name, _ in batch.skipped} == {"05.png", "06.png", "20.png"}
    assert all(reason and "\n" not in reason for _, reason in batch.skipped)


def test_a_file_that_vanishes_is_skipped(tmp_path, tiles):
    for number in range(3):
        Image.fromarray(tiles[number]).save(tmp_path / f"{number}.png")
    source = FolderSource(tmp_path)
    (tmp_path / "1.png").unlink()
    batch = stream(source, batch_size=3).batch(0)
    assert sorted(batch.ids.tolist()) in ([0, 0, 2], [0, 2, 2])
    assert "1.png" in batch.skipped[0][0]
    assert "No such file" in batch.skipped[0][1]
    (tmp_path / "0.png").unlink()
    (tmp_path / "2.png").unlink()
    with pytest.raises(UserError, match="none of the 3 images can be read"):
        stream(source, batch_size=3).batch(0)
    with pytest.raises(UserError, match="none of the 3 images can be read"):
        measure_statistics(source, 3)
    with pytest.raises(UserError) as caught:
        next(iter(stream(source, batch_size=3, workers=1).run(0, 1)))
    assert "\n" not in str(caught.value)


def test_what_a_stream_refuses(tiles, folder):
    with pytest.raises(UserError, match="48 images are fewer than one batch of 64; set batch_size to 48"):
        stream(ArraySource(tiles), batch_size=64)
    with pytest.raises(UserError, match="8 does not divide over 3 processes"):
        stream(ArraySource(tiles), world=3)
    with pytest.raises(UserError, match="in one array"):
        stream(folder, way="batch")


@pytest.mark.parametrize("way", ["image", "split"])
def test_a_stream_can_be_sent_to_a_worker(folder, way):
    views = stream(folder, way=way, workers=1)
    wanted = next(iter(views.run(2, 3)))
    assert same(pickle.loads(pickle.dumps(views)).batch(2), wanted)


def _batch_elsewhere(views, place):
    torch.save(views.batch(2), place)


@pytest.mark.slow
def test_a_spawned_process_makes_the_same_batch(large, tmp_path):
    views = stream(large, way="split")
    process = multiprocessing.get_context("spawn").Process(target=_batch_elsewhere, args=(views, tmp_path / "batch.pt"))
    process.start()
    process.join()
    assert same(torch.load(tmp_path / "batch.pt", weights_only=False), views.batch(2))


# Files: sizes from headers, decoding at reduced size ------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_reduced_decoding_hardly_shows(large, channels, monkeypatch):
    """Decoded at 1/4 or 1/8 where the crops are large enough: the views of the whole picture within 2/255."""
    reductions = []
    decode = by_image.decode

    def watched(image, channels, reduction=1, header=None):
        reductions.append(reduction)
        return decode(image, channels, reduction, header)

    monkeypatch.setattr(by_image, "decode", watched)
    options = {"channels": channels, "query": WEAK, "key": WEAK, "size": 32}
    reduced = [stream(large, **options).batch(step) for step in range(8)]
    assert {1, 4, 8} == set(reductions)
    monkeypatch.setattr(by_image, "REDUCTIONS", ())
    gaps = []
    for found, wanted in zip(reduced, (stream(large, **options).batch(step) for step in range(8)), strict=True):
        assert torch.equal(found.ids, wanted.ids)
        assert found.skipped == wanted.skipped
        for first, second in ((found.query, wanted.query), (found.key, wanted.key)):
            gaps.append((first.double() - second.double()).abs().mean((1, 2, 3)))
    assert torch.cat(gaps).mean() < 1
    assert torch.cat(gaps).max() < 4  # the sharper filter of the decoder shows where everything is fine texture


def test_views_of_files_are_those_of_their_pixels(large):
    """Boxes drawn before decoding, from the headers, are those of the decoded and upright pictures."""
    found = stream(large, size=200, batch_size=12).batch(0)  # so large that nothing is reduced
    table = draw(5, 0, 0, 12)
    for views, column in ((found.query, 0), (found.key, 1)):
        for row, index in enumerate(found.ids.tolist()):
            with Image.open(large.root / large.names[index]) as file:
                pixels = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
            drawn = parameters(table[row : row + 1, column], *pixels.shape[:2], V2)
            wanted = apply_image(pixels, drawn, 0, 200)
            assert np.abs(views[row].permute(1, 2, 0).numpy().astype(int) - wanted).mean() < 2


def test_a_file_cut_off_behind_its_header_is_replaced(large):
    batch = stream(large, batch_size=12).batch(0)
    order = permutation(5, 0, 12)
    assert batch.ids.tolist() == [
        next(islice(stand_ins(5, 12), 1, None)) if index == 5 else int(index) for index in order
    ]
    assert [name for name, _ in batch.skipped] == ["05.jpg"]


@pytest.mark.parametrize("lie", [None, Header(40, 30, False), Header(2000, 3000, False), Header(3000, 2000, True)])
def test_a_header_is_not_trusted(large, lie, monkeypatch):
    """Whatever a header says, the views are those of the picture."""
    wanted = stream(large, size=200).batch(0)
    monkeypatch.setattr(by_image, "read_header", lambda data: lie)
    assert same(stream(large, size=200).batch(0), wanted)


@pytest.mark.parametrize("way", ["image", "split"])
def test_how_many_are_handled_together_does_not_matter(large, way, monkeypatch):
    wanted = stream(large, way=way).batch(0)
    for ahead, together in ((1, 1), (3, 1), (5, 2)):
        monkeypatch.setattr(by_image, "AHEAD", ahead)
        monkeypatch.setattr(by_image, "PIXELS", together * 24**2)
        assert same(stream(large, way=way).batch(0), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory is CUDA's")
def test_pinned_batches_keep_everything(large):
    batch = stream(large, way="split").batch(0)
    pinned = batch.pin_memory()
    assert isinstance(pinned, Batch)
    assert all(tensor.is_pinned() for tensor in (pinned.query, pinned.key, pinned.ids))
    assert same(pinned, batch)


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "size", "box"),
    [
        (28, 28, 32, (0, 0, 28, 28)),
        (40, 60, 64, (0, 10, 40, 40)),
        (256, 512, 224, (16, 144, 224, 224)),
        (1, 9, 224, (0, 4, 1, 1)),
    ],
)
def test_central_box(height, width, size, box):
    assert central_box(height, width, size) == box


def test_evaluation_batches_of_files(folder):
    indices = [3, 5, 0, 19, 7]
    batches = list(evaluation_batches(folder, indices, size=32, channels=3, batch_size=2))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    views = torch.cat(batches)
    assert views.dtype == torch.uint8
    assert (views[1] == 128).all()
    assert (views[0] != 128).any()
    pixels = np.asarray(Image.open(folder.root / "03.png"))  # 33 × 28
    wanted = cv2.resize(pixels[2:30], (32, 32), interpolation=cv2.INTER_LINEAR)
    assert np.abs(views[0].permute(1, 2, 0).numpy().astype(int) - wanted).mean() < 1
    again = torch.cat(list(evaluation_batches(folder, np.array(indices), size=32, channels=3, batch_size=3, workers=2)))
    assert torch.equal(again, views)


@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_of_an_array_agrees_with_files(tmp_path, tiles, channels):
    for number, tile in enumerate(tiles[:6]):
        Image.fromarray(tile).save(tmp_path / f"{number}.png")
    options = {"size": 100, "channels": channels, "batch_size": 4}
    files = torch.cat(list(evaluation_batches(FolderSource(tmp_path), range(6), **options)))
    arrays = torch.cat(list(evaluation_batches(ArraySource(tiles[:6]), range(6), **options)))
    assert files.shape == arrays.shape == (6, channels, 100, 100)
    assert (files.int() - arrays.int()).abs().max() <= 1


def test_measured_statistics(garments, tiles, folder):
    mean, std = measure_statistics(ArraySource(garments), 1, count=400)
    assert mean == pytest.approx([garments.mean() / 255], abs=1e-6)
    assert std == pytest.approx([garments.std() / 255], abs=1e-6)
    mean, std = measure_statistics(ArraySource(tiles), 3, count=10_000)
    assert mean == pytest.approx((tiles.mean((0, 1, 2)) / 255).tolist(), abs=1e-6)
    assert std == pytest.approx((tiles.std((0, 1, 2)) / 255).tolist(), abs=1e-6)
    assert measure_statistics(folder, 3, count=8) == measure_statistics(folder, 3, count=8)
    assert measure_statistics(folder, 3, count=8) != measure_statistics(folder, 3, count=8, seed=1)
    assert measure_statistics(ArraySource(np.full((4, 5, 5), 51, np.uint8)), 3) == ([0.2] * 3, [1 / 255] * 3)
