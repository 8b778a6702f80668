"""The workbench lent to a client for a round: views, forward passes, local training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.sgd import sgd
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fedsieve.data.views import ViewSet
from fedsieve.local.plan import (
    Batch,
    Constant,
    Fitted,
    Plan,
    Schedule,
    Sgd,
    draws,
    repeats,
    schedule,
    seed_dropout,
    stepped,
)
from fedsieve.models.weights import copy_weights, read_weights
from fedsieve.types import Outputs, Weights

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]


class Bench(Protocol):
    """What a method may ask of the machine it runs on."""

    @property
    def sgd(self) -> Sgd:
        """The recipe's local solver."""

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the weights that are trained: all but statistics such as BatchNorm's."""

    def view(self, name: str, images: Tensor, rng: np.random.Generator) -> Tensor:
        """The view `name` ("raw", "weak", "strong", …) of uint8 images, as uint8 images."""

    def forward(self, weights: Weights, images: Tensor) -> Outputs:
        """The model with `weights` on a view: evaluation mode, no gradient, fp32 results."""

    def fit(self, plan: Plan) -> Fitted:
        """Carry out one client's local training."""


@dataclass(frozen=True)
class Setup:
    """All that a workbench is made of; the same for every client and round of a run."""

    make_model: Callable[[], nn.Module]
    """A fresh model; its weights do not matter, they are loaded before each use."""
    views: ViewSet
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sgd: Sgd
    precision: Precision = "fp32"


EVALUATION_CHUNK = {"cpu": 250, "cuda": 2000}
"""Images per forward pass: on a CPU small enough to stay in the cache."""


class LossNet:
    """A model as a loss sees it: fp32 outputs whatever the precision inside."""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model: Callable[[Tensor], Outputs] = model
        self._precision = precision
        self._device = device
        self.parameters = dict(model.named_parameters()) if parameters is None else parameters

    def __call__(self, x: Tensor) -> Outputs:
        with autocast(self._precision, self._device):
            return in_fp32(self._model(x))


class FrozenNet(LossNet):
    """A model that a loss may call but does not train."""

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Outputs:
        return super().__call__(x)


