"""From figures to verdicts: good, watch or bad, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moco.evaluate.contrast_probe import Leak

Verdict = Literal["good", "watch", "bad"]

LEAK_ERRORS = 4.0
"""A gap of fewer standard errors is taken for chance."""
LEAK_SHARE = 0.025
"""A gap of this part of what the loss is below chance is bad; a smaller one costs little, as docs/evaluate.md shows."""
LEAK_MATES = 0.5
"""Shuffled keys keep some of their query's mates by chance; a leak is a gap of half of what all mates would give."""


@dataclass(frozen=True)
class Finding:
    """One figure of a run's health.

    name: what was looked at. value: the figure as text. verdict, reason: what it means. advice: what to do, empty
    where nothing needs doing. figures: the numbers behind it.
    """

    name: str
    value: str
    verdict: Verdict
    reason: str
    advice: str
    figures: Mapping[str, float]


def _judge(value: float, watch: float, bad: float) -> Verdict:
    """Where a value stands between two bounds; bad below watch: small values are the bad ones."""
    if bad < watch:
        value, watch, bad = -value, -watch, -bad
    return "bad" if not value < bad else "watch" if value >= watch else "good"  # NaN is bad


def _decimals(value: float, least: int, *bounds: float) -> int:
    """Decimals, `least` or more, with which a value stands on the same side of its bounds as it does unrounded."""
    for decimals in range(least, least + 4):
        rounded = round(value, decimals)
        if all((rounded < bound, rounded > bound) == (value < bound, value > bound) for bound in bounds):
            return decimals
    return least + 4


def _number(value: float, least: int, *bounds: float) -> str:
    return f"{value:.{_decimals(value, least, *bounds)}f}"


def _percent(share: float, least: int, *bounds: float) -> str:
    """A share (0 to 1) in percent; bounds in percent too."""
    return f"{_number(share * 100, least, *bounds)}%"


def loss_finding(loss: float, chance: float, epochs: float) -> Finding:
    """Is anything learned at all? loss and chance in nats (chance: ln(K + 1)); epochs: passes over the data so far."""
    below = (chance - loss) / chance
    verdict = _judge(below, watch=0.1, bad=0.01)
    early = epochs < 5
    if verdict == "bad" and early and loss == loss:
        verdict = "watch"
    reasons = {
        "good": "the loss is well below what knowing nothing would give",
        "watch": "the loss is still near what knowing nothing would give"
        + ("; it rises at first, while real keys replace the random ones, and then falls" if early else ""),
        "bad": "the loss is where knowing nothing would leave it",
    }
    advice = {
        "good": "",
        "watch": "train on; a large queue and a strong augmentation keep it near there for a while",
        "bad": "check the learning rate (0.03 at batch 256 is usual), the temperature, and whether the pictures decode",
    }[verdict]
    shown = f"{loss:.3f}, chance {chance:.3f}"
    return Finding("loss", shown, verdict, reasons[verdict], advice, {"loss": loss, "chance_loss": chance})


def spread_finding(spread: float, cosine: float) -> Finding:
    """Collapse: feature_spread (about 1: all over the sphere, 0: one point) and mean cosine of random pairs."""
    verdict = max(_judge(spread, watch=0.4, bad=0.1), _judge(cosine, watch=0.75, bad=0.95), key=_ORDER.index)
    reasons = {
        "good": "the features are spread over the sphere",
        "watch": "the features crowd in one region",
        "bad": "the features have collapsed: every picture gets about the same vector",
    }
    advice = {
        "good": "",
        "watch": "see whether it grows with training; a lower temperature or more negatives spread them",
        "bad": "is momentum well above 0, and the learning rate sane? the key encoder must get no gradient",
    }[verdict]
    shown = f"spread {_number(spread, 2, 0.4, 0.1)}, cosine of random pairs "
    shown += f"{cosine:+.{_decimals(cosine, 2, 0.75, 0.95)}f}"
    return Finding("spread", shown, verdict, reasons[verdict], advice, {"feature_spread": spread, "cosine": cosine})


