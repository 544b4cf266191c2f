"""Train several clients at once: one step of their stacked networks is one step of each client.

``torch.func.vmap`` runs the loss of the algorithm once for all clients. The parameters of n clients are
stacked to ``[n, ...]``, and so are their batches, buffers and codebooks. Clients are in one stack if their
batches have the same sizes, step by step. Every client has its own order of batches, augmentation and
dropout, from the same seeds as if it trained alone. So only the rounding of the results differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.backends import cudnn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..data.rotate import augment
from ..devices import gpus_of
from ..engines.base import Message, Reply
from ..errors import UserError
from ..models.flat import FlatModule
from ..seeds import seeded
from .client import Client, ModelResults
from .recording import declares
from .training import Outcome, check_scalar, optimizer_of, schedule_of
from .work import Batch, Work

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from .workspace import Workspace

_DROPOUTS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
_BATCH_NORMS = (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm)
_COPIES = (torch.Tensor.clone, torch.Tensor.contiguous)
_NOT_OVERRIDDEN = ("regularize", "before_step", "after_batch", "after_round")
Tensors = dict[str, torch.Tensor]


@dataclass
class Trainee:
    """A model of a client in a turn, with the place of its training in the turn."""

    work: Work
    results: ModelResults
    schedule: list[list[torch.Tensor]] = field(init=False)
    """batches of every epoch; this and the next three are missing if the model is not trained"""
    values: torch.Tensor = field(init=False)
    """``[P]``, first the loaded and later the trained values; ``buffers`` is ``[Q]``"""
    buffers: torch.Tensor = field(init=False)
    generators: list[torch.Tensor] = field(init=False)
    """states of torch's generators, on the CPU and on the GPU"""
    outcome: Outcome | RuntimeError | None = None
    """None: the model is not trained"""

    def kind(self) -> tuple[Any, ...]:
        """Return what the models of one stack have in common."""
        sizes = tuple(tuple(map(len, batches)) for batches in self.schedule)
        tensors = {**self.work.trained, **_tensors(self.work.memory)}
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        return sizes, shapes, tuple(self.work.rates.items())


class Together:
    """Run the turns of several clients of one workspace, and train them at once."""

    def __init__(self, clients: Mapping[str, Client], workspace: Workspace) -> None:
        self._clients, self._workspace = clients, workspace
        self._gpus = gpus_of(workspace.device)

    def __call__(self, messages: Mapping[str, Message]) -> Iterator[Reply]:
        """Yield one reply for each client, in the order of ``messages``."""
        begun: dict[str, list[Trainee] | RuntimeError] = {}
        stacks: dict[tuple[Any, ...], list[Trainee]] = {}
        for name, message in messages.items():
            try:
                begun[name] = trainees = self._begun(self._clients[name], message)
            except RuntimeError as error:
                begun[name] = error
                continue
            for trainee in trainees:
                if trainee.work.message.options.get("train"):
                    stacks.setdefault(trainee.kind(), []).append(trainee)
        for trainees in stacks.values():
            with torch.random.fork_rng(devices=self._gpus):
                _train(self._workspace, trainees)
        for name, found in begun.items():
            try:
                reply = self._ended(self._clients[name], found)
            except RuntimeError as error:
                reply = Reply.failed(name, error)
            yield reply

    def _begun(self, client: Client, message: Message) -> list[Trainee]:
        """Do the work of a client before its training."""
        flat, trainees = self._workspace.flat, []
        with client.guarded():
            for work in client.works(message):
                trainee = Trainee(work, client.begin(work).copied(flat.storages()))
                if work.message.options.get("train"):
                    client.prepare(work)
                    trainee.schedule = schedule_of(client.algorithm(work), work)
                    trainee.values, trainee.buffers = flat.values.detach().clone(), flat.buffers.clone()
                    trainee.generators = _generators(self._gpus)
                trainees.append(trainee)
        return trainees

    def _ended(self, client: Client, found: list[Trainee] | RuntimeError) -> Reply:
        """Return the reply of a client after its training."""
        if isinstance(found, RuntimeError):
            raise found
        flat = self._workspace.flat
        with client.guarded():
            for trainee in found:
                if isinstance(trainee.outcome, RuntimeError):
                    raise trainee.outcome
                if trainee.outcome is not None:
                    flat.reset()
                    flat.set(trainee.values, trainee.buffers)
                    client.finish(trainee.work, trainee.results, trainee.outcome)
                    trainee.results = trainee.results.copied(flat.storages())
            return client.reply([each.work for each in found], [each.results for each in found])


