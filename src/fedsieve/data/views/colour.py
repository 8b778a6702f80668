"""Operations on whole pixels and their neighbours: saturation, sharpness, hue.

All agree exactly with the Pillow calls that they name on processors where Pillow is built without
fused multiply-add (x86-64). Where its compiler fuses (some arm64 builds), Pillow's blend can come
out one grey level away from ours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsieve.data.views.arrays import to_device

_GREY_WEIGHTS = (19595, 38470, 7471)
"""Red, green and blue in the grey level, in 65536ths (ITU-R 601-2, as Pillow rounds it)."""


_TONES = np.arange(256) * 6.0 / 255.0
"""Where each 8-bit H lies on the colour circle, in sixths."""

_WITHIN_SIXTH = (_TONES - np.floor(_TONES)).astype(np.float32).astype(np.float64)

_SHARES = (np.arange(256) / 255.0).astype(np.float32).astype(np.float64)
"""Each 8-bit S as a share of 1, with the precision that Pillow keeps."""

_MIXTURES = np.array([[0, 3, 1], [2, 0, 1], [1, 0, 3], [1, 2, 0], [3, 1, 0], [0, 1, 2]])[
    np.floor(_TONES).astype(np.int64) % 6
]
"""Which of (value, low, falling, rising) is red, green, blue, for each 8-bit H."""


def grey_level(images: Tensor) -> Tensor:
    """`Image.convert("L")`: the (n, 1, H, W) int32 grey levels of RGB or one-channel images."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = (images[:, c : c + 1].int() * w for c, w in enumerate(_GREY_WEIGHTS))
    return (red + green + blue + (1 << 15)) >> 16


def blend(degenerate: Tensor, original: Tensor, factor: Tensor) -> Tensor:
    """`Image.blend`: degenerate + factor * (original - degenerate) in float32, clipped, truncated.

    Factor 0 gives the degenerate image, 1 the original; beyond 1 exaggerates.
    """
    start = degenerate.float()
    return (start + factor.float() * (original.float() - start)).clamp(0, 255).to(torch.uint8)


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """`ImageEnhance.Color`: blend with the grey image. One-channel images stay as they are."""
    if images.shape[1] == 1:
        return images
    return blend(grey_level(images), images, factors[:, None, None, None])


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """`ImageEnhance.Sharpness`: blend with the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13.

    The smoothed image keeps the outermost rows and columns of the original, so they do not change.
    """
    height, width = images.shape[2:]
    result = images.clone()
    if min(height, width) < 3:
        return result
    wide = images.short()
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = wide[:, :, 1:-1, 1:-1]
    # Thirteenths never come near a half, so float32 rounds (box + 4 inner) / 13 as Pillow does.
    smooth = (((box + 4 * inner).float() + 6.5) / 13).floor()
    result[:, :, 1:-1, 1:-1] = blend(smooth, inner, factors[:, None, None, None])
    return result


def hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the colour circle by `turns` (1 is once round), as torchvision does for Pillow images.

    The image goes through Pillow's 8-bit HSV, where trunc(255 * turns) is added to H modulo 256.
    One-channel images stay as they are.
    """
    if images.shape[1] == 1:
        return images
    tone, saturated, value = _hsv(images)
    steps = (turns.double() * 255).trunc().int()[:, None, None, None]
    return _rgb((tone + steps) & 255, saturated, value)


def _hsv(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Image.convert("HSV")` as three (n, 1, H, W) int32 tensors.

    Pillow's float32 and float64 steps are kept apart, because H and S are truncated.
    """
    red, green, blue = (images[:, c : c + 1] for c in range(3))
    value = images.amax(1, keepdim=True)
    spread = (value - images.amin(1, keepdim=True)).float()
    is_grey = spread == 0
    spread = spread.masked_fill(is_grey, 1.0)
    to_red, to_green, to_blue = ((value - c).float() / spread for c in (red, green, blue))
    sixths = torch.where(
        red == value,
        (to_blue - to_green).double(),
        torch.where(
            green == value,
            2.0 + to_red.double() - to_blue.double(),
            4.0 + to_green.double() - to_red.double(),
        ),
    ).float()
    # Divided by a tensor, since CUDA multiplies with the reciprocal of a number.
    turn = ((sixths.double() / torch.full_like(sixths, 6.0).double() + 1.0) % 1.0).float()
    tone = (turn.double() * 255.0).int().masked_fill(is_grey, 0)
    saturated = (spread / value.float().clamp(min=1.0)).double() * 255.0
    return tone, saturated.int().masked_fill(is_grey, 0), value.int()


def _rgb(tone: Tensor, saturated: Tensor, value: Tensor) -> Tensor:
    """`Image.convert("RGB")` of an HSV image whose three planes are (n, 1, H, W) int32."""
    device = tone.device
    places = tone.long()
    part = to_device(_WITHIN_SIXTH, device)[places]
    strength = to_device(_SHARES, device)[saturated.long()]
    bright = value.double()

    def level(share: Tensor) -> Tensor:
        return (bright * (1.0 - share) + 0.5).floor().to(torch.uint8)

    levels = [
        value.to(torch.uint8),
        level(strength),
        level(strength * part),
        level(strength * (1.0 - part)),
    ]
    mixture = to_device(_MIXTURES, device)[places.squeeze(1)].movedim(-1, 1)
    return torch.cat(levels, dim=1).gather(1, mixture)
