"""The parts of a page: curves, histograms, thumbnails, the map's layout, the frame around them."""

import base64
import re
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from moco.report import layout
from moco.report.charts import BOTTOM, LEFT, MOST_POINTS, RIGHT, TOP, Chart, Line, line_of, thinned, ticks
from moco.report.histograms import BINS, Similarities, density
from moco.report.page import _flags, render
from moco.report.thumbnails import COLUMNS, PER_SHEET, as_seen, scaled, sheets, uri


def decoded(data_uri):
    kind, _, content = data_uri.partition(";base64,")
    assert kind == "data:image/webp"
    return cv2.imdecode(np.frombuffer(base64.b64decode(content), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]


def test_a_curve_stands_where_its_values_are():
    chart = Chart("loss", "Loss", "", (Line("loss", [0, 1, 2], [0.0, 5.0, 10.0]),), zero=True)
    path = re.search(r'class="curve s0" d="M([^"]+)"', chart.svg).group(1)
    points = np.array([[float(word) for word in pair.split()] for pair in path.split("L")])
    assert points[:, 0] == pytest.approx([LEFT, (LEFT + RIGHT) / 2, RIGHT], abs=0.1)
    top = BOTTOM - (BOTTOM - TOP) / 1.05  # a twentieth of the range is left above
    assert points[:, 1] == pytest.approx([BOTTOM, (BOTTOM + top) / 2, top], abs=0.1)
    assert chart.points["lines"][0]["y"] == ["0", "5", "10"]
    assert "loss from 0 to 10" in chart.summary


def test_what_is_no_number_is_left_out_of_a_curve():
    records = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": float("nan")}, {"epoch": 3}, {"epoch": 4, "loss": 1.0}]
    line = line_of(records, "loss", "loss")
    assert line.x == (1.0, 4.0)
    assert line.y == (2.0, 1.0)
    assert line_of(records, "momentum", "m") is None


def test_a_long_curve_keeps_its_mean_and_its_extremes():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_007).tolist()
    line = thinned(Line("loss", list(range(10_007)), values))
    assert len(line.x) == MOST_POINTS
    assert max(line.high) == max(values)
    assert min(line.low) == min(values)
    assert np.mean(line.y) == pytest.approx(np.mean(values), abs=1e-3)
    assert all(low <= y <= high for low, y, high in zip(line.low, line.y, line.high, strict=True))


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low, span):
    found = ticks(low, low + span)
    assert len(found) <= 7
    slack = 1e-6 * (abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in found)


def levels(chart):
    """The numbers at the upright axis, from the top."""
    return [float(text.removesuffix(" %")) for text in re.findall(r'class="tick end"[^>]*>([^<]+)<', chart.svg)]


@pytest.mark.parametrize(
    ("values", "kind", "least", "most"),
    [
        ([0.0, 0.0], {"share": True, "least": 0, "most": 1}, 0, 10),
        ([1.0, 0.99], {"share": True, "least": 0, "most": 1}, 85, 100),
        ([0.99, 0.99], {"least": 0, "most": 1}, 0.9, 1),
        ([0.99, 1.0], {"least": -1, "most": 1}, 0.98, 1),
        ([0.0, 0.0], {"zero": True, "least": 0}, 0, 1),
    ],
)
def test_an_axis_shows_nothing_that_cannot_be(values, kind, least, most):
    chart = Chart("x", "X", "", (Line("x", [1, 2], values),), **kind)
    assert len(levels(chart)) > 1
    assert least <= min(levels(chart)) < max(levels(chart)) <= most


def test_what_should_not_be_stays_on_the_picture():
    chart = Chart("x", "X", "", (Line("x", [1, 2], [-0.5, 3.0]),), share=True, least=0, most=1)
    path = re.search(r'class="curve s0" d="M([^"]+)"', chart.svg).group(1)
    assert all(TOP <= float(pair.split()[1]) <= BOTTOM for pair in path.split("L"))


def test_a_single_point_has_its_own_numbers_only():
    chart = Chart("age", "Age", "", (Line("age", [2.0], [4.0]),))
    assert re.findall(r'class="tick [^>]*>([^<]+)<', chart.svg) == ["4", "2"]
    share = Chart("x", "X", "", (Line("x", [1.5], [0.523]),), share=True)
    assert re.findall(r'class="tick [^>]*>([^<]+)<', share.svg) == ["52.3 %", "1.5"]


def test_names_in_a_picture_are_escaped():
    chart = Chart("x", '"><script>alert(1)</script>', "", (Line("<b>", [0, 1], [0, 1]),))
    assert "<script" not in chart.svg
    assert "<b>" not in chart.svg


def test_a_hill_has_the_heights_of_numpys_histogram():
    rng = np.random.default_rng(1)
    values = np.clip(rng.normal(0.3, 0.2, 5000), -1, 1)
    counts, _ = np.histogram(values, BINS, (-1, 1))
    assert density(values) == pytest.approx(counts / 5000)
    found = Similarities("step 1", values, values - 0.4, 0.125)
    outline = re.findall(r'class="hill s0" d="([^"]+)"', found.svg)[0]
    heights = 80.0 - np.array([float(y) for y in re.findall(r"V([\d.]+)H", outline)])
    assert heights / heights.max() == pytest.approx(np.sqrt(counts / counts.max()), abs=0.01)
    assert "12.50%" in found.summary


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_pictures_of_any_channels_get_colours(channels):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 8, channels), np.uint8)
    seen = as_seen(pictures)
    assert seen.shape == (3, 8, 8, 3)
    if channels in (1, 2):
        assert (seen[..., 0] == seen[..., 2]).all()
    if channels in (2, 4):  # what lets everything through is the white behind it
        pictures[..., -1] = 0
        assert (as_seen(pictures) == 255).all()
    if channels in (3, 7):
        assert (seen == pictures[..., :3]).all()