class EagerBench:
    """The plain loop, on a CPU or a GPU: what every faster bench must agree with."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.sgd = setup.sgd
        self.device = device
        self.precision = setup.precision
        self._setup = setup
        self._models: list[nn.Module] = []
        self._tensors: list[Weights] = []
        """Each model's own tensors by name; to find them anew takes longer than to fill them."""
        std = torch.tensor(setup.std, dtype=torch.float32).view(1, -1, 1, 1)
        mean = torch.tensor(setup.mean, dtype=torch.float32).view(1, -1, 1, 1)
        self.scale = (1 / (255 * std)).to(device)
        self.shift = (-mean / std).to(device)

    def model(self, index: int = 0) -> nn.Module:
        """The bench's own model, or its twin for two-network methods, made when first needed."""
        while len(self._models) <= index:
            self._models.append(self.new_model())
            self._tensors.append(read_weights(self._models[-1], copy=False))
        return self._models[index]

    @property
    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.model().named_parameters())

    def new_model(self) -> nn.Module:
        model = self._setup.make_model().to(self.device)
        if self.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def load(self, index: int, weights: Weights) -> nn.Module:
        """The bench's model `index` with `weights`."""
        model = self.model(index)
        copy_weights(self._tensors[index], weights)
        return model

    def normalise(self, images: Tensor) -> Tensor:
        return normalised(images, self.scale, self.shift)

    def view(self, name: str, images: Tensor, rng: np.random.Generator) -> Tensor:
        return self._setup.views[name](images, rng)

    def forward(self, weights: Weights, images: Tensor) -> Outputs:
        return self._evaluate(self.load(0, weights), images)

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, images: Tensor) -> Outputs:
        model.eval()
        chunk = EVALUATION_CHUNK[self.device.type]
        parts = []
        for first in range(0, max(1, len(images)), chunk):
            with autocast(self.precision, self.device), fixed_draws(model, self.device):
                parts.append(in_fp32(model(self.normalise(images[first : first + chunk]))))
        logits = torch.cat([part.logits for part in parts])
        features = [part.features for part in parts if part.features is not None]
        return Outputs(torch.cat(features) if features else None, logits)

    def fit(self, plan: Plan) -> Fitted:
        steps = schedule(len(plan.images), plan.sgd, plan.rng("batches"))
        trained, nets, average = self._load(plan)
        descend = Descent(
            [p for model in trained for p in model.parameters()],
            plan.sgd,
            plan.sgd.weight_decay if plan.update_scale is None else 0.0,
        )
        constants = self.constants(plan.constants)
        carried = plan.carried
        total = torch.zeros((), device=self.device)
        observed = None
        step = 0
        with seeded(trained, plan, self.device):
            for epochs, views in self.epoch_views(plan) if len(steps) else ():
                for epoch in epochs:
                    offset = (epoch - epochs.start) * len(plan.images)
                    while step < len(steps) and steps.epoch_of[step] == epoch:
                        batch = self._batch(plan, steps, step, views, offset, constants, carried)
                        loss, following = stepped(plan.loss(batch, *nets), carried)
                        carried = {name: tensor.detach() for name, tensor in following.items()}
                        descend.forget_gradients()
                        loss.backward()  # type: ignore[no-untyped-call]
                        if plan.update_scale is not None:
                            scale_gradients(trained, plan.sgd.weight_decay, plan.update_scale)
                        descend()
                        average()
                        total += loss.detach()
                        step += 1
                    if epoch + 1 == plan.observe_after and step > 0:
                        observed = self._evaluate(trained[0], self._raw(plan))
                        trained[0].train()
        ema = None if plan.ema is None else read_weights(self.model(self._ema_index(plan)))
        weights = tuple(read_weights(model) for model in trained)
        mean_loss = float(total) / max(1, len(steps))
        return Fitted(weights, ema, len(steps), mean_loss, observed, carried)

    def _load(self, plan: Plan) -> tuple[list[nn.Module], list[LossNet], Callable[[], None]]:
        """Load the plan's weights: the trained models, the loss's nets, and the step of the EMA."""
        trained: list[nn.Module] = []
        nets: list[LossNet] = []
        for weights in plan.start:
            model = self.load(len(trained), weights).train()
            trained.append(model)
            nets.append(LossNet(model, self.precision, self.device))
        for weights in plan.frozen:
            model = self.load(len(nets), weights).eval()
            nets.append(FrozenNet(model, self.precision, self.device))
        if plan.ema is None:
            return trained, nets, lambda: None
        model = self.load(self._ema_index(plan), plan.ema.start).eval()
        if plan.ema.in_loss:
            nets.append(FrozenNet(model, self.precision, self.device))
        tensors = [read_weights(m, copy=False) for m in (model, trained[0])]
        into, source = ([weights[name] for name in plan.ema.start] for weights in tensors)
        update = get_ema_multi_avg_fn(plan.ema.decay)  # type: ignore[no-untyped-call]
        return trained, nets, lambda: update(into, source, 0)

    @staticmethod
    def _ema_index(plan: Plan) -> int:
        return len(plan.start) + len(plan.frozen)

    def _batch(
        self,
        plan: Plan,
        steps: Schedule,
        step: int,
        views: Mapping[str, Tensor],
        offset: int,
        constants: Mapping[str, Tensor | Weights],
        carried: Mapping[str, Tensor],
    ) -> Batch:
        rows = torch.from_numpy(steps.rows[step]).to(self.device)
        values = {name: column[rows] for name, column in plan.columns.items()} | dict(carried)
        for name, view in views.items():
            repeated = len(view) > len(plan.images)
            values[name] = self.normalise(view[rows + offset if repeated else rows])
        for name, rows_of_steps in plan.per_step.items():
            values[name] = rows_of_steps[step].to(self.device)
        for name, images in plan.step_images.items():
            values[name] = self.normalise(images[step].to(self.device))
        return Batch(values, constants, padding_weight(len(rows), steps.padding[step], self.device))

    def epoch_views(self, plan: Plan) -> Iterator[tuple[range, Mapping[str, Tensor]]]:
        """The views of consecutive epochs: (epochs, name → (epochs · n) images); raw only once."""
        streams = {name: plan.rng(f"view/{name}") for name in plan.views}
        n = len(plan.images)
        for epochs in draws(n, plan.sgd.epochs):
            made = {}
            for name, view in plan.views.items():
                times = repeats(view, epochs)
                images = plan.images.repeat(times, 1, 1, 1) if times > 1 else plan.images
                made[name] = self.view(view, images, streams[name])
            yield epochs, made

    def _raw(self, plan: Plan) -> Tensor:
        return self.view("raw", plan.images, plan.rng("view/raw"))

    def constants(self, constants: Mapping[str, Constant]) -> Mapping[str, Tensor | Weights]:
        """Constants as a loss reads them: numbers become 0-d tensors on the device."""
        return {
            name: value
            if isinstance(value, Tensor | Mapping)
            else torch.full((), float(value), device=self.device)  # a copy would wait for the GPU
            for name, value in constants.items()
        }