def together(clients: Mapping[str, Client], workspace: Workspace) -> Together | None:
    """Return the runner of turns of several clients at once, or None for ``run.clients_at_once = 1``."""
    return Together(clients, workspace) if workspace.context.run.clients_at_once > 1 else None


def check(workspace: Workspace, arm: str) -> None:
    """Refuse an algorithm or a network that cannot train several clients at once, if the run asks for it.

    Raises:
        UserError: the key must be 1.
    """
    from ..algorithms.base import Algorithm

    algorithm, run = workspace.algorithm, workspace.context.run
    if run.clients_at_once == 1 or not algorithm.trains_clients:
        return
    key, advice = f"key 'run.clients_at_once': arm {arm!r}", "set the key to 1"
    kind = type(algorithm)
    own = [name for name in _NOT_OVERRIDDEN if getattr(kind, name) is not getattr(Algorithm, name)]
    if own or not declares(algorithm, "stacked_step") or not algorithm.stacked_step:
        what = f"its own {own[0]}" if own else "a loss that is not declared as stacked_step"
        raise UserError(f"{key} has {what}, so its clients train one after the other; {advice}")
    if workspace.autocast:
        raise UserError(
            f"{key} computes in bfloat16, but vmap would change the dtype; set run.precision = 'fp32', or"
            f" {advice}"
        )
    if workspace.recorder is not None:
        raise UserError(f"{key} records its steps as CUDA graphs; set run.cuda_graphs = false, or {advice}")
    flat, example = workspace.flat, workspace.example
    try:
        stack = _Stack(workspace, [flat.values.detach()] * 2, [flat.buffers] * 2)
        with seeded(workspace.device, 0):
            stack.generators = [_generators(stack.gpus)] * 2
            images = torch.cat([example, example])
            stack.mapped(workspace.net, images.expand(2, *images.shape)).float().sum().backward()
            alone = FlatModule(deepcopy(workspace.net))
            with _Layouts() as layouts:
                alone.module(images)
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise UserError(f"{key} has a network that vmap does not support ({line}); {advice}") from error
    if (name := alone.replaced()) is not None:
        raise UserError(f"{key} has a network that replaces its tensor {name!r}; write into it with copy_")
    if layouts.other is not None:
        raise UserError(
            f"{key} has a dropout of shape {list(layouts.other)}; in a stack of clients, this tensor would"
            f" have another layout in memory, and dropout another mask; {advice}"
        )


class _Module(nn.Module):
    """Make the network a part of a module with any forward method, for ``functional_call``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, which may use the network."""
        return function(*arguments)


