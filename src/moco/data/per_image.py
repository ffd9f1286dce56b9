"""A view of one picture, uint8 in and out, on the CPU with OpenCV and torch. The partner of `batched.py`."""

from __future__ import annotations

import math
from typing import Any

import cv2
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


def apply_image(image: Array, view: ViewParameters, index: int, size: int) -> Array:
    """View `index` of one picture: uint8 (H, W, C) with C = 1 or 3, to uint8 (size, size, C)."""
    top, left = int(view.top[index]), int(view.left[index])
    pixels = crop_resize(image, top, left, int(view.height[index]), int(view.width[index]), size)
    colour = pixels.shape[2] == 3
    if colour and view.grayscale_before[index]:
        pixels = _grayscale(pixels)
    if view.jitter[index]:
        for operation in view.order[index]:
            if operation == BRIGHTNESS:
                pixels = adjust_brightness(pixels, float(view.brightness[index]))
            elif operation == CONTRAST:
                pixels = adjust_contrast(pixels, float(view.contrast[index]))
            elif operation == SATURATION and colour:
                pixels = adjust_saturation(pixels, float(view.saturation[index]))
            elif operation == HUE and colour:
                pixels = adjust_hue(pixels, float(view.hue[index]))
    if colour and view.grayscale_after[index]:
        pixels = _grayscale(pixels)
    if view.blur[index]:
        pixels = gaussian_blur(pixels, float(view.sigma[index]))
    if view.solarize[index]:
        pixels = np.where(pixels >= SOLARIZE_FROM, np.uint8(255) - pixels, pixels)
    return pixels[:, ::-1] if view.flip[index] else pixels


def crop_resize(image: Array, top: int, left: int, height: int, width: int, size: int) -> Array:
    """A box of a uint8 (H, W, C) picture as (size, size, C), bilinear with antialiasing."""
    # A copy, because the resize is a third faster on it than on a window, and torch dislikes read-only arrays.
    box = image[top : top + height, left : left + width].copy()
    tensor = torch.from_numpy(box).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(tensor, (size, size), mode="bilinear", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _mix(pixels: Array, rows: Array) -> Array:
    """A matrix (C, C + 1) on the channels and a 1, rounded and clamped to 0…255."""
    return cv2.transform(pixels, rows).reshape(pixels.shape)  # OpenCV drops a channel dimension of 1


def _scale(pixels: Array, factor: float, offset: float) -> Array:
    count = pixels.shape[2]
    return _mix(pixels, np.hstack([np.eye(count) * factor, np.full((count, 1), offset)]))


def adjust_brightness(pixels: Array, factor: float) -> Array:
    """Every pixel times `factor`. uint8 (H, W, C)."""
    return _scale(pixels, factor, 0.0)


def adjust_contrast(pixels: Array, factor: float) -> Array:
    """Away from (factor > 1) or towards the mean luminance of the picture. uint8 (H, W, C)."""
    means = cv2.mean(pixels)
    mean = float(np.dot(LUMINANCE, means[:3])) if pixels.shape[2] == 3 else means[0]
    return _scale(pixels, factor, (1 - factor) * mean)


def adjust_saturation(pixels: Array, factor: float) -> Array:
    """Away from or towards each pixel's luminance. uint8 (H, W, 3)."""
    rows = np.zeros((3, 4))
    rows[:, :3] = np.eye(3) * factor + (1 - factor) * np.array(LUMINANCE)
    return _mix(pixels, rows)


def _grayscale(pixels: Array) -> Array:
    return adjust_saturation(pixels, 0.0)


def adjust_hue(pixels: Array, turn: float) -> Array:
    """Each pixel's hue moved by `turn` of the hue circle. uint8 (H, W, 3)."""
    # In float, because 8 bits of hue are off by many levels in places, and it takes no longer.
    values: Array = cv2.cvtColor(pixels.astype(np.float32), cv2.COLOR_RGB2HSV)
    values[:, :, 0] += 360 * (turn % 1)  # OpenCV wraps what goes beyond the full circle, but not what falls below 0
    return cv2.convertScaleAbs(cv2.cvtColor(values, cv2.COLOR_HSV2RGB, dst=values))


def gaussian_blur(pixels: Array, sigma: float) -> Array:
    """Gaussian blur with reflected borders. uint8 (S, S, C)."""
    radius = min(math.ceil(BLUR_REACH * sigma), min(pixels.shape[:2]) - 1)
    kernel = 2 * radius + 1
    blurred = cv2.GaussianBlur(pixels, (kernel, kernel), sigma, borderType=cv2.BORDER_REFLECT_101)
    return blurred.reshape(pixels.shape)
