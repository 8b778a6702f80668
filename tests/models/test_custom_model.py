"""A user's network by the name of a function."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.models import ModelConfig, build_model
from fedsieve.types import Outputs

SOURCE = """
import torch
from torch import nn
from fedsieve.types import Outputs


class Net(nn.Module):
    def __init__(self, channels, height, width, num_classes, answer="logits"):
        super().__init__()
        self.embed = nn.Linear(channels * height * width, 5)
        self.classify = nn.Linear(5, num_classes)
        self.norm = nn.BatchNorm1d(5)
        self.answer = answer

    def forward(self, x):
        features = self.norm(self.embed(x.flatten(1)))
        logits = self.classify(features)
        return {
            "logits": logits,
            "pair": (features, logits),
            "list": [features, logits],
            "outputs": Outputs(features, logits),
            "none": None,
            "three": (features, logits, logits),
            "flat features": (features.sum(1), logits),
            "named": {"features": 1, "logits": 2},
        }[self.answer]


def variant(answer):
    def make(**shape):
        return Net(**shape, answer=answer)
    return make


logits, pair, as_list, outputs = (variant(a) for a in ("logits", "pair", "list", "outputs"))
nothing, three, flat, named = (variant(a) for a in ("none", "three", "flat features", "named"))


def only_classes(num_classes, hidden=3):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.LazyLinear(num_classes + hidden - 3))


def ten_always():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def mnist_only(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))


def demanding(num_classes, depth):
    return None


def positional(channels, depth, /):
    return None


def not_a_model():
    return "network"


a_number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_networks.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)


def build(function: str, channels=1, height=4, width=6, classes=3, seed=0) -> nn.Module:
    name = function if ":" in function else f"my_networks:{function}"
    return build_model(
        ModelConfig(name=name), channels, height, width, classes, np.random.default_rng(seed)
    )


def test_logits_only_have_no_features() -> None:
    outputs = build("logits")(torch.randn(5, 1, 4, 6))
    assert isinstance(outputs, Outputs)
    assert outputs.features is None
    assert outputs.logits.shape == (5, 3)


@pytest.mark.parametrize("function", ["pair", "as_list", "outputs"])
def test_features_and_logits(function: str) -> None:
    outputs = build(function)(torch.randn(5, 1, 4, 6))
    assert isinstance(outputs, Outputs)
    assert outputs.features.shape == (5, 5)
    assert outputs.logits.shape == (5, 3)


def test_a_class_is_a_function_too() -> None:
    assert build("Net")(torch.randn(2, 1, 4, 6)).logits.shape == (2, 3)


def test_only_arguments_that_are_accepted_are_given() -> None:
    assert build("only_classes", classes=4)(torch.randn(2, 1, 4, 6)).logits.shape == (2, 4)


def test_trial_leaves_the_model_as_it_was() -> None:
    state = torch.get_rng_state()
    model = build("pair")
    assert torch.equal(state, torch.get_rng_state())
    assert all(m.training for m in model.modules())
    assert model.state_dict()["model.norm.num_batches_tracked"].item() == 0
    again = build("pair")
    assert torch.equal(model.model.embed.weight, again.model.embed.weight)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("no_such_module:f", "'no_such_module:f' needs the Python module 'no_such_module'"),
        ("needs_more:f", "needs the Python module 'not_installed_anywhere'"),
        ("no_such_function", "'my_networks' has no function 'no_such_function'"),
        ("a_number", "has no function 'a_number'"),
        ("not_a_model", "returned a str; it must return a torch.nn.Module"),
        ("demanding", "needs the argument 'depth', but .* give its other arguments default"),
        ("json:loads", "'json:loads' needs the argument 's', but a function that returns a model"),
        ("positional", "needs the arguments 'channels' and 'depth', but .* by name and nothing"),
        ("builtins:dict", "'builtins:dict' does not say which arguments it takes"),
        ("ten_always", r"a tensor of shape \(2, 10\) as logits .* shape \(2, 3\)"),
        ("mnist_only", r"could not take images of shape \(1, 4, 6\) .*: RuntimeError: .*multipl"),
        ("nothing", "could not take images"),
        ("three", "could not take images"),
        ("named", "returned a str as logits"),
        ("flat", r"a tensor of shape \(2,\) as features"),
    ],
)
def test_refuses(function: str, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence) as caught:
        build(function)
    assert "\n" not in str(caught.value)
