"""`moco report`: what is on the page, from real runs, hostile names and missing pictures included."""

import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import moco
from moco.cli import main
from moco.data import fashion
from moco.errors import UserError
from moco.recipes import pretrain_settings
from moco.reporting import records, report, single
from moco.reporting.checks import KNOWN
from moco.reporting.pictures import look, shown_pairs, view_pairs
from moco.reporting.sections import spread_over
from moco.settings import RunSettings
from moco.train.lock import RunLock

HOSTILE = ["<script>alert(1)<", "{{ 7*7 }} \"quoted' & co", "plain"]


class Page(HTMLParser):
    """Tags, attributes and text of a page; the data of its script."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.text, self._inside = [], "", []
        self.scripts = []
        self.feed(content.decode() if isinstance(content, bytes) else content)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data):
        if self._inside:
            if self._inside[-1] == "script":
                self.scripts.append(data)
        else:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def pretrain(data, out, **given):
    given = {
        "recipe": "small", "base_width": 8, "image_size": 16, "epochs": 2, "batch_size": 16, "queue_size": 64,
        "seed": 1, "out": str(out), "quiet": True, "tensorboard": False, "device": "cpu", "precision": "fp32",
        "threads": 1, "log_every": 1, "workers": 0, "max_bad": 0.1,
    } | given  # fmt: skip
    return moco.pretrain(str(data), **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """72 garments in three folders with hostile names, one file with a hostile name, one that is damaged."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    images, labels, *_ = fashion.load()
    chosen = [index for label in range(3) for index in np.flatnonzero(labels == label)[:24]]
    for place, index in enumerate(chosen):
        target = root / HOSTILE[place // 24]
        target.mkdir(parents=True, exist_ok=True)
        name = f"{place}.png" if place else '"><img src=x onerror=alert(1)>.png'
        cv2.imwrite(str(target / name), images[index])
    (root / "plain" / "'broken<b>.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return pretrain(folder, tmp_path_factory.mktemp("runs") / 'r "x" <b> {{ 1+1 }}')


@pytest.fixture(scope="module")
def page(run):
    return Page(report(run, quiet=True).read_bytes())


def copied(run, path, **changes):
    """A copy of a run elsewhere, some of its settings changed."""
    shutil.copytree(run.path, path)
    copy = moco.Run(path)
    copy.update(RunSettings(**(run.settings.model_dump() | changes)))
    return copy


def test_the_page_has_its_sections_and_fetches_nothing(page, run):
    assert [attributes["id"] for attributes in page.all("section")] == [
        "summary", "curves", "similarities", "views", "map", "neighbours", "classes", "evaluations",
        "skipped", "settings",
    ]  # fmt: skip
    links = {attributes["href"] for attributes in page.all("a")}
    assert links >= {"#" + attributes["id"] for attributes in page.all("section")}
    sources = [attributes["src"] for attributes in page.all("img")]
    assert len(sources) > 100
    assert all(source.startswith("data:image/") for source in sources)
    assert {tag for tag, _ in page.tags}.isdisjoint({"iframe", "object", "embed", "base", "form"})
    assert not [attributes for _, attributes in page.tags if "style" in attributes]
    assert [attributes["href"] for attributes in page.all("link")] == ["data:,"]


def test_whatever_comes_from_data_is_text(page, run):
    assert len(page.all("script")) == 2  # the data and the page's own
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert HOSTILE[0] in page.text
    assert HOSTILE[1] in page.text  # braces are not evaluated
    assert "plain/'broken<b>.png" in page.text
    assert run.path.name in page.text
    assert not page.all("b>")
    names = page.data["map"]["names"]
    assert any("onerror=alert(1)" in name for name in names)
    assert set(page.data["map"]["colours"][0]["groups"]) == set(HOSTILE)


def test_every_picture_has_an_alternative_text(page):
    assert all(attributes.get("alt") for attributes in page.all("img"))
    assert all(attributes.get("aria-label") for attributes in page.all("svg"))
    assert page.all("html") == [{"lang": "en"}]


def test_the_map_knows_neighbours_and_labels(page, folder):
    found = page.data["map"]
    assert len(found["names"]) == 72  # the damaged one is left out
    assert np.asarray(found["near"]).shape == (72, 8)
    assert [one["name"] for one in found["layouts"]] == ["t-SNE", "PCA", "PCA, before training"]
    groups, of = found["colours"][0]["groups"], found["colours"][0]["of"]
    for name, label in zip(found["names"], of, strict=True):
        assert name.startswith(groups[label] + "/")
    for one in found["layouts"]:
        assert max(one["x"]) <= 10_000
        assert min(one["y"]) >= 0


def test_curves_are_those_of_the_metrics(page, run):
    lines = [line for line in run.metrics() if "loss" in line]
    drawn = page.data["charts"]["loss"]["lines"][0]
    assert drawn["y"] == [f"{line['loss']:.4g}" for line in lines]
    assert {"loss", "contrast", "similarity", "rate", "momentum", "check0"} <= set(page.data["charts"])
    assert set(page.data["charts"]["momentum"]["lines"][0]["y"]) == {"0.99"}


def test_every_check_is_explained_in_its_own_words(run):
    table = Path("docs/evaluate.md").read_text().partition("| name | what it is |")[2].partition("\n\n")[0]
    names = re.findall(r"`([a-z_]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert set(names) == set(KNOWN)
    records_of = [{"step": 1, "epoch": 1, "loss": 1.0, "feature_spread": 0.5}]
    records_of.append({"step": 1, "epoch": 1} | dict.fromkeys([*names, "own_share"], 0.5))
    charts = records.charts(records_of, run.settings)
    assert len({chart.title for chart in charts}) == len({chart.explanation for chart in charts}) == len(charts)
    assert {"Feature spread", "Spread after epochs", "Own share"} <= {chart.title for chart in charts}
    bounds = {chart.title: (chart.share, chart.least, chart.most) for chart in charts}
    assert bounds["Dead dimensions"] == (True, 0, 1)
    assert bounds["Momentum"][2] == bounds["Oldest key cosine"][2] == bounds["Random cosine"][2] == 1


def test_a_method_without_these_figures_has_a_page_too(run, tmp_path):
    lines = [
        {"step": 1, "epoch": 0.5, "loss": 1.0, "learning_rate": 0.1},
        {"step": 2, "epoch": 1, "loss": float("nan")},
    ]
    assert [chart.name for chart in records.charts(lines, run.settings)] == ["loss", "rate", "momentum"]
    assert records.charts([], run.settings) == []
    copy = copied(run, tmp_path / "run", data=str(tmp_path / "gone"))
    (copy.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Page(report(copy, quiet=True).read_bytes()).data["charts"].keys() == {"loss", "rate", "momentum"}


def test_without_pictures_the_page_says_so(run, tmp_path):
    copy = copied(run, tmp_path / "run", data=str(tmp_path / "gone"))
    page = Page(report(copy, quiet=True).read_bytes())
    assert page.data["map"] is None
    assert "without pictures" in page.text
    assert "gone" in page.text
    assert page.data["charts"]["loss"]
    with pytest.raises(UserError, match="nowhere"):  # what was named must be there
        report(copy, data=str(tmp_path / "nowhere"), quiet=True)
    before = (copy.path / "report.html").read_bytes()
    assert main(["report", str(copy.path), "--data", str(tmp_path / "nowhere")]) == 2
    assert (copy.path / "report.html").read_bytes() == before


def test_a_run_without_a_checkpoint_has_a_page(run, tmp_path):
    copy = copied(run, tmp_path / "run")
    shutil.rmtree(copy.path / "checkpoints")
    page = Page(report(copy, quiet=True).read_bytes())
    assert "no checkpoint yet" in page.text
    assert page.data["charts"]["loss"]


def test_an_array_in_memory_without_labels_has_clusters(tmp_path):
    pictures = fashion.load()[0][:64]
    own = moco.pretrain(
        pictures, recipe="small", base_width=8, image_size=16, epochs=1, batch_size=16, queue_size=64,
        out=tmp_path / "run", quiet=True, tensorboard=False, device="cpu", precision="fp32", threads=1, monitor="none",
    )  # fmt: skip
    assert "without pictures" in Page(report(own, quiet=True).read_bytes()).text
    page = Page(report(own, pictures, out=str(tmp_path / "elsewhere.html"), quiet=True).read_bytes())
    assert [one["name"] for one in page.data["map"]["colours"]] == ["cluster"]
    assert "Clusters" in page.text
    assert (tmp_path / "elsewhere.html").exists()


def test_warnings_evaluations_and_skipped_files_are_shown(run, tmp_path):
    copy = copied(run, tmp_path / "run", data=str(tmp_path / "gone"))
    copy.warn(3, "collapse: <i>everything</i> looks alike")
    (copy.path / "eval").mkdir(exist_ok=True)
    rows = {"pre-trained": {"kNN accuracy": 0.8125}, "untrained": {"kNN accuracy": 0.5}}
    (copy.path / "eval" / "knn.json").write_text(json.dumps({"evaluation": "knn", "step": 8, "rows": rows}))
    few = {"pre-trained": {"10 %": 0.625, "10 % ±": 0.015}}
    for name, draws in (("fewshot", {"pre-trained": {"10 %": [0.61, 0.64]}}), ("changed", {"pre-trained": 3})):
        details = {"evaluation": "fewshot", "rows": few, "draws": draws}
        (copy.path / "eval" / f"{name}.json").write_text(json.dumps(details))
    (copy.path / "eval" / "torn.json").write_text('{"rows": {')
    page = Page(report(copy, quiet=True).read_bytes())
    assert "collapse: <i>everything</i> looks alike" in page.text
    assert "81.2\N{NO-BREAK SPACE}%" in page.text
    assert "62.5\N{NO-BREAK SPACE}% ± 1.5" in page.text
    assert page.text.count("mean ± standard deviation of 2 draws of the labels") == 1
    assert len([attributes for attributes in page.all("div") if attributes.get("aria-label") == "knn"]) == 1
    assert "'broken<b>.png" in page.text


def test_the_command_repeats_the_run_exactly(run, capsys):
    """Both commands, through the real command line, lead to the settings of the run."""
    stored = run.settings.model_dump()
    caught = {}
    for command in records.commands(run, run.settings).values():
        words = shlex.split(command)
        assert words[:2] == ["moco", "pretrain"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moco.pretraining.pretrain", lambda data, **given: caught.update(data=data, **given))
            assert main(words[1:]) == 0
        data = {"data": caught["data"]} if caught["data"] else {}
        found = pretrain_settings(
            caught.get("config"), **{k: v for k, v in caught.items() if k not in ("data", "config")} | data
        )
        again = found.model_dump()
        assert {k: v for k, v in again.items() if k != "out"} == {k: stored[k] for k in again if k != "out"}
        caught.clear()
    several = records.commands(run, run.settings.model_copy(update={"processes": 4}))
    assert all("--nproc 4" in command for command in several.values())


def test_several_runs_are_compared(run, folder, tmp_path):
    other = pretrain(folder, tmp_path / "other", temperature=0.3, epochs=1)
    path = report([run, other], quiet=True)
    assert path == run.path / "comparison.html"
    page = Page(path.read_bytes())
    rows = dict(records.differing([run.settings, other.settings]))
    assert rows["temperature"] == ["0.1", "0.3"]
    assert "image_size" not in rows
    assert {line["label"] for line in page.data["charts"]["c0"]["lines"]} == {run.path.name, "other"}
    assert "temperature" in page.text
    assert "health: spread" in page.text
    with pytest.raises(UserError, match="twice"):
        report([run, run], quiet=True)


def test_watching_ends_with_the_run_and_looks_again_only_at_new_checkpoints(run, tmp_path, monkeypatch):
    copy = copied(run, tmp_path / "run")
    lines = (copy.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy.path / "metrics.jsonl").write_text("".join(lines[:2]))
    seen, looks = [], []
    monkeypatch.setattr(single.Reporter, "_look", lambda self, *_: looks.append(1) or single.Looked(
        dict.fromkeys(("histograms", "views", "map", "map_data", "gallery", "agreement", "groups"))
    ))  # fmt: skip

    def sleep(seconds):
        seen.append((seconds, (copy.path / "report.html").read_text()))
        if len(seen) == 2:  # the training ends
            (copy.path / "metrics.jsonl").write_text("".join(lines))

    monkeypatch.setattr("moco.reporting.time.sleep", sleep)
    path = report(copy, watch=True, every=30, quiet=True)
    assert [seconds for seconds, _ in seen] == [30, 30]
    assert all('http-equiv="refresh" content="30"' in page for _, page in seen)
    assert 'http-equiv="refresh"' not in path.read_text()
    assert len(looks) == 1


def test_ctrl_c_ends_watching_with_a_page_that_rests(run, tmp_path, monkeypatch):
    copy = copied(run, tmp_path / "run", epochs=5, data=str(tmp_path / "gone"))
    monkeypatch.setattr("moco.reporting.time.sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert 'http-equiv="refresh"' not in report(copy, watch=True, quiet=True).read_text()


def test_how_far_a_run_is(run, tmp_path):
    settings = run.settings
    assert records.progress(run, settings, run.metrics()).state == "finished"
    half = [line for line in run.metrics() if line["epoch"] <= 1]
    assert records.progress(run, settings, half).state == "stopped"
    assert records.progress(run, settings, []).state == "not begun"
    copy = copied(run, tmp_path / "run")
    (copy.path / "run.lock").write_text('{"pid": 1}')  # left by a training that was killed
    assert records.progress(copy, settings, half).state == "stopped"
    lock = RunLock(copy.path)
    lock.take()
    assert records.progress(copy, settings, half).state == "running"
    lock.release()
    assert records.progress(copy, settings, half).state == "stopped"


def test_the_album_is_the_pictures_and_their_features(run, folder):
    from moco.evaluate.features import encode
    from moco.evaluate.pictures import open_part
    from moco.evaluate.subject import Where, load_run

    subject = load_run(Where("run", run=run))
    part = open_part(str(folder), "auto", needed=False)
    album = look(subject, part, device=torch.device("cpu"), precision="fp32", workers=0, seed=0)
    assert album.unreadable[0][0].endswith("'broken<b>.png")
    row = 30
    pixels = cv2.imread(str(folder / album.names[row]), cv2.IMREAD_GRAYSCALE)
    shrunk = cv2.resize(pixels, (16, 16), interpolation=cv2.INTER_AREA).astype(int)
    assert np.abs(album.thumbnails[row].mean(-1) - shrunk).mean() < 12
    from moco.data.loader import evaluation_batches

    batches = evaluation_batches(
        part.source, album.part.indices, size=16, channels=run.settings.channels, batch_size=50
    )
    alone = encode(run.backbone(), batches, mean=subject.mean, std=subject.std, device="cpu")
    assert torch.allclose(alone, album.after, atol=1e-4)
    assert not torch.allclose(album.before, album.after, atol=1e-2)
    pairs = view_pairs(album.part, run.settings, most=64, device=torch.device("cpu"), seed=0)
    shown = shown_pairs(pairs, album.part, 5)
    places = [album.names.index(pair.name) for pair in shown]
    assert places == torch.cat(list(pairs.ids))[:5].tolist()
    for pair, place in zip(shown, places, strict=True):
        assert (pair.picture == album.thumbnails[place]).all()
        assert (pair.query != pair.key).any()


def test_the_gallery_shows_every_group():
    groups = np.repeat([0, 1, 2, 3], [50, 30, 2, 1])
    rows = spread_over(groups, 9, seed=0)
    assert len(set(rows)) == 9
    assert np.bincount(groups[rows]).tolist() == [3, 3, 2, 1]


def test_mistakes_are_one_line(tmp_path, run, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["report", str(run.path), "--images", "1"]) == 2
    assert "images" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert (
        main(["report", str(run.path), "--out", str(tmp_path / "file" / "x.html"), "--data", str(tmp_path / "no")]) == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_damaged_checkpoints_leave_a_page_without_pictures(run, tmp_path, recwarn):
    copy = copied(run, tmp_path / "run")
    for path in copy.checkpoints():
        path.write_bytes(b"torn")
    page = Page(report(copy, quiet=True).read_bytes())
    assert not [one for one in recwarn if "damaged" in str(one.message)]
    assert page.data["map"] is None
    assert "without pictures" in page.text
    assert "checkpoints can be read" in page.text
    assert page.data["charts"]["loss"]
