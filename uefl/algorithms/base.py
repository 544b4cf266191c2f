"""What an algorithm is: its parameters, the data and the model that it needs, its server half and its client
half.

An algorithm is one class in one file. The class itself is federated averaging: every method has the default
of FedAvg, and an algorithm overrides what it does otherwise. An instance holds its parameters and the
:class:`Context` of the run, and nothing that changes: its methods take the state of the server or of a client
as an argument. So the client half can run in another process, from a message alone.

The frame (``uefl.server``, ``uefl.client``) owns all else: participants, epochs, batches, the optimizer,
seeds, precision, the device, measuring, checking what comes back, quorum, checkpoints and progress.

An algorithm is found by its name: the modules of this package are imported when the first one is looked up; a
package of a third party names its own in the entry point group ``uefl.algorithms``; a script calls
:func:`register`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from pydantic import BaseModel
from torch import nn

from ..aggregation import Mean, WeightedMean
from ..engines.base import Expected, Message, Reply, expected_like
from ..errors import UnknownAlgorithm, UserError, nearest
from ..fields import parse
from ..findings import Findings, History
from ..uncertainty import Prediction, of_network
from .context import Context, ModelSpec, Parameters, Record, State

if TYPE_CHECKING:
    from ..client.work import Batch, Work
    from ..data.federation import Federation, ServerData
    from ..server.teacher import Teacher
    from ..server.turn import Turn


class Algorithm:
    """Federated averaging, and the methods by which an algorithm differs from it.

    Args:
        parameters: an instance of ``Parameters``; None: ``keys`` are its fields.

    Raises:
        UserError: a key that is unknown, of a wrong type, or out of its range.

    Source of the defaults: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
        Decentralized Data".
    """

    class Parameters(Parameters):
        """No parameters."""

    kind: ClassVar[str] = "labeled"
    """the data of a client: ``labeled`` images, or unlabeled ``sets`` whose class shares are known"""
    trains_clients: ClassVar[bool] = True
    """False: clients are only measured"""
    draws: ClassVar[bool] = True
    """whether its predictions are of ``passes`` draws; where no arm draws, the key is refused"""
    ops: ClassVar[tuple[str, ...]] = ()
    """kernels that it needs; a backend that cannot run them is refused before anything is written"""
    private_predicts: ClassVar[tuple[str, ...]] = ()
    """tensors of ``work.private`` that :meth:`predict` uses, by name: it sees no others, and a saved model
    has these for every client. A tensor for training alone is not among them. Private parts of the network
    always count."""
    columns: ClassVar[dict[str, str]] = {}
    """metrics of its own that a report shows: by name, what each is. They are in the records of its clients,
    which have them from :meth:`record`, from :meth:`measure`, or from what the client half put into
    ``work.metrics`` while it trained. The report shows the mean over the clients at the last round. A metric
    that is not named here is in metrics.jsonl alone."""

    marks: ClassVar[dict[str, str]] = {}
    """entries of a client's records that are true where something has just happened to it, which plots mark
    with a triangle: by name, what has happened before that round"""
    levels: ClassVar[dict[str, tuple[str, str]]] = {}
    """entries of the records of an iteration's last round that plots draw as a dashed line through the rounds
    of the iteration: by name, the metric whose plot it is, and what the number is"""

    context: Context

    @property
    def plain_means(self) -> bool:
        """Whether all that changes the state comes from the clients by weighted means of :meth:`averages`:
        then a robust rule may replace them. An algorithm with another :meth:`add`, or one that asks its
        clients for tensors in :meth:`prepare`, says so itself."""
        return (
            type(self).add is Algorithm.add
            and type(self).prepare is Algorithm.prepare
            and self.trains_clients
        )

    @property
    def only_the_model(self) -> bool:
        """Whether the mean of ``values`` is all that the models of a run get from its clients: no other
        tensor is averaged, no measurement steers anything, and a client keeps no tensor of its own. Then
        noise on that mean hides a client."""
        plain = all(
            getattr(type(self), name) is getattr(Algorithm, name)
            for name in ("averages", "end_iteration", "client_state")
        )
        return plain and self.plain_means

    @property
    def static_step(self) -> bool:
        """Whether every step of a turn does the same operations on the same tensors, whatever their values,
        and waits for none of them: then a CUDA graph can replay it. A class that overrides ``regularize``,
            ``loss``, ``before_step`` or ``after_batch`` has to say so
        itself (``static_step = True``), or its steps are not replayed. In a replay a value of Python, such as
        ``work.step``, is what it was at the recording; so tensors of ``work.memory`` are changed in place,
        and the device draws random numbers, by torch's generator."""
        return True

    def __init__(self, parameters: BaseModel | None = None, **keys: Any) -> None:
        self.parameters: Any = (
            parse(self.Parameters, type(self).__name__, keys) if parameters is None else parameters
        )

    def bound(self, context: Context) -> Algorithm:
        """The same algorithm with the context of a run."""
        algorithm = copy.copy(self)
        algorithm.context = context
        return algorithm

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse what cannot be trained, before anything is written; ``net`` is the network of
        :meth:`build_model`.

        Raises:
            UserError: what ``arm`` lacks, and what to do.
        """
        smallest = min(federation.silos, key=lambda silo: silo.sizes.train)
        if self.trains_clients and smallest.sizes.train == 1:
            try:
                net.train()(torch.zeros(1, *federation.shape, device=next(net.parameters()).device))
            except ValueError:  # of a batch norm that sees one value per channel
                raise UserError(
                    f"silo {smallest.name!r} has one training image, which batch norm cannot normalise; give"
                    " it two"
                ) from None

    # --- the model -----------------------------------------------------------------------------------------

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """A network from images ``[B, C, H, W]``, normalised, to logits ``[B, classes]``; torch's generator
        draws the weights."""
        return spec.network()

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether a parameter or buffer of the network stays with its client: it is neither sent nor
        averaged.

        Args:
            name: as in ``named_parameters`` and ``named_buffers``.
            owner: the module that holds it, e.g. a ``BatchNorm2d``.
        """
        return False

    # --- the server's half ---------------------------------------------------------------------------------

    def server_data(self, federation: Federation) -> ServerData | None:
        """The images that the server trains and validates on; None: it has none."""
        return federation.server

    def rounds(self, iteration: int) -> int | None:
        """Rounds of an iteration, None behind the last one."""
        plan = self.context.training.iterations()
        return plan[iteration] if iteration < len(plan) else None

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """The state to begin with, from the flat parameters ``[P]`` and buffers ``[Q]`` of a new network,
        without its private parts.

        ``net`` is a network of this kind, for its sizes; its weights are not those of ``values``.
        """
        return State({"values": values, "buffers": buffers})

    def prepare(self, state: State, turn: Turn) -> None:
        """Before the messages of a turn; an algorithm that needs an answer of its clients first gets it by
        ``turn.ask``."""

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """What one client is sent: tensors, options, and the tensors that are expected back, by shape and
        dtype.

        ``client`` may be one that is never trained on (``turn.train`` is False then, and it is not in
        ``context.clients``).
        """
        tensors = {name: state.tensors[name] for name in ("values", "buffers")}
        return Message(tensors, expects=expected_like(tensors))

    def unsound(self, message: Message, reply: Reply) -> str | None:
        """Why an update that has the expected tensors, all finite, must not be averaged all the same; None:
        it is sound."""
        return None

    def weight(self, update: Reply) -> float:
        """The weight of an update in the averages: the number of its examples."""
        return update.examples

    def averages(self, state: State) -> dict[str, Mean]:
        """The running averages of a round, by tensor name."""
        return {name: WeightedMean(state.tensors[name]) for name in ("values", "buffers")}

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add a sound update to the averages. Its tensors may be the engine's own buffers: copy what is to be
        kept.

        Raises:
            ValueError: there is an average of a tensor that the clients do not send.
        """
        for name, mean in averages.items():
            if name not in update.tensors:
                raise ValueError(
                    f"{type(self).__name__}.averages: no update has {name!r}; let broadcast expect it and"
                    " update return it"
                )
            mean.add(update.tensors[name], self.weight(update))

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """All updates have been added, and there are enough of them: the averages are the new state."""
        for name, mean in averages.items():
            state.tensors[name] = mean.result()

    def end_round(self, state: State, turn: Turn, server: Teacher | None) -> None:
        """The averages are in the state; the server may train or measure with images of its own. ``server``
        is None where it has none."""

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Columns that the algorithm adds to a client's line of metrics."""
        return {}

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """The metrics after an iteration's last round are known; True ends the run."""
        return False

    def client_tensors(self, state: State, client: str) -> dict[str, torch.Tensor]:
        """What belongs to one client in the saved model, beside the private parts of its network."""
        return {}

    def reference(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A state in the place of a client's own, made from those of all clients: the global model is
        measured with it, and so is a client that has never trained. Only the tensors in ``private_predicts``
        are taken; those that are missing are as :meth:`client_state` makes them. The frame averages private
        parts of the network itself.

        Args:
            states: of the clients that have trained, by name.
        """
        return {}

    # --- the client's half ---------------------------------------------------------------------------------

    def client_state(self, client: str) -> dict[str, torch.Tensor]:
        """Tensors that are private to a client: the frame keeps them by its name, and the client finds them
        in ``work.private``.

        Training and answers may add further ones there; a name that was sent comes back with the same shape
        and dtype.
        """
        return {}

    def epoch(self, work: Work) -> Iterator[torch.Tensor]:
        """The batches of one pass, ``[b]`` positions of training images each.

        All passes of a round are drawn before its first step, so that what a step draws does not change the
        order. A last batch of a single image is left out where there are others: batch norm cannot normalise
        it.
        """
        order = torch.randperm(work.examples)
        batches = order.split(work.training.batch_size)
        yield from (batch for batch in batches if len(batch) > 1 or len(batches) == 1)

    def before_round(self, work: Work) -> None:
        """The network is loaded, and training is about to begin. A tensor put into ``work.trained`` is
        trained with the network."""

    def answer(self, work: Work) -> dict[str, torch.Tensor]:
        """The tensors that answer a message of :meth:`prepare`."""
        raise NotImplementedError(f"{type(self).__name__} asks its clients, and has no method 'answer'")

    def weight_decay(self, work: Work) -> float:
        """The weight decay of the optimizer."""
        return work.training.weight_decay

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Write the gradient ``[P]`` of terms of the parameters alone; that of the batch is then added to it.
        False: there are none."""
        return False

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """The mean loss over a batch, a scalar in nats: cross-entropy with the labels."""
        return work.cross_entropy(work.logits(batch.images), batch.labels)

    def before_step(self, work: Work, gradient: torch.Tensor) -> None:
        """The gradient ``[P]`` of a step is complete; what is changed in it is what the optimizer sees."""

    def after_batch(self, work: Work, batch: Batch) -> None:
        """The optimizer has taken a step."""

    def after_round(self, work: Work) -> None:
        """Training has ended, or failed: put back what :meth:`before_round` changed in the network beside its
        parameters."""

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """The tensors that go back after training, as :meth:`broadcast` expects them: the model without its
        private parts."""
        return work.model()

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """Predictions for images ``[B, C, H, W]``, normalised, with the uncertainty that the run measures."""
        return of_network(work.net, images, work.passes, work.amp)

    def measure(self, work: Work, extras: list[dict[str, torch.Tensor]], last: bool) -> Record:
        """Further metrics of the test split, from the ``extra`` of the predictions of each member, one entry
        per image.

        Args:
            last: whether this is the last measurement of an iteration.
        """
        return {}

    def findings(self, history: History) -> Findings | None:
        """A section that a report has for its arm, made from the records; None: none. There is no ``context``
        here."""
        return None

    # --- the trained model ---------------------------------------------------------------------------------

    def infer(
        self, net: nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Logits ``[B, classes]`` of a saved model with dropout off.

        ``tensors`` belong to the client whose model it is: its :meth:`client_tensors`, and those that
        ``private_predicts`` names.
        """
        logits: torch.Tensor = net(images)
        return logits

    def misfit(
        self, net: nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """How badly a client's ``tensors``, as of :meth:`infer`, fit images ``[B, C, H, W]``, normalized:
        ``[B]``, lower is better.

        A saved model predicts for a site that was not trained on with the tensors of the client that fits
        best. None: they have no such measure.
        """
        return None


# --- the registry -----------------------------------------------------------------------------------------

_GROUP = "uefl.algorithms"
_registered: dict[str, type[Algorithm]] = {}
_complete: list[bool] = []
A = TypeVar("A", bound=type[Algorithm])


@overload
def register(name: str) -> Callable[[A], A]: ...
@overload
def register(name: str, algorithm: A) -> A: ...
def register(name: str, algorithm: A | None = None) -> A | Callable[[A], A]:
    """Give an algorithm its name; a decorator, or a call with the class.

    Raises:
        ValueError: another class has that name.
        TypeError: not a subclass of :class:`Algorithm`, or a name that is no text.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register({name!r}): expected a name")

    def enter(cls: A) -> A:
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise TypeError(f"register({name!r}): expected a subclass of uefl.Algorithm, got {cls!r}")
        if not cls.__module__.startswith("uefl.algorithms."):
            _import_own()
        known = _registered.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"register({name!r}): {known.__module__}.{known.__qualname__} has that name; choose"
                " another one"
            )
        _registered[name] = cls
        return cls

    return enter if algorithm is None else enter(algorithm)


def registry() -> dict[str, type[Algorithm]]:
    """All algorithms by name: those of this package, of installed packages, and what was registered by
    hand."""
    if not _complete:
        _import_own()
        for entry in importlib.metadata.entry_points(group=_GROUP):
            register(entry.name, _loaded(entry))
        _complete.append(True)
    return dict(sorted(_registered.items()))


def _import_own() -> None:
    """Import the modules of this package, which register their algorithms; those that are imported already do
    so no second time."""
    package = importlib.import_module("uefl.algorithms")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def known_elsewhere(name: str) -> bool:
    """Whether another process finds this algorithm too: it is one of this package or of an installed one, not
    registered by hand."""
    packaged = {entry.name for entry in importlib.metadata.entry_points(group=_GROUP)}
    return name in packaged or find(name).__module__.startswith("uefl.algorithms.")


def _loaded(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever a package of a third party does when it is imported
        package = entry.dist.name if entry.dist is not None else entry.value
        raise UserError(
            f"the algorithm {entry.name!r} of the package {package} cannot be loaded ({type(error).__name__}:"
            f" {error}); update or uninstall the package"
        ) from error


def find(name: str, place: str = "") -> type[Algorithm]:
    """An algorithm by its name.

    Raises:
        UserError: there is none of that name; ``place`` begins the message.
    """
    known = registry()
    if not isinstance(name, str) or name not in known:
        expected = f"one of {', '.join(known)}, or your own after uefl.register"
        raise UnknownAlgorithm(
            f"{place}no algorithm {name!r}{nearest(str(name), known)}; expected {expected}"
        )
    return known[name]


__all__ = [
    "Algorithm",
    "Context",
    "Expected",
    "Message",
    "ModelSpec",
    "Parameters",
    "Record",
    "Reply",
    "State",
    "find",
    "register",
    "registry",
]
