"""`moco embed`: features as the evaluation has them, from whatever holds pictures, in files that others can read."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

import moco
from moco.cli import main
from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.embedding import open_embeddings, write_embeddings
from moco.errors import Interrupted, UserError
from moco.evaluate.cache import weights_fingerprint
from moco.evaluate.features import encode

COUNT = 600


@pytest.fixture(scope="module")
def pictures():
    x, y, _, _ = fashion.load()
    return x[:COUNT], y[:COUNT]


@pytest.fixture(scope="module")
def run(tmp_path_factory, pictures):
    return moco.pretrain(
        pictures[0][:64], recipe="small", base_width=4, image_size=28, epochs=1, batch_size=32, queue_size=64,
        out=str(tmp_path_factory.mktemp("embedding") / "run"), quiet=True, monitor="none", tensorboard=False,
        device="cpu", precision="fp32", threads=1, workers=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pictures):
    """The pictures as PNG files by class, with one that is damaged; and their numbers in the order of the folder."""
    path = tmp_path_factory.mktemp("pictures") / "clothes"
    for number, (picture, label) in enumerate(zip(*pictures, strict=True)):
        file = path / f"class-{label}" / f"{number:05}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), picture)
    (path / "class-7" / "00000-broken.png").write_bytes(b"\x89PNG, once")
    return path, np.argsort(pictures[1], kind="stable")


def wanted(run, images):
    """What the evaluation computes."""
    settings = run.settings
    batches = evaluation_batches(ArraySource(images), range(len(images)), size=28, channels=1, batch_size=256)
    return encode(run.backbone(), batches, mean=settings.mean, std=settings.std, device="cpu").numpy()


def table(path):
    read = parquet.read_table(path)
    features = np.array(read.column("feature").to_pylist())
    return read, features


def test_in_memory_they_are_those_of_the_evaluation(run, pictures):
    found = moco.embed(run, pictures[0], device="cpu")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted(run, pictures[0]))


def test_a_parquet_file_says_all_that_is_needed(run, pictures, tmp_path, capsys):
    held = write_embeddings(run, pictures[0], labels=pictures[1], out=tmp_path / "new" / "emb.parquet", device="cpu")
    read, features = table(held.path)
    assert read.schema.names == ["index", "path", "label", "class_name", "feature"]
    assert str(read.schema.field("feature").type) == "fixed_size_list<element: float>[32]"
    np.testing.assert_array_equal(features.astype(np.float32), wanted(run, pictures[0]))
    assert read.column("label").to_pylist() == pictures[1].tolist()
    assert read.column("path").to_pylist()[7] == "array[7]"
    about = json.loads(read.schema.metadata[b"moco"])
    assert about["weights"] == weights_fingerprint(run.backbone())
    assert (about["size"], about["channels"], about["run"]) == (28, 1, str(run.path))
    assert (about["mean"], about["std"]) == (list(run.settings.mean), list(run.settings.std))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["emb.parquet"]
    assert "600 rows of 32 numbers" in capsys.readouterr().out
    import pandas  # comes with datasets

    frame = pandas.read_parquet(held.path)
    np.testing.assert_array_equal(np.stack(frame.feature), wanted(run, pictures[0]))


def test_half_precision_and_unit_length(run, pictures, tmp_path):
    given = {"device": "cpu", "quiet": True, "dtype": "float16", "normalize": True}
    found = moco.embed(run, pictures[0], out=tmp_path / "emb.parquet", **given)
    assert found.dtype == np.float16
    read, features = table(tmp_path / "emb.parquet")
    assert "halffloat" in str(read.schema.field("feature").type)
    full = wanted(run, pictures[0])
    full /= np.linalg.norm(full, axis=1, keepdims=True)
    # The nearest number of half precision: half a unit in its last place, and what float32 itself rounds.
    np.testing.assert_allclose(
        features.astype(np.float64), full.astype(np.float64), rtol=1.01 * 2.0**-11, atol=2.0**-24
    )
    assert read.column("label").to_pylist() == [None] * COUNT


def test_npy_with_csv_needs_no_pyarrow(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'momentum-contrast\[parquet\]', or name an .npy file"):
        write_embeddings(run, pictures[0], out=tmp_path / "emb.parquet", quiet=True)
    given = {"labels": pictures[1], "device": "cpu", "quiet": True, "part": 256}
    found = moco.embed(run, pictures[0], out=tmp_path / "emb.npy", **given)
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(np.load(tmp_path / "emb.npy"), wanted(run, pictures[0]))
    lines = list(csv.DictReader((tmp_path / "emb.csv").open()))
    assert [int(line["label"]) for line in lines] == pictures[1].tolist()
    assert lines[-1]["path"] == "array[599]"
    entries = open_embeddings(tmp_path / "emb.npy").entries()
    assert entries.labels.tolist() == pictures[1].tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emb.csv", "emb.json", "emb.npy"]


def test_folder_tar_and_array_of_the_same_pictures_agree(run, folder, pictures, tmp_path, monkeypatch):
    path, order = folder
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for number in order:
            content = cv2.imencode(".png", pictures[0][number])[1].tobytes()
            for name, data in ((f"{number:05}.png", content), (f"{number:05}.cls", b"%d" % pictures[1][number])):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    given = {"device": "cpu", "quiet": True}
    of_array = moco.embed(run, pictures[0][order], **given)
    of_tar = write_embeddings(run, tmp_path / "shard.tar", out=tmp_path / "tar.parquet", **given)
    of_folder = write_embeddings(run, "clothes", out=tmp_path / "folder.parquet", workers=2, **given)
    np.testing.assert_array_equal(of_tar.features(), of_array)
    np.testing.assert_allclose(of_folder.features(), of_array, atol=1e-5)  # the damaged one shifts the batches
    assert of_tar.entries().labels.tolist() == pictures[1][order].tolist()
    read, _ = table(tmp_path / "folder.parquet")
    names = [f"clothes/class-{pictures[1][number]}/{number:05}.png" for number in order]
    assert read.column("path").to_pylist() == names
    assert all(os.path.exists(name) for name in names[:5])
    assert read.column("class_name").to_pylist() == [name.split("/")[1] for name in names]
    place = read.column("index").to_pylist()
    gap = int((pictures[1] < 7).sum())  # the damaged picture comes first in its class
    assert place == [*range(gap), *range(gap + 1, COUNT + 1)]
    skipped = list(csv.DictReader((tmp_path / "folder.parquet.skipped.csv").open()))
    assert [line["path"] for line in skipped] == ["clothes/class-7/00000-broken.png"]
    assert skipped[0]["reason"]
    with pytest.warns(UserWarning, match=r"^1 unreadable, .* NaN; the first: clothes/class-7/00000-broken"):
        in_memory = moco.embed(run, "clothes", **given)
    assert np.flatnonzero(np.isnan(in_memory).any(1)).tolist() == [gap]
    np.testing.assert_array_equal(np.delete(in_memory, gap, 0), of_folder.features())


def test_head_gives_what_the_method_compares(run, pictures):
    found = moco.embed(run, pictures[0][:50], head=True, normalize=True, device="cpu")
    from moco.building import build_model
    from moco.data.views import normalize

    model = build_model(run.settings).eval()
    model.load_state_dict(run.load()["model"])
    images = normalize(torch.from_numpy(pictures[0][:50])[:, None], run.settings.mean, run.settings.std)
    with torch.no_grad():
        expected = torch.nn.functional.normalize(model.query_encoder(images), dim=1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_a_timm_name_and_some_of_the_pictures(pictures, tmp_path, capsys):
    held = write_embeddings("test_resnet", pictures[0], out=tmp_path / "e.npy", images=20, device="cpu")
    assert "note: test_resnet has random weights: --pretrained takes published ones" in capsys.readouterr().out
    index = held.entries().index
    assert len(np.unique(index)) == 20
    assert (np.diff(index) > 0).all()
    np.testing.assert_allclose(
        held.features(), moco.embed("test_resnet", pictures[0][index], device="cpu"), rtol=1e-5, atol=1e-6
    )


CHILD = """
import signal, sys
import numpy as np
import moco.embedding as embedding