def rank_finding(rank: float, dead: float, dimensions: int) -> Finding:
    """Effective rank (RankMe, arXiv 2210.02885) and dead dimensions (0 to 1) of `dimensions`."""
    verdict = max(
        _judge(rank / dimensions, watch=0.05, bad=0.0), _judge(rank, watch=4.0, bad=1.5),
        _judge(dead, watch=0.5, bad=0.95), key=_ORDER.index,
    )  # fmt: skip
    reasons = {
        "good": "many directions are in use",
        "watch": "few of the directions are in use",
        "bad": "next to no direction is in use (dimensional collapse)",
    }
    advice = {
        "good": "",
        "watch": "compare with a longer run; more varied pictures, a wider head or less weight decay use more of them",
        "bad": "lower the learning rate or the weight decay, and look at the loss",
    }[verdict]
    shown = f"effective rank {_number(rank, 1, 4.0, 1.5)} of {dimensions}, {_percent(dead, 0, 50, 95)} dead"
    return Finding("rank", shown, verdict, reasons[verdict], advice, {"effective_rank": rank, "dead_dimensions": dead})


def alignment_finding(alignment: float, uniformity: float) -> Finding:
    """Wang & Isola (arXiv 2005.10242): two views of a picture near each other, different pictures far apart."""
    verdict = max(_judge(alignment, watch=1.0, bad=1.8), _judge(uniformity, watch=-1.0, bad=-0.2), key=_ORDER.index)
    if verdict == "good":
        reason, advice = "views of a picture agree, and pictures differ", ""
    elif alignment >= 1.0:
        reason = "two views of a picture have little in common"
        advice = "train longer, or make the augmentation gentler (a larger --crop-scale)"
    else:
        reason, advice = "different pictures lie close together", "a lower temperature pushes them apart"
    shown = f"alignment {_number(alignment, 2, 1.0, 1.8)}, uniformity {_number(uniformity, 2, -1.0, -0.2)}"
    return Finding("alignment", shown, verdict, reason, advice, {"alignment": alignment, "uniformity": uniformity})


def leak_finding(leak: Leak, chance: float, *, shuffled: bool, groups: int, in_batch: bool = False) -> Finding:
    """Do keys give away which batch they come from ([v1] section 3.3)? What the loss gained on `chance` scales the gap.

    Keys normalised with the same mates as their query are found more easily than among strangers. Shuffling leaves
    a small part of that, about one mate in `groups`. in_batch: a query meets keys of its own batch only, which all
    share its statistics, so that there is nothing to shuffle.
    """
    gained = max(chance - leak.loss, 1e-9)
    share = leak.gap / gained
    costs = _percent(share, 1, LEAK_SHARE * 100)
    sure = leak.gap > LEAK_ERRORS * leak.error and leak.gap > LEAK_MATES * leak.most
    open_to_it = not shuffled and not in_batch
    unseen = open_to_it and LEAK_ERRORS * leak.error > LEAK_SHARE * gained
    verdict: Verdict = "bad" if sure and share > LEAK_SHARE else "watch" if sure or unseen else "good"
    split = (
        "fewer or larger groups leak less: look at --bn-groups"
        if shuffled
        else "train with --bn-groups 8 --shuffle-bn true"
        if groups == 1
        else "train with --shuffle-bn true"
    )
    if verdict == "bad":
        reason = f"part of what finds a key is the batch it was normalised in, not the picture ({costs} of what "
        reason, advice = reason + "the loss gained)", split
    elif sure:
        reason = f"keys give away a little of their batch ({costs} of what the loss gained), which costs little"
        advice = f"nothing for a short training; for a long one, {split}"
    elif unseen:
        reason = "keys share the batch of their query, and too little is learned yet to tell what that gives away"
        advice = f"look again later, or {split}"
    else:
        reason, advice = "keys are found as well among strangers as in their own batch", ""
        if open_to_it:
            reason += ", though nothing shuffles them: a longer training may still learn to use it"
    together = "the whole batch" if groups == 1 else f"{groups} groups"
    shown = f"{together}, {'keys of the same batch' if in_batch else 'shuffled' if shuffled else 'not shuffled'}: "
    shown += f"accuracy {leak.as_trained:.1%} as trained, {leak.fresh:.1%} in fresh groups"
    figures = {
        "accuracy_as_trained": leak.as_trained, "accuracy_fresh": leak.fresh, "gap": leak.gap,
        "gap_error": leak.error, "gap_share": share, "gap_with_all_mates": leak.most,
    }  # fmt: skip
    if leak.running is not None:
        shown += f", {leak.running:.1%} running"
        figures["accuracy_running"] = leak.running
    return Finding("batch norm leak", shown, verdict, reason, advice, figures)


