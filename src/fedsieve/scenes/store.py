"""A scene in one file: safetensors with JSON in its header. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedsieve import __version__
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.scenes.noise import Noise
from fedsieve.scenes.partition import Partition
from fedsieve.scenes.scene import Scene, SceneConfig

FORMAT = "fedsieve-scene-1"


def save_scene(scene: Scene, path: Path | str) -> None:
    """Write the scene and all that is needed to draw it again to one file."""
    names = sorted(set(scene.kinds))
    facts = json.dumps(
        {
            "config": asdict(scene.config),
            "seed": scene.seed,
            "num_classes": scene.num_classes,
            "fingerprint": scene.fingerprint,
            "kinds": names,
            "version": __version__,
        }
    )
    arrays = {
        "samples": np.concatenate(scene.clients),
        "ends": np.cumsum(scene.sizes),
        "given": scene.given,
        "levels": scene.levels,
        "kinds": np.array([names.index(kind) for kind in scene.kinds], dtype=np.int64),
    }
    metadata = {"format": FORMAT, "scene": facts, "digest": digest_of(facts, arrays)}
    write_atomically(Path(path), save(arrays, metadata=metadata))


def load_scene(path: Path | str) -> Scene:
    """Read a scene that `save_scene` wrote; any other or damaged file is refused."""
    check(Path(path).is_file(), f"{path}: there is no such scene file.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = metadata["scene"]
        is_intact = metadata["digest"] == digest_of(facts, arrays)
        check(metadata["format"] == FORMAT and is_intact, "unknown format or damaged contents")
        return _scene_from(json.loads(facts), arrays)
    except (SafetensorError, OSError, LookupError, TypeError, FedsieveError) as error:
        raise FedsieveError(
            f"{path}: this is not an intact scene file of this version; build the scene again."
        ) from error


def digest_of(facts: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> str:
    """sha256 of everything in the file, so that a single changed bit is noticed."""
    digest = hashlib.sha256(facts.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _scene_from(facts: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Scene:
    config = facts["config"]
    return Scene(
        clients=tuple(np.split(arrays["samples"], arrays["ends"][:-1])),
        given=arrays["given"],
        levels=arrays["levels"],
        kinds=tuple(facts["kinds"][code] for code in arrays["kinds"]),
        config=SceneConfig(
            clients=config["clients"],
            partition=Partition(**config["partition"]),
            noise=Noise(**config["noise"]),
        ),
        seed=facts["seed"],
        num_classes=facts["num_classes"],
        fingerprint=facts["fingerprint"],
    )