def test_small_pictures_come_back_bit_by_bit(garments):
    picture = as_seen(garments[:1, ..., None])[0]
    assert (decoded(uri(picture)) == picture).all()


def test_each_picture_is_in_its_place_on_the_sheets(garments):
    count = PER_SHEET + 70
    pictures = np.resize(as_seen(garments[..., None]), (count, 28, 28, 3))
    laid = sheets(pictures, 10**9)
    assert laid.side == 28
    assert len(laid.uris) == 2
    whole = [decoded(sheet).astype(int) for sheet in laid.uris]
    for index in (0, 33, PER_SHEET - 1, PER_SHEET, count - 1):
        sheet, within = whole[index // PER_SHEET], index % PER_SHEET
        top, left = within // COLUMNS * 28, within % COLUMNS * 28
        tile = sheet[top : top + 28, left : left + 28]
        differences = [np.abs(tile - pictures[other]).mean() for other in (index, (index + 7) % count)]
        assert differences[0] < 12
        assert differences[0] < differences[1] / 2


def test_sheets_keep_within_their_bytes(photographs):
    patches = np.stack(
        [
            photographs[n % 2][y : y + 64, x : x + 64]
            for n in range(4)
            for y in range(0, 320, 40)
            for x in range(0, 560, 35)
        ]
    )
    rich, poor = sheets(patches, 10**9), sheets(patches, 150_000)
    assert rich.side == 64
    assert poor.side < 64
    assert sum(map(len, poor.uris)) < 1.3 * 150_000 < sum(map(len, rich.uris))
    assert scaled(patches[:2], 32).mean() == pytest.approx(patches[:2].mean(), abs=1)


def test_principal_components_are_those_of_scikit_learn():
    features = torch.randn(200, 12) @ torch.diag(torch.linspace(3, 0.1, 12))
    ours = layout.principal(features, 3)
    theirs = PCA(3).fit_transform(F.normalize(features, dim=1).numpy())
    for column in range(3):
        assert abs(np.corrcoef(ours[:, column], theirs[:, column])[0, 1]) == pytest.approx(1, abs=1e-3)
    assert layout.principal(torch.ones(6, 1), 2).shape == (6, 2)


def test_neighbours_are_those_of_scikit_learn_and_never_the_picture_itself():
    features = torch.randn(3000, 16)
    found = layout.neighbours(features, 8)
    search = NearestNeighbors(n_neighbors=9, metric="cosine", algorithm="brute").fit(features.numpy())
    theirs = search.kneighbors(features[:200].numpy(), return_distance=False)[:, 1:]
    assert (found[:200].numpy() == theirs).mean() > 0.999
    assert not (found == torch.arange(3000)[:, None]).any()
    assert layout.neighbours(features[:4], 8).shape == (4, 3)


def test_groups_that_lie_apart_are_found_and_stay_apart_on_the_map():
    torch.manual_seed(0)
    centres = F.normalize(torch.randn(3, 20), dim=1)
    truth = torch.arange(90) % 3
    features = centres[truth] + 0.05 * torch.randn(90, 20)
    groups = layout.clusters(features, 3, seed=0)
    assert all(len(set(groups[truth.numpy() == label])) == 1 for label in range(3))
    places = torch.from_numpy(layout.t_sne(features, seed=0))
    nearest = torch.cdist(places, places).fill_diagonal_(torch.inf).argmin(1)
    assert (truth[nearest] == truth).all()
    grid = layout.on_grid(places.numpy())
    assert grid.min() == 0
    assert grid.max() == 10_000


class _Policy(HTMLParser):
    found = ""

    def handle_starttag(self, tag, attributes):
        if dict(attributes).get("http-equiv") == "Content-Security-Policy":
            self.found = dict(attributes)["content"]


def test_a_page_allows_itself_only_what_it_brings():
    values = {
        "title": "<t>", "made": "", "refresh": None, "runs": [], "figures": [], "findings": [], "notes": ["\udc80"],
        "charts": [], "differing": [], "data": {"charts": {}, "map": "</script><script>alert(1)"},
    }  # fmt: skip
    page = render("comparison.html.jinja", values).decode()
    parser = _Policy()
    parser.feed(page)
    assert parser.found.startswith("default-src 'none'")
    assert "unsafe" not in parser.found
    assert page.count("<script") == 2
    assert "alert(1)" in page  # as text of the data, in which no tag can begin
    assert "\\udc80" in page
    assert "refresh" not in page.partition("<body>")[0].partition("<style>")[0]


def test_options_in_a_text_are_kept_whole_and_the_rest_is_escaped():
    found = str(_flags("set --bn-groups 8 --shuffle-bn true, not <b> or a--b or -- or 3 -- 4"))
    assert found == (
        'set <span class="flag">--bn-groups</span> 8 <span class="flag">--shuffle-bn</span> true, '
        "not &lt;b&gt; or a--b or -- or 3 -- 4"
    )