images, run, out = sys.argv[1:]
add = embedding.Parts.add

def slow(self, part):
    add(self, part)
    if self.done >= 512:
        (self.folder / "000000000512.npz.partial").write_bytes(b"torn")
        print("here", flush=True)
        signal.pause()

embedding.Parts.add = slow
embedding.write_embeddings(run, images, out=out, part=256, quiet=True, device="cpu")
"""


def test_after_kill_9_the_same_command_goes_on_to_the_same_bytes(run, pictures, tmp_path, monkeypatch):
    x = np.concatenate([pictures[0], pictures[0][::-1]])
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "killed.parquet"
    command = [sys.executable, "-c", CHILD, str(tmp_path / "x.npy"), str(run.path), str(out)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | threads) as process:
        assert process.stdout.readline() == b"here\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    encoded = []

    def counted(network, batches, **given):
        encoded.append(1)
        return encode(network, batches, **given)

    monkeypatch.setattr("moco.embedding.encode", counted)
    given = {"quiet": True, "device": "cpu"}
    write_embeddings(str(run.path), str(tmp_path / "x.npy"), out=out, part=256, **given)
    assert len(encoded) == 3  # of the five batches, two were done
    undisturbed = tmp_path / "whole.parquet"
    write_embeddings(str(run.path), str(tmp_path / "x.npy"), out=undisturbed, part=256, **given)
    assert out.read_bytes() == undisturbed.read_bytes()
    assert not out.with_name(out.name + ".parts").exists()


@pytest.fixture
def begun(run, pictures, tmp_path, monkeypatch):
    """An embedding that was stopped by Ctrl-C after its first part."""
    from moco.embedding import Parts

    add = Parts.add

    def interrupted(self, part):
        add(self, part)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "add", interrupted)
        with pytest.raises(Interrupted, match="256 of 600 pictures are kept: the same command goes on"):
            write_embeddings(run, pictures[0], out=tmp_path / "emb.parquet", part=256, quiet=True, device="cpu")
    return tmp_path / "emb.parquet"


@pytest.mark.parametrize("other", ["weights", "pictures", "labels", "settings", "choice of pictures"])
def test_parts_of_another_embedding_are_refused(run, pictures, begun, other):
    images, given = pictures[0].copy(), {"part": 256, "quiet": True, "device": "cpu", "out": begun}
    subject = run
    if other == "pictures":
        images[599, 3, 3] ^= 1
    elif other == "weights":
        subject = run.path / "checkpoints" / "changed.pt"
        state = torch.load(run.checkpoints()[-1], weights_only=True)
        state["model"]["query_encoder.backbone.conv1.weight"] *= 1.01
        torch.save(state, subject)
    given |= {"labels": pictures[1]} if other == "labels" else {}
    given |= {"normalize": True} if other == "settings" else {"images": 590} if other == "choice of pictures" else {}
    before = sorted(path.name for path in begun.parent.rglob("*"))
    with pytest.raises(UserError, match=rf"was begun with other .*{other}.*: go on as it was begun, delete") as caught:
        write_embeddings(subject, images, **given)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in begun.parent.rglob("*")) == before
    (run.path / "checkpoints" / "changed.pt").unlink(missing_ok=True)


def test_a_damaged_part_is_made_anew(run, pictures, begun):
    part = begun.with_name("emb.parquet.parts") / "000000000000.npz"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 255
    part.write_bytes(content)
    found = moco.embed(run, pictures[0], out=begun, part=256, quiet=True, device="cpu")
    np.testing.assert_array_equal(found, wanted(run, pictures[0]))


def test_features_that_float16_cannot_hold_and_no_numbers(run, pictures, tmp_path):
    state = torch.load(run.checkpoints()[-1], weights_only=True)
    checkpoint = run.path / "checkpoints" / "wild.pt"
    for factor, message in ((1e6, "too large for float16"), (float("nan"), "not finite")):
        changed = {name: tensor.clone() for name, tensor in state["model"].items() if isinstance(tensor, torch.Tensor)}
        for name in changed:
            if name.startswith("query_encoder.backbone.layer4") and "bn2.weight" in name:
                changed[name] *= factor
        torch.save(state | {"model": state["model"] | changed}, checkpoint)
        with pytest.raises(UserError, match=message):
            write_embeddings(checkpoint, pictures[0], out=tmp_path / "e.npy", dtype="float16", quiet=True, device="cpu")
        assert not list(tmp_path.iterdir())
    checkpoint.unlink()


def test_pictures_none_of_which_can_be_read(run, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"none of the first 1 pictures can be read; the first: .*a\.png"):
        write_embeddings(run, tmp_path / "bad", out=tmp_path / "e.npy", quiet=True, device="cpu")


def test_names_that_are_no_utf_8(run, pictures, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    names = [b"\xff.png", b"a\nb.png", b"{0!r}%s.png"]
    content = cv2.imencode(".png", pictures[0][0])[1].tobytes()
    try:
        for name in names:
            Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(content)
    except OSError:
        pytest.skip("this file system takes no such names")
    for out in ("e.parquet", "e.npy"):
        held = write_embeddings(run, folder, out=tmp_path / out, quiet=True, device="cpu")
        found = [os.path.basename(path) for path in held.entries().paths]
        assert found == ["a\nb.png", "{0!r}%s.png", "\\udcff.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the file to write: --out"),
        (["--out", "e.txt"], "name a .parquet file, or a .npy file"),
        (["--out", "there.parquet"], "is there already"),
        (["--out", "e.parquet", "--image-size", "32"], "are for timm names"),
        (["--out", "e.parquet", "--dtype", "int8"], "dtype"),
        (["--out", "e.parquet", "--part", "0"], "part"),
        (["--out", "e.parquet", "--hed"], "unknown option --hed; did you mean --head"),
    ],
)
def test_mistakes_are_one_line(run, folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("there.parquet").touch()
    assert main(["embed", str(run.path), str(folder[0]), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.parquet"]


def test_a_part_is_whole_batches_and_says_so(run, pictures, tmp_path, capsys):
    write_embeddings(run, pictures[0], out=tmp_path / "e.npy", part=300, device="cpu")
    assert "note: --part 300 is rounded up to 512: whole batches of 256 pictures" in capsys.readouterr().out
    for given in ({"part": 512}, {"part": 700}):  # whole batches; more than there are pictures
        write_embeddings(run, pictures[0], out=tmp_path / f"{given['part']}.npy", device="cpu", **given)
        assert "rounded" not in capsys.readouterr().out


@pytest.mark.parametrize("head", [[], ["--head"]])
def test_a_damaged_newest_checkpoint_is_one_line(run, pictures, tmp_path, capfd, recwarn, head):
    shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-999999999.pt").write_bytes(b"torn")
    np.save(tmp_path / "x.npy", pictures[0][:20])
    command = ["embed", str(tmp_path / "run"), str(tmp_path / "x.npy"), "--device", "cpu", *head]
    assert main([*command, "--out", str(tmp_path / "e.npy")]) == 0
    assert capfd.readouterr().out.count("note: step-999999999.pt is damaged; the figures are of step 2\n") == 1
    assert main([*command, "--out", str(tmp_path / "f.npy"), "--quiet"]) == 0
    assert not any(capfd.readouterr())
    assert not [one for one in recwarn if "damaged" in str(one.message)]
    with pytest.warns(UserWarning, match="is damaged and is passed over"):  # in Python as ever
        moco.embed(tmp_path / "run", pictures[0][:20])


def test_the_command_line_writes_the_file(run, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["embed", str(run.path), str(folder[0]), "--out", "e.npy", "--part", "256", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "512 of 601 pictures" in said
    assert "pictures/s" in said
    assert "1 picture could not be read: e.npy.skipped.csv" in said
    assert len(np.load("e.npy")) == COUNT
