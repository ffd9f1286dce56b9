"""Draws the pictures of these pages: `python docs/figures.py`. The curves are those of four short trainings, kept in
pictures/curves.json; `python docs/figures.py --train` makes them anew (a few minutes on one core)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import nn

import moco
from moco.contrast.batchnorm import shuffle
from moco.contrast.method import follow
from moco.data.fashion import load

HERE = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, RED, GRAY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#bbbbbb"
PAPER = ("#cfe2f3", "#9fc5e8", "#6fa8dc", "#3d85c6", "#0b5394")  # older keys are paler
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "moco", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False, "figure.facecolor": "white", "font.family": "sans-serif"}  # fmt: skip

# What goes wrong in each, and the settings that make it so.
TRAININGS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "at chance: rate far too low": {"learning_rate": 1e-5},
    "collapsing: m = 0, rate too high": {"momentum": 0.0, "learning_rate": 2.0},
    "too easy: hardly any change of view": {
        "crop_scale": (0.99, 1.0), "crop_ratio": (1.0, 1.0), "jitter_probability": 0.0, "flip_probability": 0.0,
        "grayscale_probability": 0.0,
    },
}  # fmt: skip
COLOURS = (GREEN, GRAY, RED, ORANGE)
KEPT = ("epoch", "loss", "chance_loss", "contrast_accuracy", "feature_spread")


def queue() -> None:
    """The ring of keys after each of five steps: `Queue.births` as it is."""
    keys = moco.Queue(size=12, dim=4)
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for step in range(5):
        if step:
            keys.enqueue(torch.randn(5, 4), step=step)
        for place, birth in enumerate(keys.births.tolist()):
            colour = "white" if birth < 0 else PAPER[birth]
            axes.add_patch(plt.Rectangle((place, -step), 0.94, 0.7, facecolor=colour, edgecolor="#555555", lw=0.6))
            text = "random" if birth < 0 else f"step {birth}"
            axes.text(place + 0.47, -step + 0.35, text, ha="center", va="center", fontsize=5.5,
                      color="white" if birth > 2 else "black")  # fmt: skip
        pointer = int(keys.pointer)
        axes.annotate("", (pointer + 0.1, -step + 0.7), (pointer + 0.1, -step + 0.92),
                      arrowprops={"arrowstyle": "->", "color": RED, "lw": 1})  # fmt: skip
        axes.text(-0.2, -step + 0.35, "at first" if step == 0 else f"after step {step}", ha="right", va="center")
    axes.set(xlim=(-2.3, 12.1), ylim=(-4.2, 1.1))
    axes.axis("off")
    axes.set_title("K = 12 keys, 5 new ones per step, written over the oldest (arrow: the next place)", fontsize=8.5)
    _save(figure, "queue")


def momentum() -> None:
    """One weight of the query encoder, as training shakes it, and how `follow` lets the key encoder's go after it."""
    steps = 300
    noise = np.random.default_rng(1).normal(size=steps)
    wanted = 1 - np.exp(-np.arange(steps) / 80)
    fast = wanted + 0.15 * np.convolve(noise, np.ones(6) / 6, mode="same")
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.plot(fast, color=GRAY, lw=0.9, label="θ_q, by gradient")
    for m, colour in ((0.9, ORANGE), (0.99, BLUE), (0.999, RED)):
        query, key = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(key.weight, float(fast[0]))
        line = []
        for value in fast:
            nn.init.constant_(query.weight, float(value))
            follow(key, query, m)
            line.append(key.weight.item())
        axes.plot(line, color=colour, lw=1.6, label=f"θ_k, m = {m}")
    axes.set(xlabel="step", ylabel="one weight")
    axes.legend(frameon=False, loc="upper left")
    _save(figure, "momentum")


def shuffling() -> None:
    """Eight pictures in two groups: where `shuffle` sends their keys."""
    pictures, groups = 8, 2
    rows, _ = shuffle(torch.arange(pictures)[:, None], torch.Generator().manual_seed(3))
    order = rows[:, 0].tolist()
    figure, axes = plt.subplots(figsize=(6.4, 2.7))
    names = "ABCDEFGH"
    for row, (title, placed) in enumerate((("queries", list(range(pictures))), ("keys", order))):
        for group in range(groups):
            left = group * (pictures // groups + 0.5) - 0.1
            axes.add_patch(plt.Rectangle((left, -2 * row - 0.15), pictures / groups, 1.0, fill=False, ls="--", lw=0.8))
            axes.text(left + 2, -2 * row + (1.0 if row == 0 else -0.45), f"normalised together: group {group + 1}",
                      ha="center", fontsize=7.5)  # fmt: skip
        for place, picture in enumerate(placed):
            colour = "#9fc5e8" if picture < pictures // groups else "#f6d9a8"
            axes.add_patch(
                plt.Rectangle((_x(place), -2 * row), 0.8, 0.7, facecolor=colour, edgecolor="#555555", lw=0.6)
            )
            axes.text(_x(place) + 0.4, -2 * row + 0.35, names[picture], ha="center", va="center")
        axes.text(-0.3, -2 * row + 0.35, title, ha="right", va="center")
    for place, picture in enumerate(order):
        axes.plot([_x(picture) + 0.4, _x(place) + 0.4], [-0.15, -1.15], color="#777777", lw=0.7)
    axes.set(xlim=(-1.3, 8.7), ylim=(-2.7, 1.4))
    axes.axis("off")
    _save(figure, "shuffling")


def _x(place: int) -> float:
    return place + 0.5 * (place >= 4)


def curves() -> None:
    """Four trainings: loss as a share of chance, contrast accuracy, spread."""
    runs = json.loads((HERE / "curves.json").read_text(encoding="utf-8"))
    figure, panels = plt.subplots(1, 3, figsize=(8.2, 2.9))
    for (name, lines), colour in zip(runs.items(), COLOURS, strict=True):
        epochs = lines["epoch"]
        shares = [loss / chance for loss, chance in zip(lines["loss"], lines["chance_loss"], strict=True)]
        _line(panels[0], epochs, shares, colour, name)
        _line(panels[1], epochs, lines["contrast_accuracy"], colour, name)
        _line(panels[2], epochs, lines["feature_spread"], colour, name)
    panels[0].axhline(1, color="black", lw=0.6, ls=":")
    for panel, title in zip(panels, ("loss ÷ chance level", "contrast accuracy", "feature spread"), strict=True):
        panel.set(title=title, xlabel="epoch")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    _save(figure, "curves")


def _line(axes: Axes, x: list[float], y: list[float], colour: str, name: str) -> None:
    axes.plot(x, y, color=colour, lw=1.5, label=name)


def train() -> None:
    """The four trainings: 2,000 packaged pictures, a ResNet-18 of 8 channels, 8 epochs of batches of 64."""
    pictures = np.asarray(load()[0][:2000])
    found = {}
    for name, changed in TRAININGS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = moco.pretrain(
                pictures, recipe="small", base_width=8, epochs=8, batch_size=64, queue_size=1024, threads=1,
                precision="fp32", monitor="none", save_every="none", tensorboard=False, out=f"{folder}/run", **changed,
            )  # fmt: skip
            lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "loss" in line]
        found[name] = {key: [round(line[key], 4) for line in lines] for key in KEPT}
    (HERE / "curves.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def _save(figure: Any, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    plt.close(figure)


def draw() -> None:
    """All pictures."""
    HERE.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        queue()
        momentum()
        shuffling()
        curves()


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    draw()
