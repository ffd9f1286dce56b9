"""The views of a whole batch at once, on any device, without a loop over pictures. The partner of `per_image.py`.

Crop, resize and flip are two matrix products per picture, and so is the blur; the colour operations work on the
whole batch, each picture with its own factor and its own order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moco.data.drawing import (
    BLUR_REACH,
    BRIGHTNESS,
    CONTRAST,
    HUE,
    LUMINANCE,
    SATURATION,
    SOLARIZE_FROM,
    ViewParameters,
)

Array = np.ndarray[Any, Any]


@torch.no_grad()
def apply_batch(images: torch.Tensor, view: ViewParameters, size: int) -> torch.Tensor:
    """Views of a batch: uint8 (N, C, H, W) with C = 1 or 3, to float32 (N, C, size, size) in [0, 1], same device.

    Picture i gets row i of `view`. Always computed in float32, also under autocast.
    """
    with torch.autocast(images.device.type, enabled=False):
        pixels = crop_resize(images, view.top, view.left, view.height, view.width, view.flip, size)
        colour = pixels.shape[1] == 3
        if colour:
            pixels = _grayscale(pixels, view.grayscale_before)
        if view.jitter.any():
            pixels = _jitter(pixels, view)
        if colour:
            pixels = _grayscale(pixels, view.grayscale_after)
        pixels = _blur(pixels, view)
        if view.solarize.any():
            # Half a level below the threshold, where rounding to uint8 would reach it.
            bright = (pixels >= (SOLARIZE_FROM - 0.5) / 255) & _column(view.solarize, pixels).bool()
            pixels = torch.where(bright, 1 - pixels, pixels)
        return pixels


def _column(values: Array, like: torch.Tensor) -> torch.Tensor:
    """(n,) numbers as float32 (n, 1, 1, 1) on the device of `like`."""
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None, None, None]


def _rows(chosen: Array, like: torch.Tensor) -> torch.Tensor:
    """The numbers of the chosen pictures, on the device of `like`."""
    return torch.from_numpy(np.flatnonzero(chosen)).to(like.device)


def crop_resize(
    images: torch.Tensor, top: Array, left: Array, height: Array, width: Array, flip: Array, size: int
) -> torch.Tensor:
    """Boxes of uint8 images (N, C, H, W) resized to (size, size), antialiased: float32 (N, C, size, size) in [0, 1].

    Boxes are (N,) in pixels. Where `flip` is set, the result is flipped left to right, which costs nothing here.
    """
    count, channels, tall, wide = images.shape
    numbers = np.stack([top, height, left, width, flip]).astype(np.float32)
    start_y, length_y, start_x, length_x, flipped = torch.from_numpy(numbers).to(images.device)[:, :, None, None]
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


def luminance(pixels: torch.Tensor) -> torch.Tensor:
    """(N, 3, H, W) to (N, 1, H, W); one channel stays as it is."""
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = torch.split(pixels, 1, dim=1)
    return (red * LUMINANCE[0]).add_(green, alpha=LUMINANCE[1]).add_(blue, alpha=LUMINANCE[2])


def _grayscale(pixels: torch.Tensor, chosen: Array) -> torch.Tensor:
    if chosen.any():
        rows = _rows(chosen, pixels)
        pixels[rows] = luminance(pixels[rows]).expand(-1, 3, -1, -1)
    return pixels


def _jitter(pixels: torch.Tensor, view: ViewParameters) -> torch.Tensor:
    """Brightness, contrast, saturation and hue, in each picture's own order, clamped after each."""
    factors = np.stack([view.brightness, view.contrast, view.saturation, np.ones(len(view))], axis=1)
    factors = np.where(view.jitter[:, None], factors, 1.0)
    order = view.order
    if pixels.shape[1] == 1:  # saturation and hue are identities: two places of the order are left
        order = order[(order == BRIGHTNESS) | (order == CONTRAST)].reshape(-1, 2)
    for place in range(order.shape[1]):
        operation = order[:, place]
        factor = _column(np.take_along_axis(factors, operation[:, None].astype(np.int64), axis=1)[:, 0], pixels)
        # All three move a pixel along the line to a goal: black, the mean luminance, or the pixel's own luminance.
        gray = luminance(pixels)
        goal = gray.mean(dim=(2, 3), keepdim=True) * _column(operation == CONTRAST, pixels)
        if pixels.shape[1] == 3:
            goal = torch.addcmul(goal, gray, _column(operation == SATURATION, pixels))
        pixels = torch.lerp(goal, pixels, factor).clamp_(0, 1)
        turned = (operation == HUE) & view.jitter & (view.hue != 0)
        if turned.any():
            rows = _rows(turned, pixels)
            pixels[rows] = adjust_hue(pixels[rows], _column(view.hue[turned], pixels))
    return pixels


def adjust_hue(pixels: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Hue moved by `turn` (n, 1, 1, 1) of the circle; value and chroma stay. Float (n, 3, H, W) in [0, 1]."""
    red, green, blue = torch.split(pixels, 1, dim=1)
    value = pixels.amax(dim=1, keepdim=True)
    chroma = value - pixels.amin(dim=1, keepdim=True)
    scale = 1 / chroma.clamp(min=1e-8)
    hue = torch.where(
        value == red,
        (green - blue) * scale,
        torch.where(value == green, (blue - red) * scale + 2, (red - green) * scale + 4),
    )
    sector = torch.tensor([5.0, 3.0, 1.0], device=pixels.device)[None, :, None, None]
    angle = (hue + 6 * turn + sector) % 6
    return value - chroma * torch.minimum(angle, 4 - angle).clamp_(0, 1)


def _blur(pixels: torch.Tensor, view: ViewParameters) -> torch.Tensor:
    if not view.blur.any():
        return pixels
    kernel = blur_weights(torch.from_numpy(view.sigma[view.blur].astype(np.float32)).to(pixels.device), pixels.shape[2])
    rows = _rows(view.blur, pixels)
    pixels[rows] = torch.matmul(torch.matmul(kernel[:, None], pixels[rows]), kernel.mT[:, None])
    return pixels


def blur_weights(sigma: torch.Tensor, size: int) -> torch.Tensor:
    """Weights (n, size, size) that blur a line of pixels with reflected ends. `sigma`: (n,), in pixels.

    A pixel beyond the end counts as its mirror image, hence the sum of three Gaussians.
    """
    sigma = sigma[:, None, None]
    reach = torch.ceil(BLUR_REACH * sigma).clamp_(max=size - 1)
    here = torch.arange(size, device=sigma.device, dtype=torch.float32)
    row, column = here[None, :, None], here[None, None, :]
    last = size - 1
    # The end pixels themselves are not repeated.
    images = ((column, None), (-column, column > 0), (2 * last - column, column < last))
    weights = torch.zeros((len(sigma), size, size), device=sigma.device)
    for position, exists in images:
        distance = (row - position).abs()
        gauss = torch.exp(-0.5 * (distance / sigma) ** 2) * (distance <= reach)
        weights += gauss if exists is None else gauss * exists
    return weights / weights.sum(dim=2, keepdim=True)
