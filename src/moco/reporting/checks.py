"""What the checks after epochs are, for the charts of a report: name, meaning, and what values they can have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """title, explanation: of its chart. share: shown in percent. least, most: no value can be beyond; None: any can."""

    title: str
    explanation: str
    share: bool = False
    least: float | None = None
    most: float | None = None


KNOWN = {
    "knn_accuracy": Check(
        "kNN accuracy",
        "How often the nearest other pictures vote for the right label: the labels are used for this check only.",
        True, 0, 1,
    ),
    "retrieval": Check(
        "Retrieval", "How often two views of a picture find each other among all others.", True, 0, 1
    ),
    "alignment": Check(
        "Alignment",
        "Mean squared distance of two views of a picture: 0 when they are the same to the network, 2 when they have "
        "nothing in common.",
        False, 0, 4,
    ),
    "uniformity": Check(
        "Uniformity",
        "How evenly pictures fill the sphere: 0 when all are one point, about −4 when they are all over it.",
        False, -8, 0,
    ),
    "effective_rank": Check(
        "Effective rank", "How many directions the backbone's features really use: the more, the better.", False, 0
    ),
    "dead_dimensions": Check(
        "Dead dimensions", "Share of the backbone's features that hardly differ from picture to picture.", True, 0, 1
    ),
    "spread": Check(
        "Spread after epochs",
        "As the feature spread of the training, but with the network at rest (eval mode) and on the pictures of the "
        "check: 1 when they fill the sphere, 0 when all look the same.",
        False, 0,
    ),
    "random_cosine": Check(
        "Random cosine",
        "Mean cosine of two different pictures, behind the head: 0 when they fill the sphere, 1 when all are alike.",
        False, -1, 1,
    ),
    "batch_leak": Check(
        "Batch leak",
        "How much easier keys are found than if they had been normalised among strangers (nats of loss): near 0 the "
        "batch gives nothing away.",
    ),
    "batch_leak_error": Check(
        "Batch leak error", "Standard error of the batch leak: a leak below four of them may be chance.", False, 0
    ),
    "batch_leak_share": Check(
        "Batch leak share", "The batch leak as a part of all that the loss has gained: below 2.5 % costs little.", True
    ),
    "oldest_key_cosine": Check(
        "Oldest key cosine",
        "The oldest keys of the queue beside the same views encoded now: 1 when they say the same, below 0.6 they are "
        "stale.",
        False, -1, 1,
    ),
    "oldest_key_age": Check(
        "Oldest key age", "Steps since the oldest keys of the queue were made.", False, 0
    ),
}  # fmt: skip
"""By their names in metrics.jsonl, as in docs/evaluate.md."""
SHARES = ("accuracy", "retrieval", "dead_dimensions", "share")
"""Words in the names of other checks that are shares, shown in percent."""


def described(name: str) -> Check:
    """What is known of a check; of one that is not known, what its name says."""
    title = name.replace("_", " ").capitalize()
    share = any(word in name for word in SHARES)
    return KNOWN.get(name, Check(title, f"{title}, as a check of your own measured it after epochs.", share))
