"""Reading, writing, counting and checking a model's weights."""

import pytest
import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.models import read_weights, write_weights
from fedsieve.models.weights import reordered


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]


def test_reads_float_parameters_and_buffers() -> None:
    """The integer counter of BatchNorm is left out."""
    weights = read_weights(network())
    assert list(weights) == NAMES
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_another_order_of_the_same_entries() -> None:
    first = {
        "weight": torch.arange(24.0).view(2, 3, 4),
        "same shape": torch.arange(24.0).view(2, 3, 4),
        "kept": torch.arange(5.0),
        "variance": torch.ones(5),
        "scale": torch.ones(()),
    }
    second = reordered(first, [name for name in first if name != "kept"])
    assert list(second) == list(first)
    for name, tensor in first.items():
        assert second[name].shape == tensor.shape
        assert torch.equal(second[name].flatten().sort().values, tensor.flatten())
    assert torch.equal(second["kept"], first["kept"])
    assert not torch.equal(second["weight"], first["weight"])
    assert not torch.equal(second["weight"], second["same shape"])
    again = reordered(first, first.keys())
    assert torch.equal(again["weight"], second["weight"])


@pytest.mark.parametrize("copy", [True, False])
def test_copies_on_demand(copy: bool) -> None:
    model = network()
    weights = read_weights(model, copy=copy)
    with torch.no_grad():
        model[0].bias.fill_(7.0)
    assert (weights["0.bias"] == 7.0).all().item() is not copy


def test_writes_in_place() -> None:
    source, target = network(), network()
    source[1].running_mean.fill_(3.0)
    before = [tensor.data_ptr() for tensor in read_weights(target, copy=False).values()]
    write_weights(target, read_weights(source))
    after = read_weights(target, copy=False)
    assert [tensor.data_ptr() for tensor in after.values()] == before
    assert all(torch.equal(after[name], value) for name, value in read_weights(source).items())
    assert target[0].weight.requires_grad


def test_write_is_a_copy() -> None:
    source, target = network(), network()
    write_weights(target, read_weights(source, copy=False))
    with torch.no_grad():
        source[0].weight.fill_(9.0)
    assert not (target[0].weight == 9.0).any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"1.bias": torch.zeros(4)}, r"'1.bias' is \(3,\) in the model but \(4,\) in the weights"),
        ({"0.weight": torch.zeros(3, 1)}, r"'0.weight' is \(3, 2\) .* \(3, 1\)"),
        ({"1.running_var": None}, "'1.running_var' of the model is missing from the weights"),
        ({"2.weight": torch.zeros(1)}, "'2.weight' of the weights to load is missing from the mod"),
    ],
)
def test_write_refuses_what_does_not_fit(change: dict[str, Tensor | None], sentence: str) -> None:
    model = network()
    before = read_weights(model)
    merged = {**read_weights(network()), **change}
    with pytest.raises(FedsieveError, match=sentence):
        write_weights(model, {k: v for k, v in merged.items() if v is not None})
    assert all(torch.equal(before[k], v) for k, v in read_weights(model).items())
