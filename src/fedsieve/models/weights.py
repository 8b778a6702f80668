"""A model's weights as a mapping: reading, writing, reordering and checking them."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsieve.errors import FedsieveError, check
from fedsieve.types import SERVER, Weights, rng_for


def read_weights(model: nn.Module, *, copy: bool = True) -> dict[str, Tensor]:
    """All floating-point parameters and buffers of `model` by name, without gradient.

    With `copy=False` the tensors are the model's own and change with it.
    """
    return {
        name: tensor.clone() if copy else tensor
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def write_weights(model: nn.Module, weights: Weights) -> None:
    """Copy `weights` into the tensors of `model`, which stay the same objects."""
    copy_weights(read_weights(model, copy=False), weights)


def copy_weights(own: Weights, weights: Weights) -> None:
    """Copy `weights` into a model's `own` tensors."""
    check_alike(own, weights, "the model", "the weights to load")
    with torch.no_grad():
        torch._foreach_copy_(list(own.values()), [weights[name] for name in own])


def reordered(weights: Weights, names: Collection[str]) -> dict[str, Tensor]:
    """`weights` with the entries of these tensors in another order, always the same one.

    Entries that were drawn independently from one distribution are as likely a draw in any order,
    and constants stay what they are. So this is where a second network may start.
    """
    return {
        name: _shuffled(tensor, f"second start/{name}") if name in names else tensor
        for name, tensor in weights.items()
    }


def _shuffled(tensor: Tensor, purpose: str) -> Tensor:
    order = rng_for(0, 0, SERVER, purpose).permutation(tensor.numel())
    return tensor.flatten()[torch.from_numpy(order).to(tensor.device)].view_as(tensor)


def check_alike(first: Weights, second: Weights, first_name: str, second_name: str) -> None:
    """Refuse two sets of weights that differ in names or shapes, naming the first such tensor."""
    for name, tensor in first.items():
        other = second.get(name)
        if other is None:
            raise FedsieveError(
                f"Tensor {name!r} of {first_name} is missing from {second_name}; both must come "
                "from the same model."
            )
        if other.shape != tensor.shape:
            raise FedsieveError(
                f"Tensor {name!r} is {tuple(tensor.shape)} in {first_name} but "
                f"{tuple(other.shape)} in {second_name}; both must come from the same model."
            )
    if len(second) > len(first):
        name = next(name for name in second if name not in first)
        raise FedsieveError(
            f"Tensor {name!r} of {second_name} is missing from {first_name}; both must come "
            "from the same model."
        )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors, .pt or .pth file; nothing in it is executed."""
    check(path.is_file(), f"There is no weight file {path}; check the path.")
    try:
        stored: object
        if path.suffix == ".safetensors":
            stored = load_file(path)
        else:
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FedsieveError(
            f"{path} cannot be read as a file of tensors; save a state dict with safetensors or "
            "torch.save."
        ) from error
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in stored.items()
    ):
        raise FedsieveError(f"{path} must hold named tensors and nothing else; save a state dict.")
    return stored
