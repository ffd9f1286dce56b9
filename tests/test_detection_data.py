"""Marked pictures: COCO and VOC files against pycocotools and numbers by hand, damaged entries, batches."""

import contextlib
import io
import itertools
import json

import cv2
import numpy as np
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO

from moco.detection.batches import BatchStream, example
from moco.detection.coco import read_coco
from moco.detection.marked import Marked, MarkedSet
from moco.detection.opening import open_marked
from moco.detection.outlines import box_of, mask_of, outline_of
from moco.detection.voc import parse, read_voc
from moco.errors import UserError

WIDTH, HEIGHT = 20, 12
IDS = itertools.count(1)
SQUARE = [[2.0, 3.0, 8.0, 3.0, 8.0, 7.0, 2.0, 7.0]]


def compressed(mask):
    found = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(map(int, found["size"])), "counts": found["counts"].decode()}


def runs(mask):
    """Run lengths in column order, beginning with zeros: COCO's own definition."""
    flat = mask.flatten(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


@pytest.fixture
def blob():
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[4:9, 5:12] = True
    mask[6, 7] = False
    return mask


@pytest.fixture
def write(tmp_path, photographs):
    """Writes pictures and an annotation file as COCO lays them out."""

    def written(annotations, images=2, **changes):
        for place in ("train", "annotations"):
            (tmp_path / place).mkdir(exist_ok=True)
        for number in range(images):
            cv2.imwrite(str(tmp_path / "train" / f"{number}.png"), photographs[0][number : number + HEIGHT, :WIDTH])
        content = {
            "images": [
                {"id": 100 + number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT}
                for number in range(images)
            ],
            "annotations": annotations,
            "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}, {"id": 17, "name": "cat"}],
        } | changes  # fmt: skip
        file = tmp_path / "annotations" / "instances_train.json"
        file.write_text(json.dumps(content))
        return file

    return written


def one(box=(2, 3, 6, 4), category=17, image=100, **more):
    return {"id": next(IDS), "image_id": image, "category_id": category, "bbox": list(box), "iscrowd": 0} | more


def test_coco_masks_are_those_of_pycocotools_whatever_they_are_written_as(write, blob):
    file = write(
        [
            one(segmentation=SQUARE),
            one((5, 4, 7, 5), 3, segmentation=compressed(blob)),
            one((5, 4, 7, 5), 90, segmentation=runs(blob), iscrowd=1),
        ]
    )
    found = read_coco(file)
    assert found.classes == ("toothbrush", "car", "cat")
    assert len(found) == 2
    assert not found.notes
    picture = found.pictures[0]
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO(str(file))
        expected = [reference.annToMask(entry) for entry in reference.loadAnns(reference.getAnnIds(100))]
    assert np.array_equal(picture.masks(), np.stack(expected))
    by_hand = np.zeros((HEIGHT, WIDTH), np.uint8)
    by_hand[3:7, 2:8] = 1
    assert np.array_equal(picture.masks()[0], by_hand)
    assert np.array_equal(picture.masks()[2], blob)
    assert picture.boxes.tolist() == [[2, 3, 8, 7], [5, 4, 12, 9], [5, 4, 12, 9]]
    assert picture.labels.tolist() == [2, 1, 0]  # numbers of categories have gaps
    assert picture.aside.tolist() == [False, False, True]
    assert found.objects() == 2
    assert found.has_outlines()
    assert len(found.pictures[1].boxes) == 0


def test_crowds_and_empty_pictures_are_not_learned_from(write):
    found = read_coco(write([one(), one(iscrowd=1), one(image=101, iscrowd=1)]))
    assert [len(picture.boxes) for picture in found.to_learn(empty=True).pictures] == [1, 0]
    assert [len(picture.boxes) for picture in found.to_learn(empty=False).pictures] == [1]
    assert not found.has_outlines()


def test_entries_that_cannot_be_used_are_counted_and_the_others_kept(write):
    wrong = [
        one((2, 3, 0, 4)), one((2, 3, 6, -4)), one((30, 3, 6, 4)), one(category=4), one(image=7), "nothing",
        one(segmentation=[[1, 2, 3]]), one(segmentation={"size": [9, 9], "counts": [81]}),
        one(segmentation={"size": [HEIGHT, WIDTH], "counts": [5, 5]}), one("abcd"),
        one(segmentation={"size": [HEIGHT, WIDTH], "counts": "no such runs"}),
    ]  # fmt: skip
    file = write([one((-3, 10, 8, 40)), *wrong])
    (file.parent.parent / "train" / "1.png").unlink()
    found = read_coco(file)
    assert len(found) == 1
    assert found.pictures[0].boxes.tolist() == [[0, 10, 5, HEIGHT]]
    notes = "\n".join(found.notes)
    for count, what in (
        (2, "boxes without an area"), (1, "outside of their picture"), (1, "a category that is not"),
        (1, "a picture that is not listed"), (1, "no entries"), (4, "masks that"), (1, "without a box"),
        (1, "pictures that are not there"),
    ):  # fmt: skip
        assert any(f"{count} left out" in line and what in line for line in found.notes), (what, notes)
    assert "annotations[1]" in notes
    assert len(found.notes) == 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no list of images"),
        (b'{"images": [], "annotations": []}', "categories"),
        (b'{"images": [], "annotations": [], "categories": []}', "no categories"),
        (b'{"images": [], "annotations": [], "categories": [{"name": 3}]}', "id"),
        (b'{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": [{"id": 1, "name": "b"}]}',
         "a.png"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_coco_is_one_clear_line(tmp_path, content, said):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        read_coco(tmp_path / "x.json")
    assert "\n" not in str(error.value)
    assert "x.json" in str(error.value)


def test_runs_and_boxes_of_masks(blob):
    for segmentation in (compressed(blob), runs(blob)):
        outline = outline_of(segmentation, HEIGHT, WIDTH)
        assert np.array_equal(mask_of(outline), blob)
        assert box_of(outline) == (5, 4, 12, 9)


VOC = """<annotation><filename>{name}.jpg</filename><size><width>{w}</width><height>{h}</height></size>
<object><name>dog</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>3</ymin><xmax>8</xmax><ymax>{h}</ymax></bndbox>
<part><name>head</name><bndbox><xmin>2</xmin><ymin>3</ymin><xmax>4</xmax><ymax>5</ymax></bndbox></part></object>
<object><name>cat</name><difficult>1</difficult><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>9.5</xmax><ymax>9</ymax></bndbox></object>
<object><name>cat</name></object>
</annotation>"""


@pytest.fixture
def voc(tmp_path, photographs):
    folder = tmp_path / "VOC2007"
    for place in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / place).mkdir(parents=True)
    for name in ("01", "02"):
        cv2.imwrite(str(folder / "JPEGImages" / f"{name}.jpg"), photographs[0][:HEIGHT, :WIDTH])
        (folder / "Annotations" / f"{name}.xml").write_text(VOC.format(name=name, w=WIDTH, h=HEIGHT))
    (folder / "ImageSets" / "Main" / "trainval.txt").write_text("01\n02  1\n03\n")
    return folder


def test_voc_pixels_count_from_one_and_the_last_belongs_to_the_box(voc):
    found = open_marked(f"voc:{voc}/trainval")
    assert found.classes == ("cat", "dog")
    assert len(found) == 2
    picture = found.pictures[0]
    assert picture.boxes.tolist() == [[0, 2, 8, HEIGHT], [4, 4, 9.5, 9]]  # the first column and the last row
    assert picture.labels.tolist() == [1, 0]
    assert picture.aside.tolist() == [False, True]
    assert any("2 left out" in line and "without a name or a box" in line for line in found.notes)
    assert any("03.xml" in line for line in found.notes)
    twice = open_marked(f"voc:{voc}/trainval,voc:{voc}/trainval")
    assert len(twice) == 4
    assert twice.classes == found.classes


def test_xml_that_declares_a_document_type_is_not_expanded(voc):
    laughs = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'
    with pytest.raises(ValueError, match="document type"):
        parse(laughs.encode())
    (voc / "Annotations" / "01.xml").write_text(laughs)
    (voc / "Annotations" / "02.xml").write_text("<annotation>")
    with pytest.raises(UserError, match="document type"):
        read_voc(voc, "trainval")
    with pytest.raises(UserError, match="there are trainval"):
        read_voc(voc, "test")


@pytest.mark.parametrize("text", ["photos/", "coco:", "coco:nowhere.json", "xml:a/b"])
def test_data_that_is_not_marked_is_refused(text):
    with pytest.raises(UserError, match=r"coco:"):
        open_marked(text)


def test_classes_meet_by_name():
    picture = Marked("a", 4, 4, np.zeros((2, 4), np.float32), np.array([0, 1]), np.zeros(2, bool), (None, None))
    found = MarkedSet("x", ("dog", "cat"), (picture,)).named(("bird", "cat", "dog"))
    assert found.pictures[0].labels.tolist() == [2, 1]


# ---------------------------------------------------------------- batches


def test_a_flip_moves_boxes_and_masks_with_the_picture(write, blob):
    picture = read_coco(write([one((5, 4, 7, 5), segmentation=compressed(blob))])).pictures[0]
    plain, mirror = (example(picture, 3, masks=True, flip=flip) for flip in (False, True))
    assert np.array_equal(plain.picture.flip(2), mirror.picture)
    assert np.array_equal(plain.target["masks"].flip(2), mirror.target["masks"])
    rows, columns = np.nonzero(mirror.target["masks"][0].numpy())
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert mirror.target["boxes"][0].tolist() == edges
    assert mirror.target["labels"].tolist() == [3]  # 0 is the background


def test_a_batch_follows_from_seed_and_iteration(write):
    data = read_coco(write([one(image=100 + number) for number in range(5)], images=5))
    names = [str(picture.path) for picture in data.pictures]
    pixels = {example(p, 3, masks=False, flip=f).picture.numpy().tobytes(): n
              for n, p in zip(names, data.pictures, strict=True) for f in (False, True)}  # fmt: skip
    stream = BatchStream(data, channels=3, masks=False, batch_size=2, seed=3)
    whole = [[one.picture for one in batch] for batch in stream.run(0, 5)]
    shown = [pixels[picture.numpy().tobytes()] for batch in whole for picture in batch]
    assert sorted(shown[:5]) == sorted(shown[5:]) == names
    assert shown[:5] != shown[5:]
    later = [[one.picture for one in batch] for batch in stream.run(3, 5)]
    assert all((a == b).all() for one, two in zip(whole[3:], later, strict=True) for a, b in zip(one, two, strict=True))
    flipped = [picture.numpy().tobytes() for batch in stream.run(0, 40) for picture in (one.picture for one in batch)]
    assert len(set(flipped)) == 10  # both ways of every picture


def test_a_picture_that_cannot_be_read_is_replaced_and_named(write):
    data = read_coco(write([one(), one(image=101)]))
    data.pictures[0].path.write_bytes(b"no picture")
    batch = next(BatchStream(data, channels=3, masks=False, batch_size=2, seed=0).run(0, 1))
    assert (batch[0].picture.shape, batch[1].picture.shape) == ((3, HEIGHT, WIDTH),) * 2
    assert [name for one in batch for name, _ in one.skipped] == [str(data.pictures[0].path)]
    cv2.imwrite(str(data.pictures[1].path), np.zeros((5, 5, 3), np.uint8))  # of another size than it was marked in
    with pytest.raises(UserError, match="none of the 2 pictures"):
        next(BatchStream(data, channels=3, masks=False, batch_size=2, seed=0).run(0, 1))