class _Stack:
    """The stacked networks of n models: ``values`` ``[P]`` and ``buffers`` ``[Q]`` of each."""

    def __init__(self, workspace: Workspace, values: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        flat = workspace.flat
        self._flat, self._module, self.gpus = flat, _Module(workspace.net.train()), gpus_of(workspace.device)
        self.parameters, self._buffers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        # separate tensors, because autograd would write the gradient of a view into a tensor of zeros for the
        # whole
        for (name, parameter), value in zip(
            self._module.named_parameters(), flat.split(torch.stack(values)), strict=True
        ):
            self.parameters[name] = value.clone().requires_grad_(parameter.requires_grad)
        floating = iter(flat.split_buffers(torch.stack(buffers)))
        for name, buffer in self._module.named_buffers():
            wide = next(floating) if buffer.is_floating_point() else buffer.expand(len(values), *buffer.shape)
            self._buffers[name] = wide.clone()
        self.generators: list[list[torch.Tensor]] = []
        """states of each model"""

    def mapped(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function of every model and of its part of the arguments ``[n, ...]``."""

        def of_one(parameters: Tensors, buffers: Tensors, *arguments: Any) -> Any:
            return functional_call(self._module, (parameters, buffers), (function, *arguments))

        with _Functions(self):
            return vmap(of_one)(self.parameters, self._buffers, *arguments)

    def each(self, draw: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Call ``draw(i)`` for every model, with its own state of torch's generators."""
        found = []
        for i, states in enumerate(self.generators):
            torch.set_rng_state(states[0])
            for gpu, state in zip(self.gpus, states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            found.append(draw(i))
            self.generators[i] = _generators(self.gpus)
        return found

    @torch.no_grad()
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameters ``[n, P]`` and the buffers ``[n, Q]``."""
        n = len(self.generators)
        values = self._flat.values.new_empty(n, len(self._flat.values))
        buffers = self._flat.buffers.new_empty(n, len(self._flat.buffers))
        floating = [buffer for buffer in self._buffers.values() if buffer.is_floating_point()]
        for target, parameter in zip(self._flat.split(values), self.parameters.values(), strict=True):
            target.copy_(parameter)
        for target, buffer in zip(self._flat.split_buffers(buffers), floating, strict=True):
            target.copy_(buffer)
        return values, buffers


class _Noise(torch.autograd.Function):
    """The factors of dropout, drawn for each model with its own generators."""

    @staticmethod
    def forward(x: torch.Tensor, dropout: Callable[..., torch.Tensor], p: float, stack: _Stack) -> Any:
        """Refuse a tensor that is not stacked.

        Raises:
            RuntimeError: always; vmap calls the method of that name instead.
        """
        raise RuntimeError("dropout of a tensor that is the same for all clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the factors have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dropout: Any, p: float, stack: _Stack) -> Any:
        """Return the factors ``[n, ...]``.

        A single network draws them in the same layout.
        """
        x = x.movedim(in_dims[0], 0)
        ones = torch.ones(x.shape[1:], dtype=x.dtype, device=x.device)
        ones = ones.contiguous(memory_format=_layout(ones))
        return torch.stack(stack.each(lambda i: dropout(ones, p))), 0


class _Functions(TorchFunctionMode):
    """Replace functions of networks for a stack: dropout draws the masks of each model."""

    def __init__(self, stack: _Stack) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function or its replacement."""
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return self._dropout(function, *args, **kwargs)
        if function is functional.group_norm:
            return _group_norm(*args, **kwargs)
        if function in _BATCH_NORMS:
            return _without_cudnn(function, *args, **kwargs)
        if function in _COPIES:  # a memory format only makes convolutions faster, and vmap has none
            kwargs.pop("memory_format", None)
        return function(*args, **kwargs)

    def _dropout(
        self, function: Any, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return x
        factors: torch.Tensor = _Noise.apply(x.detach(), function, p, self._stack)  # type: ignore[no-untyped-call]
        return x.mul_(factors) if inplace else x * factors


class _Layouts(TorchFunctionMode):
    """Watch the dropouts of a single network.

    Attributes:
        other: the shape of the first input that has another layout than :class:`_Noise` draws; None: there is
            none.
    """

    other: torch.Size | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        if function in _DROPOUTS and self.other is None:
            x: torch.Tensor = args[0] if args else kwargs["input"]
            if not x.is_contiguous(memory_format=_layout(x)):
                self.other = x.shape
        return function(*args, **kwargs)


def _layout(x: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def _group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute group norm, which vmap does not take in channels-last memory."""
    rows = x.reshape(len(x), groups, -1)
    y = functional.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape)
    of_channel = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(of_channel)
    return y if bias is None else y + bias.view(of_channel)


def _without_cudnn(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute batch norm by the kernels of torch: before it calls cuDNN it asks for the layout in memory."""
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        return function(*args, **kwargs)
    finally:
        cudnn.enabled = before


def _train(workspace: Workspace, trainees: list[Trainee]) -> None:
    """Train models of one kind, and set their ``values``, ``buffers`` and ``outcome``."""
    try:
        _Training(workspace, trainees).run()
    except RuntimeError as error:  # out of memory: an error of these clients, not of the run
        for trainee in trainees:
            trainee.outcome = error


class _Training:
    """The training of models of one kind."""

    def __init__(self, workspace: Workspace, trainees: list[Trainee]) -> None:
        self._workspace, self._trainees, first = workspace, trainees, trainees[0].work
        self._algorithm: Algorithm = workspace.algorithm
        self._stack = _Stack(workspace, [t.values for t in trainees], [t.buffers for t in trainees])
        self._stack.generators = [t.generators for t in trainees]
        trained, memory = (
            {name: torch.stack([tensors(t.work)[name] for t in trainees]) for name in tensors(first)}
            for tensors in (lambda work: work.trained, lambda work: _tensors(work.memory))
        )
        self._trained = {name: tensor.detach().requires_grad_() for name, tensor in trained.items()}
        self._memory = memory
        # no client: a loss that uses more than the network, the batch and these tensors fails
        nothing: Any = None
        message = Message(options={"seed": first.seed, "round": first.round})
        self._work = Work("", nothing, workspace, message, first.seed, first.round, nothing, nothing)
        self._work.trained, self._work.rates = self._trained, first.rates
        self._work.epochs = len(trainees[0].schedule)
        self._sums: Tensors = {}
        self._counted = Counter[str]()

    def run(self) -> None:
        """Take all steps, and give each model its result."""
        schedule, work, total, images = self._trainees[0].schedule, self._work, None, 0
        leaves = [leaf for leaf in self._stack.parameters.values() if leaf.requires_grad]
        optimizer = optimizer_of(self._algorithm, work, leaves)
        for work.epoch, batches in enumerate(schedule):
            for work.epoch_step, positions in enumerate(batches):
                losses = self._losses(self._batch(work.epoch, work.epoch_step))
                losses.sum().backward()  # type: ignore[no-untyped-call]
                for leaf in leaves:
                    if leaf.grad is None:  # as with an optimizer of one model
                        leaf.grad = torch.zeros_like(leaf)
                optimizer.step()
                optimizer.zero_grad()
                weighted = losses.detach() * len(positions)
                total = weighted if total is None else total + weighted
                images += len(positions)
                work.step += 1
        self._deliver(total, images, optimizer)

    def _batch(self, epoch: int, step: int) -> Batch:
        """Return the stacked batches of a step."""
        device, how = self._workspace.device, self._workspace.augmentation
        at = [trainee.schedule[epoch][step].to(device) for trainee in self._trainees]
        splits = [trainee.work.train for trainee in self._trainees]

        def chosen(i: int) -> torch.Tensor:
            return augment(splits[i].images[at[i]], how)

        chosen_images = [chosen(i) for i in range(len(at))] if how == "none" else self._stack.each(chosen)
        images = self._workspace.normalize(torch.cat(chosen_images)).unflatten(0, (len(at), -1))
        labels = [split.labels[positions] for split, positions in zip(splits, at, strict=True)]
        return Batch(images, torch.stack(at), torch.stack(labels))

    def _losses(self, batch: Batch) -> torch.Tensor:
        """Return the losses ``[n]`` of a step, and add to the sums of ``Work.note``."""
        counted = Counter[str]()

        def loss(trained: Tensors, memory: Tensors, *batch: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
            work = replace(self._work, trained=trained, memory=memory, _noted={}, counted=counted)
            value = self._algorithm.loss(work, Batch(*batch))
            check_scalar(self._algorithm, value)
            return value, work._noted

        losses, noted = self._stack.mapped(loss, self._trained, self._memory, *batch)
        for name, sums in noted.items():
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums.detach()
        self._counted += counted
        return losses  # type: ignore[no-any-return]

    @torch.no_grad()
    def _deliver(self, total: torch.Tensor | None, images: int, optimizer: torch.optim.Optimizer) -> None:
        """Write the results into the models and the work of each client."""
        values, buffers = self._stack.rows()
        for i, trainee in enumerate(self._trainees):
            work = trainee.work
            trainee.values, trainee.buffers = values[i], buffers[i]
            for name, tensor in {**work.trained, **_tensors(work.memory)}.items():
                tensor.copy_({**self._trained, **self._memory}[name][i])
            work._noted = {name: sums[i] for name, sums in self._sums.items()}
            work.counted = self._counted.copy()
            for name in ("epochs", "epoch", "step", "epoch_step"):
                setattr(work, name, getattr(self._work, name))
            (loss,) = (float("nan"),) if total is None else work.read(total[i])
            trainee.outcome = Outcome(loss / images if images else float("nan"), work.step, optimizer)


def _tensors(values: Mapping[str, Any]) -> Tensors:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _generators(gpus: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]
