"""The ServerApp of a federation."""

from fedsieve.flower.server import app

__all__ = ["app"]
