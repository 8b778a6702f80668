"""The ClientApp of a federation."""

from fedsieve.flower.client import app

__all__ = ["app"]
