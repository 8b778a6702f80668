"""What leaves a site: its `Up` and metrics, and nothing else about its samples."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet, Recorder
from flower_stage import SpoiledGrid, Stage, small_recipe, three_clients, untouched

from fedsieve.data.sources.digits import load_digits
from fedsieve.flower.messages import FINISH, HELLO, ROUND, Hello, Receipt
from fedsieve.flower.records import from_content, metrics_of
from fedsieve.methods import METHODS, fedgr
from fedsieve.serial import decode
from fedsieve.simulate.run import scene_of
from fedsieve.simulate.world import make_world
from fedsieve.types import Shard


def shard_of(recipe: Any, client: int) -> Shard:
    data = load_digits()
    return make_world(data, scene_of(recipe, data), torch.device("cpu")).shard(client)


def traces_of_samples(shard: Shard) -> list[bytes]:
    """Bytes that would betray samples: pixels of any image as bytes or floats, and the labels in
    any usual width."""
    traces = []
    for image in shard.images.flatten(1).numpy():
        traces.append(image.tobytes())
        traces.append((image / np.float32(255)).astype(np.float32).tobytes()[4:-4])
    labels = shard.labels.numpy()
    widths = (np.uint8, np.int16, np.int32, np.int64, np.float32)
    traces += [labels[:16].astype(kind).tobytes() for kind in widths]
    traces.append(b", ".join(str(label).encode() for label in labels[:16]))
    return traces


def test_on_the_wire_are_the_declared_values_and_no_sample(
    listened: tuple[Fleet, Recorder], tmp_path: Path
) -> None:
    fleet, recorder = listened
    recorder.forget()
    recipe = three_clients("fedgr", rounds=1)
    fleet.run(recipe, tmp_path / "out")
    sent = recorder.sent()
    shard = shard_of(recipe, 0)
    # What Up declares is there, so the recording is whole and not in disguise.
    state = fleet.results(0, tmp_path / "out") / "state-0.safetensors"
    after = decode(fedgr.Client, state.read_bytes())
    assert after.mean_loss.numpy().tobytes() in sent
    assert shard.ids.numpy().tobytes() in sent
    for trace in traces_of_samples(shard):
        assert trace not in sent
    assert b"/site-0" not in sent


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_reply_is_up_and_metrics_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Every byte of every reply is accounted for by a declared field."""
    stage = Stage(tmp_path)
    grid = SpoiledGrid(stage.nodes(), untouched)
    recipe = small_recipe(name)
    stage.run(recipe, grid)
    method = METHODS[name]
    kinds = {
        HELLO: {"hello": Hello},
        ROUND: {"up": method.up, "receipt": Receipt},
        FINISH: {"receipt": Receipt},
    }
    asked = [message.metadata.message_type for message, _ in grid.seen]
    assert asked.count(ROUND) >= 3  # a method may choose fewer than it may have
    for message, reply in grid.seen:
        assert reply is not None
        expected = kinds[message.metadata.message_type]
        from_content(reply.content, expected)  # refuses whatever is not a field of these
        if message.metadata.message_type != ROUND:
            assert "metrics" not in reply.content
        assert all(isinstance(value, float) for value in metrics_of(reply.content).values())


def test_what_a_site_says_of_itself_is_a_handful_of_numbers() -> None:
    """A privacy review reads this list."""
    assert [field.name for field in fields(Hello)] == [
        "site", "client", "samples", "classes", "shape", "mean", "std",
    ]  # fmt: skip
