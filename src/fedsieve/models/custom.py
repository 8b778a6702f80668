"""A network of the user's, named as "package.module:function"."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError, check
from fedsieve.types import Outputs


class Adapted(nn.Module):
    """Makes `Outputs` of what a user's model returns: logits, (features, logits) or `Outputs`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Outputs:
        result = self.model(x)
        return Outputs(None, result) if isinstance(result, Tensor) else Outputs(*result)


def build_custom(
    name: str, *, channels: int, height: int, width: int, num_classes: int
) -> nn.Module:
    """Call the named function with what it accepts of the four arguments, and try its model."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise FedsieveError(
            f"The model {name!r} needs the Python module {error.name!r}, which was not found; "
            "check the spelling, install it, or add its folder to PYTHONPATH."
        ) from error
    except Exception as error:
        raise FedsieveError(
            f"The module {module_name!r} of your model fails on import: {_reason(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise FedsieveError(
            f"The module {module_name!r} has no function {function_name!r}; name the function "
            "that returns your model."
        )
    offered = {
        "channels": channels,
        "height": height,
        "width": width,
        "num_classes": num_classes,
    }
    arguments = _accepted(name, function, offered)
    try:
        model = function(**arguments)
    except Exception as error:
        raise FedsieveError(f"{name!r} could not make a model: {_reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise FedsieveError(
            f"{name!r} returned a {type(model).__name__}; it must return a torch.nn.Module."
        )
    adapted = Adapted(model)
    _try(adapted, name, torch.zeros(2, channels, height, width), num_classes)
    return adapted


def _accepted(
    name: str, function: Callable[..., object], offered: dict[str, int]
) -> dict[str, int]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise FedsieveError(
            f"{name!r} does not say which arguments it takes; name a function written in Python "
            "that returns your model."
        ) from None
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    arguments = {key: value for key, value in offered.items() if takes_any or key in by_name}
    lacking = [
        repr(p.name)
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.kind is p.POSITIONAL_ONLY or p.name not in arguments)
    ]
    check(
        not lacking,
        f"{name!r} needs the argument{'s' * (len(lacking) > 1)} {' and '.join(lacking)}, but a "
        f"function that returns a model can be given {', '.join(offered)} by name and nothing "
        "else; give its other arguments default values, or name another function.",
    )
    return arguments


def _try(model: Adapted, name: str, images: Tensor, num_classes: int) -> None:
    """Refuse a model whose answer to two black images is not what training will need."""
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(images)
    except Exception as error:
        raise FedsieveError(
            f"{name!r} could not take images of shape {tuple(images.shape[1:])} and return "
            f"logits or (features, logits): {_reason(error)}"
        ) from error
    model.train()
    features, logits = outputs
    expected = (len(images), num_classes)
    check(
        isinstance(logits, Tensor) and logits.shape == expected,
        f"{name!r} returned {_describe(logits)} as logits for two images; it must return a "
        f"tensor of shape {expected}, one column per class.",
    )
    check(
        features is None
        or (isinstance(features, Tensor) and features.ndim == 2 and len(features) == len(images)),
        f"{name!r} returned {_describe(features)} as features for two images; they must be a "
        "tensor with one row per image, or None.",
    )


def _reason(error: Exception) -> str:
    """The first line of what went wrong in a user's own code."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