def stale_finding(
    cosines: Mapping[int, float], momentum: float, hidden: float | None = None, gained: float = 0.0
) -> Finding:
    """Do the keys still say what the encoder would say now? cosines: by age in steps; bounds 0.9 and 0.6.

    hidden: `staleness.age_gap`, None where it is not known; gained: what the loss has gained on chance, both in nats.
    Bounds of their ratio: a third and two thirds.
    """
    oldest, worst = max(cosines), min(cosines.values())
    moved = _judge(worst, watch=0.9, bad=0.6)
    share = 0.0 if hidden is None else max(hidden, 0.0) / max(gained, 1e-9)
    easier = _judge(share, watch=1 / 3, bad=2 / 3) if hidden is not None else "good"
    verdict = max(moved, easier, key=_ORDER.index)
    if verdict == "good":
        reason = "queued keys are what the key encoder would make of their views now"
    elif easier == verdict:
        reason = "queries find their key partly because the others are older, not because they show something else"
    elif verdict == "watch":
        reason = "the key encoder has moved on from its older keys"
    else:
        reason = "old keys no longer belong to this key encoder"
    slower = 1 - (1 - momentum) / 4
    advice = "" if verdict == "good" else f"a slower key encoder (--momentum {slower:.4g}) or a smaller --queue-size"
    shown = f"cosine {cosines[oldest]:.3f} at age {oldest}, lowest {_number(worst, 3, 0.9, 0.6)}"
    figures = {f"age_{age}": cosine for age, cosine in cosines.items()} | {"lowest": worst}
    if hidden is not None:
        shown += f"; with all keys made anew the loss would be {abs(hidden):.2f} {'higher' if hidden > 0 else 'lower'}"
        figures |= {"age_gap": hidden, "age_gap_share": share}
        if verdict != "good" and easier == verdict:
            part = _percent(share, 0, 100 / 3, 200 / 3)
            reason += f" ({part} of what the loss gained), and the loss rises as the learning rate falls"
    return Finding("stale keys", shown, verdict, reason, advice, figures)


def negatives_finding(above: float, own: float, queue: int, images: int) -> Finding:
    """Share of negatives that are nearer than the positive; keys of a query's own picture, which are masked."""
    verdict = _judge(above, watch=0.1, bad=0.4)
    advice = ""
    reason = "own-image keys are masked, and few negatives are nearer than the positive"
    if verdict != "good":
        reason = "many negatives are nearer than the positive"
        advice = "train longer; if it stays, look for duplicates in the data, or make the augmentation gentler"
    elif own > 1:
        verdict, reason = "watch", "the queue holds each picture more than once; the copies are masked, and add nothing"
        advice = f"--queue-size {1 << max((images // 2).bit_length() - 1, 0)} is enough for {images} pictures"
    shown = f"{_percent(above, 2, 10, 40)} above the positive, {own:.2f} own keys masked per query (K {queue})"
    return Finding("negatives", shown, verdict, reason, advice, {"above_positive": above, "own_keys": own})


