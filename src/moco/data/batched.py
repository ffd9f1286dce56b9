"""The views of a whole batch at once, on any device, without a loop over pictures. The partner of `per_image.py`.

Crop, resize and flip are two matrix products per picture, and so is the blur; the colour operations work on all
pictures that have one at the same place, each with its own numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from moco.data.colour import MATRIX, TURN, ColourSteps, colour_steps
from moco.data.drawing import BLUR_REACH, LUMINANCE, SOLARIZE_FROM, ViewParameters
from moco.data.noise import gaussian

Array = np.ndarray[Any, Any]

PART_BYTES = 2**20
"""On the CPU a batch is worked on in parts of about this size, so that every operation finds its input in the cache."""


@torch.no_grad()
def apply_batch(images: torch.Tensor, view: ViewParameters, size: int) -> torch.Tensor:
    """Views of a batch: uint8 (N, C, H, W) to float32 (N, C, size, size) in [0, 1], same device.

    Picture i gets row i of `view`. Always computed in float32, also under autocast.
    """
    made = torch.empty((len(images), images.shape[1], size, size), device=images.device)
    steps = colour_steps(view, images.shape[1])
    with torch.autocast(images.device.type, enabled=False):
        for part in _parts(made):
            own = view[part]
            pixels = crop_resize(images[part], own.top, own.left, own.height, own.width, own.flip, size)
            made[part] = _finish(pixels, own, steps[part])
    return made


@torch.no_grad()
def recolour(pixels: torch.Tensor, view: ViewParameters) -> torch.Tensor:
    """What comes after the crop: gain, grayscale, colour jitter, blur, solarise, flip, noise.

    Args:
        pixels: uint8 (N, C, S, S), on any device.
        view: row i for picture i; its crop boxes are not looked at.

    Returns float32 (N, C, S, S) in [0, 1] on the same device. Always computed in float32, also under autocast.
    """
    made = torch.empty(pixels.shape, device=pixels.device)
    steps = colour_steps(view, pixels.shape[1])
    with torch.autocast(pixels.device.type, enabled=False):
        for part in _parts(made):
            own = view[part]
            values = pixels[part].to(torch.float32, memory_format=torch.contiguous_format).mul_(1 / 255)
            if own.flip.any():
                rows = _rows(own.flip, values)
                values[rows] = values[rows].flip(3)
            made[part] = _finish(values, own, steps[part])
    return made


def _parts(made: torch.Tensor) -> Iterator[slice]:
    """The rows of a batch in parts."""
    count = len(made)
    step = count if made.device.type != "cpu" else max(1, PART_BYTES // max(1, made[:1].nbytes))
    return (slice(start, start + step) for start in range(0, count, max(1, step)))


def _finish(pixels: torch.Tensor, view: ViewParameters, steps: ColourSteps) -> torch.Tensor:
    """All but crop and flip. Float (N, C, S, S), which may be written to."""
    pixels = _colour(pixels, steps)
    pixels = _blur(pixels, view)
    if view.solarize.any():
        # Half a level below the threshold, where rounding to uint8 would reach it.
        bright = (pixels >= (SOLARIZE_FROM - 0.5) / 255) & _column(view.solarize, pixels).bool()
        pixels = torch.where(bright, 1 - pixels, pixels)
    noisy = view.noise > 0
    if noisy.any():
        rows = _rows(noisy, pixels)
        noise = gaussian(view.noise_key[noisy], pixels[0].numel(), pixels.device).view(-1, *pixels.shape[1:])
        pixels[rows] = pixels[rows].addcmul_(noise, _column(view.noise[noisy], pixels)).clamp_(0, 1)
    return pixels


def _to(values: Array, like: torch.Tensor) -> torch.Tensor:
    """An array on the device of `like`; on CUDA nobody waits for it, since the driver keeps a copy on the way."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, non_blocking=like.device.type == "cuda")


def _column(values: Array, like: torch.Tensor) -> torch.Tensor:
    """(n,) numbers as float32 (n, 1, 1, 1) on the device of `like`."""
    return _to(values.astype(np.float32), like)[:, None, None, None]


def _rows(chosen: Array, like: torch.Tensor) -> torch.Tensor:
    """The numbers of the chosen pictures, on the device of `like`."""
    return _to(np.flatnonzero(chosen), like)


def crop_resize(
    images: torch.Tensor, top: Array, left: Array, height: Array, width: Array, flip: Array, size: int
) -> torch.Tensor:
    """Boxes of uint8 images (N, C, H, W) resized to (size, size), antialiased: float32 (N, C, size, size) in [0, 1].

    Boxes are (N,) in pixels. Where `flip` is set, the result is flipped left to right, which costs nothing here.
    """
    count, channels, tall, wide = images.shape
    numbers = np.stack([top, height, left, width, flip]).astype(np.float32)
    start_y, length_y, start_x, length_x, flipped = _to(numbers, images)[:, :, None, None]
    place = torch.arange(size, device=images.device, dtype=torch.float32)[None, :, None] + 0.5
    vertical = triangle_weights(start_y, length_y, place, size, tall) / 255
    horizontal = triangle_weights(start_x, length_x, place + flipped * (size - 2 * place), size, wide)
    # (N, C·H, W) · (N, W, S), then (N, 1, S, H) · (N, C, H, S)
    narrow = torch.bmm(images.to(torch.float32).reshape(count, channels * tall, wide), horizontal.mT)
    return torch.matmul(vertical[:, None], narrow.view(count, channels, tall, size))


