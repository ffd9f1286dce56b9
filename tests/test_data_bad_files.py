"""A few bad files are passed over, many stop the run: early, once, and in one line."""

import numpy as np
import pytest

from moco.data.bad_files import BadFiles
from moco.data.reading import stand_ins
from moco.errors import UserError


def pairs(*numbers):
    return [(f"{number}.jpg", "damaged") for number in numbers]


def test_each_is_counted_once():
    bad = BadFiles(1000)
    assert bad.add(pairs(1, 2, 1)) == pairs(1, 2)
    assert bad.add(pairs(2, 3)) == pairs(3)
    assert len(bad) == 3


@pytest.mark.parametrize(("total", "share", "limit"), [(100, 0.01, 10), (1000, 0.01, 10), (50_000, 0.01, 500),
                                                      (50_000, 0.1, 5000), (300, 0.0, 0), (20, 1.0, 20)])  # fmt: skip
def test_the_limit(total, share, limit):
    bad = BadFiles(total, share)
    assert bad.limit == limit
    bad.add(pairs(*range(limit)))
    bad.check(seen=total)
    bad.add(pairs("one more"))
    if limit < total:
        with pytest.raises(UserError):
            bad.check(seen=total)


def test_the_message_is_one_line_that_helps():
    bad = BadFiles(200)
    bad.add([("line\nbreak.jpg", "damaged"), *pairs(*range(20))])
    with pytest.raises(UserError) as caught:
        bad.check(seen=30)
    text = str(caught.value)
    assert "\n" not in text
    assert "21 of 200" in text
    assert "more than the 10 allowed" in text
    assert "0.jpg" in text
    assert "18 more" in text
    assert "skipped.csv" in text


@pytest.mark.parametrize(("share", "stops"), [(0.0, False), (0.005, False), (0.009, False), (0.02, True), (0.3, True)])
def test_a_share_above_the_limit_shows_early(share, stops):
    """100,000 pictures in random order: a share clearly above 1 % stops long before the limit of 1,000 is reached."""
    broken = np.random.default_rng(0).random(100_000) < share
    bad = BadFiles(len(broken))
    stopped = None
    for start in range(0, len(broken), 256):
        bad.add(pairs(*(start + np.flatnonzero(broken[start : start + 256]))))
        try:
            bad.check(seen=start + 256)
        except UserError:
            stopped = start
            break
    assert (stopped is not None) == stops
    if stops:
        assert stopped < 25_000


def test_a_chance_heap_at_the_start_does_not_stop():
    bad = BadFiles(100_000)
    bad.add(pairs(*range(12)))
    bad.check(seen=64)


@pytest.mark.parametrize("count", [1, 2, 3, 21, 1000, 4096])
def test_stand_ins_visit_every_picture_once(count):
    for index in (0, count // 2, count - 1):
        order = list(stand_ins(index, count))
        assert order[0] == index
        assert sorted(order) == list(range(count))
    if count > 100:
        second = [next(iter(list(stand_ins(index, count))[1:])) for index in range(20)]
        assert len(set(second)) == 20
        assert min(abs(one - other) for one, other in zip(range(20), second, strict=True)) > 20