def duplicates_finding(exact: float, near: float, looked_at: int) -> Finding:
    """Pictures (0 to 1) of which there is an exact copy, and of the others those that look nearly like another one.

    Each is a false negative of the other. Pictures that only look alike may still be different ones: never *bad*.
    """
    verdict = _judge(exact, watch=0.02, bad=0.3)
    if verdict == "good" and near < 0.1:
        reason, advice = "few pictures occur twice", ""
    elif verdict != "good":
        reason = "copies of a picture are its negatives"
        advice = "remove the copies: they are pushed apart though they are the same (moco check names them)"
    else:
        verdict = "watch"
        reason = "many pictures look nearly alike, and are each other's negatives"
        advice = "see with moco check whether they show the same; then keep one of each"
    decimals = max(_decimals(exact * 100, 2, 2, 30), _decimals(near * 100, 2, 10))
    shown = f"{exact:.{decimals}%} exact, {near:.{decimals}%} near of {looked_at}"
    figures = {"duplicates": exact, "near_duplicates": near}
    return Finding("duplicates", shown, verdict, reason, advice, figures)


def temperature_finding(hardest: float, temperature: float) -> Finding:
    """Share of the gradient on the hardest 1% of the negatives (0.01: all count alike, 1: only those count)."""
    if hardest < 0.03:
        verdict, reason, advice = (
            "watch",
            "all negatives count about alike",
            f"a lower --temperature than {temperature:g}",
        )
    elif hardest > 0.98:
        verdict, reason = "watch", "only the nearest 1% of the negatives count"
        advice = f"a higher --temperature than {temperature:g}, above all if there are duplicates"
    else:
        verdict, reason, advice = "good", "near negatives count most, and others still count", ""
    shown = f"{_percent(hardest, 1, 3, 98)} of the gradient on the hardest 1%"
    return Finding(
        "temperature", shown, "watch" if verdict == "watch" else "good", reason, advice, {"hardest": hardest}
    )


def augmentation_finding(found: float, chance: float) -> Finding:
    """How often an untrained network finds the other view of a picture among others: too easy or too hard a task?"""
    if found > 0.9:
        reason, advice = (
            "pixels alone find the other view: the task is too easy",
            "stronger crops (a lower --crop-scale)",
        )
    elif found < 3 * chance:
        reason, advice = "the views of a picture share next to nothing", "gentler crops (a higher --crop-scale)"
    else:
        reason, advice = "views differ, and still show the same picture", ""
    shown = f"{_percent(found, 1, 90, 300 * chance)} found by an untrained network"
    return Finding("augmentation", shown, "watch" if advice else "good", reason, advice, {"found_untrained": found})


def data_wait_finding(share: float) -> Finding:
    """Part of the time (0 to 1) that training waited for pictures."""
    verdict: Verdict = "watch" if share > 0.3 else "good"
    reason = "training rarely waits for pictures" if verdict == "good" else "training waits for pictures"
    advice = "" if verdict == "good" else "see moco bench for what would help (--workers, --views)"
    return Finding("data wait", f"{_percent(share, 0, 30)} of the time", verdict, reason, advice, {"data_wait": share})


def gradient_finding(norms: Mapping[str, float]) -> Finding:
    """Gradient norms by layer, as last written down."""
    low, high = min(norms, key=lambda name: norms[name]), max(norms, key=lambda name: norms[name])
    finite = all(norm == norm and norm not in (float("inf"), float("-inf")) for norm in norms.values())
    verdict: Verdict = "bad" if not finite else "watch" if norms[low] == 0 else "good"
    reason = {
        "good": "every layer learns", "watch": f"{low} gets no gradient", "bad": "a gradient is no number",
    }[verdict]  # fmt: skip
    advice = {"good": "", "watch": "is it frozen on purpose?", "bad": "lower the learning rate, or --clip-gradient 1"}
    shown = f"{norms[low]:.2g} ({low}) to {norms[high]:.2g} ({high})"
    return Finding("gradients", shown, verdict, reason, advice[verdict], dict(norms))


def finite_finding(broken: Sequence[str]) -> Finding:
    """Weights that are no numbers."""
    if broken:
        reason, advice = "the weights hold NaN or infinity", "go back to an earlier checkpoint; see --on-nan"
        return Finding("weights", f"{len(broken)} tensors, first {broken[0]}", "bad", reason, advice, {})
    return Finding("weights", "all finite", "good", "every weight is a number", "", {})


_ORDER: tuple[Verdict, ...] = ("good", "watch", "bad")


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict among findings; good where there are none."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="good")