def triangle_weights(
    start: torch.Tensor, length: torch.Tensor, place: torch.Tensor, size: int, extent: int
) -> torch.Tensor:
    """Weights (N, size, extent) that resize the pixels start … start + length − 1 of a line of `extent` to `size`.

    The triangle filter of Pillow and torchvision: as wide as the step when shrinking, bilinear when enlarging.
    `start`, `length`: (N, 1, 1). `place`: (1 or N, size, 1), centres of the new pixels.
    """
    step = length / size
    pixel = torch.arange(extent, device=start.device, dtype=torch.float32) + 0.5
    distance = (pixel - (start + place * step)).abs_()
    weights = distance.div_(step.clamp(min=1)).neg_().add_(1).clamp_(min=0)
    weights *= (pixel > start) & (pixel < start + length)
    return weights.div_(weights.sum(dim=2, keepdim=True))


def _colour(pixels: torch.Tensor, steps: ColourSteps) -> torch.Tensor:
    """Grayscale and jitter, step by step, each on the pictures that have one there."""
    for step in range(steps.kind.shape[1]):
        mixed = steps.kind[:, step] == MATRIX
        if mixed.any():
            rows = _rows(mixed, pixels)
            pixels[rows] = _mix(pixels[rows], steps.matrix[mixed, step])
        turned = steps.kind[:, step] == TURN
        if turned.any():
            rows = _rows(turned, pixels)
            pixels[rows] = _turn_hue(pixels[rows], steps.roll[turned], steps.shift[turned])
    return pixels


def _mix(pixels: torch.Tensor, matrix: Array) -> torch.Tensor:
    """One step of the kind MATRIX: pixels (n, C, H, W), matrix (n, C, C + 1)."""
    flat = pixels.flatten(2)
    mixed = torch.bmm(_to(matrix[:, :, :-1].astype(np.float32), pixels), flat)
    pull = matrix[:, 0, -1]
    if pull.any():
        mean = flat.mean(dim=2)[:, :, None]
        if flat.shape[1] == 3:
            mean = (mean * _to(np.array(LUMINANCE, np.float32), pixels)[:, None]).sum(dim=1, keepdim=True)
        mixed.addcmul_(mean, _column(pull, pixels)[:, 0])
    return mixed.clamp_(0, 1).view_as(pixels)


def _turn_hue(pixels: torch.Tensor, roll: Array, shift: Array) -> torch.Tensor:
    """Hue turned as `ColourSteps` says; value and chroma stay. Float (n, 3, H, W) in [0, 1].

    Moving the hue forward by a part of a sixth first lets the middle channel rise to the highest, then what was the
    highest fall; in each the neighbour channel tells where on the circle the colour is, so that nothing is divided.
    """
    count = len(pixels)
    own = (np.arange(3) - roll[:, None]) % 3
    neighbour = np.take_along_axis(own, (np.arange(3) + np.where(shift > 0, 1, -1)[:, None]) % 3, axis=1)
    order = _to(np.stack([own, neighbour]) + 3 * np.arange(count)[:, None], pixels)
    planes = pixels.view(3 * count, *pixels.shape[2:])
    own_pixels, next_pixels = (planes[index.flatten()].view_as(pixels) for index in order)
    red, green, blue = torch.split(pixels, 1, dim=1)
    top, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    move = (top - low).mul_(_column(np.abs(shift), pixels))
    fall = torch.minimum((next_pixels - (top - move)).clamp_(min=0), own_pixels - low)
    rise = torch.sub(low + move, next_pixels, out=next_pixels).clamp_(min=0)
    return torch.minimum(rise.add_(own_pixels), top).sub_(fall)


def _blur(pixels: torch.Tensor, view: ViewParameters) -> torch.Tensor:
    chosen = view.blur & (BLUR_REACH * view.sigma >= 1)  # a smaller one does not reach the next pixel
    if not chosen.any():
        return pixels
    kernel = blur_weights(_to(view.sigma[chosen].astype(np.float32), pixels), pixels.shape[2])
    rows = _rows(chosen, pixels)
    pixels[rows] = torch.matmul(torch.matmul(kernel[:, None], pixels[rows]), kernel.mT[:, None])
    return pixels


def blur_weights(sigma: torch.Tensor, size: int) -> torch.Tensor:
    """Weights (n, size, size) that blur a line of pixels with reflected ends. `sigma`: (n,), in pixels.

    A pixel beyond the end counts as its mirror image, hence the sum of three Gaussians.
    """
    sigma = sigma[:, None]
    last = size - 1
    away = torch.arange(2 * size, device=sigma.device, dtype=torch.float32)  # distances, the largest beyond the reach
    # Not the exponentials of huge numbers: what is almost 0 is slow.
    line = torch.exp(-0.5 * (away / sigma).clamp_(max=BLUR_REACH + 1) ** 2)
    line *= away <= (BLUR_REACH * sigma).clamp(max=last)
    here = torch.arange(size, device=sigma.device)
    row, column = here[:, None], here[None, :]
    # A pixel and its mirror images; the end pixels themselves are not repeated.
    weights = line[:, (row - column).abs()]
    weights += line[:, torch.where(column > 0, row + column, 2 * size - 1)]
    weights += line[:, torch.where(column < last, 2 * last - row - column, 2 * size - 1)]
    return weights / weights.sum(dim=2, keepdim=True)
