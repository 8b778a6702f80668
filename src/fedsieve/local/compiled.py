"""What torch compiles for the slots of a GPU: images to loss, images to outputs, the update."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.local.bench import LossNet, normalised
from fedsieve.local.flat import update
from fedsieve.local.plan import Batch, Loss, Stepped
from fedsieve.types import Outputs, Weights


def batch_loss(
    loss: Loss,
    images: Collection[str],
    values: Mapping[str, Tensor],
    weight: Tensor | None,
    constants: Mapping[str, Tensor | Weights],
    scale: Tensor,
    shift: Tensor,
    nets: Sequence[LossNet],
) -> Tensor | Stepped:
    """The loss of a batch whose images are still uint8: all of a step that is differentiated."""
    seen = {
        name: normalised(value, scale, shift) if name in images else value
        for name, value in values.items()
    }
    return loss(Batch(seen, constants, weight), *nets)


def outputs(net: LossNet, images: Tensor, scale: Tensor, shift: Tensor) -> Outputs:
    """What a net says of uint8 images."""
    return net(normalised(images, scale, shift))


_VARIANTS = 64
"""How many variants torch may compile of one function before it gives up and runs it as it is: for
each loss, kind of model and size of batch in a process."""


@functools.cache
def import_compiler() -> Future[object]:
    """Begin to import torch's compiler, which takes seconds."""
    return ThreadPoolExecutor(1).submit(importlib.import_module, "torch._inductor.compile_fx")


def allow_variants() -> None:
    """Raise torch's limit, which may be one for each thread."""
    import_compiler().result()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)


# Not made above: torch's compiler takes a second to import, and a CPU needs none of it.
@functools.cache
def compiled_outputs() -> Callable[..., Outputs]:
    return torch.compile(outputs, dynamic=False)


@functools.cache
def compiled_update() -> Callable[..., None]:
    return torch.compile(update, dynamic=False)


def loss_key(loss: Loss) -> Hashable:
    """What identifies a loss; one that hides tensors in a closure would be captured with them."""
    if isinstance(loss, functools.partial):
        for argument in (*loss.args, *loss.keywords.values()):
            if isinstance(argument, Tensor):
                raise FedsieveError(
                    "A loss is bound to a tensor; give it the tensor as a column or a constant."
                )
        return (loss_key(loss.func), loss.args, tuple(sorted(loss.keywords.items())))
    if getattr(loss, "__closure__", None):
        raise FedsieveError(
            f"The loss {loss.__qualname__} is a closure; make it a module-level function that "
            "takes its tensors from the batch."
        )
    return loss


_compiled_losses: dict[Hashable, Callable[..., Tensor | Stepped]] = {}


def compiled_loss(loss: Loss) -> Callable[..., Tensor | Stepped]:
    """`batch_loss` of this loss: model and loss become one stretch of kernels. What is made depends
    on the kind of the nets among its arguments and not on which nets they are, so all slots share
    it."""

    def objective(*rest: Any) -> Tensor | Stepped:
        return batch_loss(loss, *rest)

    return _compiled_losses.setdefault(loss_key(loss), torch.compile(objective, dynamic=False))
