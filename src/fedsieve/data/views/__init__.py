"""Views of images: raw, weak, strong and others, made for whole uint8 tensors at once."""

from fedsieve.data.views.operations import RANDAUGMENT, Operation, apply_operations
from fedsieve.data.views.presets import ViewSet, view_set
from fedsieve.data.views.view import (
    CUTOUT_COLOUR,
    CentreCrop,
    Chain,
    Raw,
    Resize,
    Rotate,
    SimClr,
    Strong,
    StrongResized,
    View,
    Weak,
)

__all__ = [
    "CUTOUT_COLOUR",
    "RANDAUGMENT",
    "CentreCrop",
    "Chain",
    "Operation",
    "Raw",
    "Resize",
    "Rotate",
    "SimClr",
    "Strong",
    "StrongResized",
    "View",
    "ViewSet",
    "Weak",
    "apply_operations",
    "view_set",
]