def joint_logits(bench: Bench, networks: Sequence[Weights], images: Tensor) -> Tensor:
    """(n, classes) the mean of the networks' logits on a view; of a single network its own.

    What is largest is the same as in their sum.
    """
    first, *others = [bench.forward(weights, images).logits for weights in networks]
    return sum(others, start=first) / len(networks)


def normalised(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 (n, C, H, W) to float32 (x/255 − mean)/std, with 1/(255·std) and −mean/std given."""
    x = images.to(torch.float32)
    if images.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.mul_(scale).add_(shift)


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """bf16 arithmetic where the recipe asks for it; tf32 is a matter of the backend's flags."""
    if precision == "bf16":
        # Its cache of cast weights would outlive the weights in a captured graph.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return contextlib.nullcontext()


def in_fp32(outputs: Outputs) -> Outputs:
    features = None if outputs.features is None else outputs.features.float()
    return Outputs(features, outputs.logits.float())


class Descent:
    """`torch.optim.SGD`, whose function does the work, without the object: to make one imports
    torch's compiler, for more than a second, in every process that a site starts."""

    def __init__(self, parameters: list[nn.Parameter], sgd: Sgd, weight_decay: float) -> None:
        self._parameters = parameters
        self._sgd = sgd
        self._weight_decay = weight_decay
        self._momenta: list[Tensor | None] = [None] * len(parameters)

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def __call__(self) -> None:
        """One step; parameters without a gradient stay as they are."""
        moved = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        momenta = [self._momenta[i] for i in moved]
        parameters: list[Tensor] = [self._parameters[i] for i in moved]
        sgd(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            momenta,
            lr=self._sgd.lr,
            momentum=self._sgd.momentum,
            weight_decay=self._weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for i, momentum in zip(moved, momenta, strict=True):
            self._momenta[i] = momentum


@torch.no_grad()
def scale_gradients(models: Sequence[nn.Module], decay: float, scale: Weights) -> None:
    """g ← s ⊙ (g + λw) for each parameter: what `Plan.update_scale` asks for."""
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=decay)
                if name in scale:
                    parameter.grad.mul_(scale[name])


def padding_weight(size: int, padding: int, device: torch.device) -> Tensor | None:
    """(size,) ones with `padding` zeros at the end, or None without padding."""
    if padding == 0:
        return None
    return (torch.arange(size, device=device) < size - padding).float()


@contextlib.contextmanager
def seeded(models: Sequence[nn.Module], plan: Plan, device: torch.device) -> Iterator[None]:
    """Draws inside the models (dropout) repeat for the same client and round, whoever runs it."""
    seed = int(plan.rng("dropout").integers(2**63))
    seed_dropout(models, torch.Generator(device).manual_seed(seed))
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        # Not torch.manual_seed, which formats a stack trace for every kind of device not in use.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


def draws_from_torch(model: nn.Module) -> bool:
    """Whether a layer draws from torch's own generator."""
    return any(isinstance(module, _DropoutNd) for module in model.modules())


@contextlib.contextmanager
def fixed_draws(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Dropout that is on in evaluation mode too drops the same in every chunk of images.

    So a forward pass repeats, whatever ran before it and whoever takes which chunk.
    """
    layers = [module for module in model.modules() if hasattr(module, "generator")]
    generators = [layer.generator for layer in layers]
    seed_dropout([model], torch.Generator(device).manual_seed(0))
    on_gpu = device.type == "cuda"
    if on_gpu and layers and not draws_from_torch(model):
        yield  # torch's own generator is left alone: threads share it
    else:
        with torch.random.fork_rng([device] if on_gpu else []):
            (torch.cuda if on_gpu else torch.default_generator).manual_seed(0)
            yield
    for layer, generator in zip(layers, generators, strict=True):
        layer.generator = generator
