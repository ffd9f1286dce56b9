"""A view of one picture, uint8 in and out, on the CPU with OpenCV and torch. The partner of `batched.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from moco.data.colour import MATRIX, TURN, ColourSteps, colour_steps
from moco.data.drawing import BLUR_REACH, LUMINANCE, SOLARIZE_FROM, ViewParameters
from moco.data.noise import gaussian

Array = np.ndarray[Any, Any]


def apply_image(image: Array, view: ViewParameters, index: int, size: int) -> Array:
    """View `index` of one picture: uint8 (H, W, C) to uint8 (size, size, C)."""
    own = view[index : index + 1]
    box = int(own.top[0]), int(own.left[0]), int(own.height[0]), int(own.width[0])
    pixels = crop_resize(image, *box, size).copy()
    recolour(pixels[None], own, colour_steps(own, image.shape[2]), [0])
    return pixels


def crop_resize(image: Array, top: float, left: float, height: float, width: float, size: int) -> Array:
    """A box of a uint8 (H, W, C) picture as (size, size, C), bilinear with antialiasing. It may cut through pixels."""
    if top % 1 or left % 1 or height % 1 or width % 1:
        return _resize_between(image, top, left, height, width, size)
    box = image[int(top) : int(top + height), int(left) : int(left + width)]
    if height <= size and width <= size:  # nothing to average: the same without the detour
        return cv2.resize(box, (size, size), interpolation=cv2.INTER_LINEAR).reshape(size, size, -1)
    if image.shape[2] == 1:  # the resize is twice as fast with three channels
        return crop_resize(cv2.merge([box] * 3), 0, 0, height, width, size)[:, :, :1]
    # A copy, because the resize is slower on a window, and torch dislikes read-only arrays. The layout decides as well:
    # only with this stride of the batch does torch see channels last, and it is four times as fast then.
    tensor = torch.from_numpy(box.copy())[None].permute(0, 3, 1, 2)
    resize = functools.partial(torch.nn.functional.interpolate, mode="bilinear", antialias=True)
    if height > size:  # the vertical pass is the faster one: it first, and there is less left for the other
        tensor = resize(tensor, (size, tensor.shape[3]))
    resized = resize(tensor, (size, size))
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _resize_between(image: Array, top: float, left: float, height: float, width: float, size: int) -> Array:
    """A box that begins or ends between pixels, which only Pillow takes."""
    first_row, first_column = math.floor(top), math.floor(left)
    part = image[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    top, left = top - first_row, left - first_column
    box = (left, top, left + width, top + height)
    planes = [part] if part.shape[2] == 3 else [part[:, :, channel] for channel in range(part.shape[2])]
    pictures = [Image.fromarray(np.ascontiguousarray(plane)) for plane in planes]
    resized = [np.asarray(one.resize((size, size), Image.Resampling.BILINEAR, box=box)) for one in pictures]
    return resized[0].reshape(size, size, -1) if len(resized) == 1 else np.stack(resized, axis=2)


def recolour(stack: Array, view: ViewParameters, steps: ColourSteps, rows: Sequence[int]) -> None:
    """What comes after the crop: gain, grayscale, colour jitter, blur, solarise, flip, noise. In place.

    Args:
        stack: uint8 (n, S, S, C), contiguous.
        view, steps: what was drawn, and its `colour_steps`; picture i takes row rows[i] of them.
    """
    for step in range(steps.kind.shape[1]):
        kinds = [steps.kind[row, step] for row in rows]
        turned: dict[tuple[int, bool], list[int]] = {}
        for place, kind in enumerate(kinds):
            if kind == MATRIX:
                _mix(stack[place], steps.matrix[rows[place], step])
            elif kind == TURN:
                turned.setdefault((steps.roll[rows[place]] % 3, steps.shift[rows[place]] > 0), []).append(place)
        for (roll, forward), places in turned.items():
            shift = [abs(float(steps.shift[rows[place]])) for place in places]
            if len(rows) == 1:
                turn_hue(stack, roll, forward, shift)
            else:
                some = stack[places]
                turn_hue(some, roll, forward, shift)
                stack[places] = some
        if not any(kinds):
            break
    for pixels, row in zip(stack, rows, strict=True):
        _finish(pixels, view, row)


def _mix(pixels: Array, matrix: Array) -> None:
    """One step of the kind MATRIX, rounded and clamped, in place. uint8 (H, W, C), (C, C + 1)."""
    if matrix[0, -1]:
        matrix = matrix.copy()
        matrix[:, -1] *= mean_luminance(pixels)
    cv2.transform(pixels, matrix, dst=pixels)


def mean_luminance(pixels: Array) -> Any:
    """Mean grey level of a uint8 (H, W, C) picture; for C other than 1 and 3 the mean of each channel, (C,)."""
    if pixels.shape[2] not in (1, 3):
        return pixels.mean(axis=(0, 1))
    means = cv2.mean(pixels)
    if pixels.shape[2] == 1:
        return means[0]
    return LUMINANCE[0] * means[0] + LUMINANCE[1] * means[1] + LUMINANCE[2] * means[2]


def turn_hue(stack: Array, roll: int, forward: bool, shift: Sequence[float]) -> None:
    """Hue turned as `ColourSteps` says; value and chroma stay. In place, uint8 (n, H, W, 3).

    The same steps as in `batched`, on planes of bytes: subtraction stops at 0, and nothing is rounded but the move.
    All pictures have the same roll and direction, each has its own size of the shift.
    """
    count, height, width, _ = stack.shape
    flat = stack.reshape(count * height, width, 3)
    # One block for all planes: memory that was just used is still in the cache.
    red, green, blue, top, low, move, risen, fallen, rise, fall, *turned = np.empty((13, *flat.shape[:2]), np.uint8)
    cv2.split(flat, (red, green, blue))
    planes = [(red, green, blue)[(channel - roll) % 3] for channel in range(3)]
    cv2.max(cv2.max(red, green, top), blue, top)
    cv2.min(cv2.min(red, green, low), blue, low)
    cv2.subtract(top, low, move)
    for number, part in enumerate(shift):
        own = move[number * height : (number + 1) * height]
        cv2.convertScaleAbs(own, own, part)
    cv2.add(low, move, risen)
    cv2.subtract(top, move, fallen)
    for channel, (own, made) in enumerate(zip(planes, turned, strict=True)):
        neighbour = planes[(channel + (1 if forward else -1)) % 3]
        cv2.min(cv2.add(own, cv2.subtract(risen, neighbour, rise), rise), top, rise)
        cv2.min(cv2.subtract(neighbour, fallen, fall), cv2.subtract(own, low, made), fall)
        cv2.subtract(rise, fall, made)
    cv2.merge(turned, flat)


def _finish(pixels: Array, view: ViewParameters, row: int) -> None:
    """Blur, solarise, flip and noise, in place. uint8 (S, S, C)."""
    if view.blur[row]:
        sigma = float(view.sigma[row])
        if pixels.shape[2] == 3 and (view.grayscale_before[row] or view.grayscale_after[row]):
            blurred = gaussian_blur(cv2.extractChannel(pixels, 0)[:, :, None], sigma)  # three times the same
            cv2.cvtColor(blurred, cv2.COLOR_GRAY2RGB, dst=pixels)
        else:
            gaussian_blur(pixels, sigma, pixels)
    if view.solarize[row]:
        np.subtract(np.uint8(255), pixels, out=pixels, where=pixels >= SOLARIZE_FROM)
    if view.flip[row]:
        cv2.flip(pixels, 1, dst=pixels)
    if view.noise[row] > 0:
        add_noise(pixels, float(view.noise[row]), view.noise_key[row : row + 1])


def add_noise(pixels: Array, deviation: float, key: Array) -> None:
    """Gaussian noise of this standard deviation, as a share of the full range, in place. uint8 (S, S, C); key (1,)."""
    height, width, channels = pixels.shape
    noise = gaussian(key, pixels.size, torch.device("cpu")).numpy().reshape(channels, height, width)
    noisy = pixels + noise.transpose(1, 2, 0) * np.float32(255 * deviation)
    pixels[...] = np.rint(noisy).clip(0, 255)


def gaussian_blur(pixels: Array, sigma: float, into: Array | None = None) -> Array:
    """Gaussian blur with reflected borders. uint8 (S, S, C), written to `into` if there is one."""
    radius = min(math.floor(BLUR_REACH * sigma), min(pixels.shape[:2]) - 1)
    if radius == 0:  # does not reach the next pixel
        return pixels
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    # OpenCV multiplies bytes by 1/256ths: such weights, with a sum of 1, keep an even area as it is.
    weights = np.rint(weights * (256 / weights.sum()))
    weights[radius] += 256 - weights.sum()
    weights /= 256
    blurred = cv2.sepFilter2D(pixels, cv2.CV_8U, weights, weights, dst=into, borderType=cv2.BORDER_REFLECT_101)
    return blurred.reshape(pixels.shape)
