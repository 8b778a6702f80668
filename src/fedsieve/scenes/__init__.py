"""Scenes: who holds what, with which labels."""

from fedsieve.scenes.draw import describe, picture
from fedsieve.scenes.noise import Noise
from fedsieve.scenes.partition import Partition
from fedsieve.scenes.scene import Scene, SceneConfig, build_scene, fingerprint_of, same_scene
from fedsieve.scenes.store import load_scene, save_scene

__all__ = [
    "Noise",
    "Partition",
    "Scene",
    "SceneConfig",
    "build_scene",
    "describe",
    "fingerprint_of",
    "load_scene",
    "picture",
    "same_scene",
    "save_scene",
]
