"""The interface of an algorithm: parameters, data, model, server half and client half.

An algorithm is one class in one file. The base class is federated averaging; an algorithm overrides the
methods that differ. An instance holds its parameters and the :class:`Context` of the run, which do not
change. Methods take the state of the server or of a client as an argument, so the client half also runs in
another process.

The framework (``uefl.server``, ``uefl.client``) does everything else: participants, epochs, batches, the
optimizer, seeds, precision, the device, measuring, checking replies, quorum, checkpoints and progress.

The package finds an algorithm by its name. The first look-up imports the modules of this package. Other
packages use the entry point group ``uefl.algorithms``, and a script calls :func:`register`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from pydantic import BaseModel
from torch import nn

from ..aggregation import Mean, WeightedMean
from ..engines.base import Expected, Message, Reply, expected_like
from ..errors import UnfitClient, UnknownAlgorithm, nearest
from ..fields import parse
from ..findings import Findings, History
from ..models.normalization import blank
from ..registry import Registry
from ..uncertainty import Prediction, of_network
from .context import Context, ModelSpec, Parameters, Record, State

if TYPE_CHECKING:
    from ..client.work import Batch, Work
    from ..data.federation import Federation, ServerData
    from ..server.teacher import Teacher
    from ..server.turn import Turn


class Algorithm:
    """Federated averaging, and the methods that an algorithm overrides.

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
    """data of a client: ``labeled`` images, or unlabeled ``sets`` with known class priors"""
    trains_clients: ClassVar[bool] = True
    """False: clients do not train, they only measure"""
    draws: ClassVar[bool] = True
    """whether predictions use ``passes`` draws; if no arm uses them, the key is refused"""
    images_only: ClassVar[str] = ""
    """the reason why the algorithm needs images, as words after its name; empty: it takes all kinds of
    inputs"""
    ops: ClassVar[tuple[str, ...]] = ()
    """required kernels; a backend without them is refused before anything is written"""
    private_predicts: ClassVar[tuple[str, ...]] = ()
    """names of the tensors of ``work.private`` that :meth:`predict` uses. The method gets no others, and a
    saved model has them for every client. Private tensors of the network are always included."""
    columns: ClassVar[dict[str, str]] = {}
    """metrics that a report shows as the mean over the clients at the last round: a description by name. They
    come from :meth:`record`, from :meth:`measure`, or from ``work.metrics`` of the training. Other metrics
    are only in metrics.jsonl."""
    details: ClassVar[frozenset[str]] = frozenset()
    """other numbers of metrics.jsonl that may be measures of a suite"""
    server_columns: ClassVar[frozenset[str]] = frozenset()
    """metrics that only :meth:`record` and :meth:`end_iteration` compute; a reply with such a metric is
    rejected"""
    marks: ClassVar[dict[str, str]] = {}
    """Boolean metrics that plots mark with a triangle: the event before the round, by name"""
    levels: ClassVar[dict[str, tuple[str, str]]] = {}
    """metrics of an iteration's last round that plots draw as a dashed line: by name, the metric of the plot
    and a description"""

    context: Context

    @property
    def plain_means(self) -> bool:
        """Return True if only the weighted means of :meth:`averages` change the state.

        Then a robust rule may replace the means. An algorithm that overrides :meth:`add` or asks its clients
        in :meth:`prepare` sets this property itself.
        """
        return (
            type(self).add is Algorithm.add
            and type(self).prepare is Algorithm.prepare
            and self.trains_clients
        )

    @property
    def only_the_model(self) -> bool:
        """Return True if clients contribute only the mean of ``values``.

        No other tensor is averaged, no measurement changes the run, and clients keep no tensors. Then noise
        on that mean hides a client.
        """
        plain = all(
            getattr(type(self), name) is getattr(Algorithm, name)
            for name in ("averages", "end_iteration", "client_state")
        )
        return plain and self.plain_means

    @property
    def asks_all(self) -> bool:
        """Return True if the server asks clients that have not trained, so that no client can join later."""
        return False

    @property
    def static_step(self) -> bool:
        """Return True if a CUDA graph can replay a step.

        Every step of a turn then runs the same operations on the same tensors without waiting for the device.
        A class that overrides ``regularize``, ``loss``, ``before_step`` or ``after_batch`` must set it, or
        its steps are not replayed. A replay uses the Python values of the recording, such as ``work.step``;
        tensors of ``work.memory`` must change in place, and torch's generator on the device must draw the
        random numbers.
        """
        return True

    @property
    def stacked_step(self) -> bool:
        """Return True if several clients can take a step at once (``run.clients_at_once``).

        Then ``loss`` runs once for all of them, under ``torch.func.vmap``. Of a client it uses only the
        network, the batch, ``work.trained`` and ``work.memory``; tensors of the memory change in place. A
        class that overrides ``loss`` must set it, or its clients cannot train at once. A class that overrides
        ``regularize``, ``before_step``, ``after_batch`` or ``after_round`` cannot set it.
        """
        return True

    def __init__(self, parameters: BaseModel | None = None, **keys: Any) -> None:
        self.parameters: Any = (
            parse(self.Parameters, type(self).__name__, keys) if parameters is None else parameters
        )

    def bound(self, context: Context) -> Algorithm:
        """Return the algorithm with the context of a run."""
        algorithm = copy.copy(self)
        algorithm.context = context
        return algorithm

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse settings that cannot be trained by a ``net``, before anything is written.

        Raises:
            UserError: ``arm`` lacks something; the message has advice.
        """
        smallest = min(federation.clients, key=lambda client: client.sizes.train)
        if self.trains_clients and smallest.sizes.train == 1:
            try:
                net.train()(probe(1, federation, net))
            except ValueError:  # a batch norm with one value per channel raises this error
                why = "has one training image, but batch norm needs two images or more; add images"
                raise UnfitClient(smallest.name, why) from None

    # --- the model -----------------------------------------------------------------------------------------

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build a network with drawn weights, from images ``[B, C, H, W]`` to logits ``[B, classes]``."""
        return spec.network()

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Return True for a parameter or buffer that stays with its client: it is neither sent nor averaged.

        Args:
            name: as in ``named_parameters`` and ``named_buffers``.
            owner: the module that holds it, e.g. a ``BatchNorm2d``.
        """
        return False

    # --- the server's half ---------------------------------------------------------------------------------

    def server_data(self, federation: Federation) -> ServerData | None:
        """Return the images that the server trains and validates on, or None if it has none."""
        return federation.server

    def rounds(self, iteration: int) -> int | None:
        """Return the number of rounds of an iteration, or None after the last one."""
        iterations = self.context.training.iterations()
        return iterations[iteration] if iteration < len(iterations) else None

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the initial state of the server, with the flat parameters ``[P]`` and buffers ``[Q]``.

        They are without private parts. Use ``net``, which has other weights, only for sizes.
        """
        return State({"values": values, "buffers": buffers})

    def prepare(self, state: State, turn: Turn) -> None:
        """Prepare the messages of a turn, after replies of the clients that ``turn.ask`` gets."""

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message to one client: tensors, options, and the expected tensors by shape and dtype.

        If ``client`` is only measured, ``turn.train`` is False, and ``context.clients`` does not contain the
        client.
        """
        return Message(state.model, expects=expected_like(state.model))

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Return a reason to reject an update that has all expected tensors, or None if it is valid.

        The update may also be a reply to a message of :meth:`prepare`.
        """
        return None

    def weight(self, update: Reply) -> float:
        """Return the weight of an update in the averages: its number of examples."""
        return update.examples

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the running averages of a round, by tensor name."""
        return {name: WeightedMean(tensor) for name, tensor in state.model.items()}

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add a valid update to the averages, with a clone of each tensor that they keep.

        Raises:
            ValueError: an average names a tensor that the clients do not send.
        """
        for name, mean in averages.items():
            if name not in update.tensors:
                raise ValueError(
                    f"{type(self).__name__}.averages: no update has {name!r}; broadcast must expect it, and"
                    " update must return it"
                )
            mean.add(update.tensors[name], self.weight(update))

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Replace tensors of the state by the averages of a round."""
        for name, mean in averages.items():
            state.tensors[name] = mean.result()

    def end_round(self, state: State, turn: Turn, server: Teacher | None) -> None:
        """Finish a round, with training or measurement on the images of the server if it has some."""

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Return columns for a client's line of metrics."""
        return {}

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """Use the metrics of an iteration's last round, and return True to end the run."""
        return False

    def client_tensors(self, state: State, client: str) -> dict[str, torch.Tensor]:
        """Return the tensors of one client in the saved model, besides the private tensors of the network."""
        return {}

    def private_mean(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return private tensors for clients without a state, and to measure the global model.

        Only tensors in ``private_predicts`` are used; :meth:`client_state` makes the missing ones. The
        averages private tensors of the network.

        Args:
            states: private states of the clients that have trained, by name.
        """
        return {}

    # --- the client's half ---------------------------------------------------------------------------------

    def client_state(self, client: str) -> dict[str, torch.Tensor]:
        """Return the initial private tensors of a client.

        The client finds them in ``work.private``. Training and replies may add more. A tensor of the message
        must come back with the same shape and dtype.
        """
        return {}

    def epoch(self, work: Work) -> Iterator[torch.Tensor]:
        """Yield the batches of one epoch: positions of training images, ``[b]`` each.

        All epochs of a round are drawn before its first step, so that draws of a step do not change the
        order. A last batch of one image is skipped if there are others, because batch norm cannot normalize
        it.
        """
        order = torch.randperm(work.examples)
        batches = order.split(work.training.batch_size)
        yield from (batch for batch in batches if len(batch) > 1 or len(batches) == 1)

    def before_round(self, work: Work) -> None:
        """Prepare the training of the loaded network and of the tensors in ``work.trained``."""

    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the tensors that reply to a message of :meth:`prepare`."""
        raise NotImplementedError(f"{type(self).__name__} asks its clients, but has no method 'reply'")

    def weight_decay(self, work: Work) -> float:
        """Return the weight decay of the optimizer."""
        return work.training.weight_decay

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Write the gradient ``[P]`` of loss terms that depend on the parameters only.

        The gradient of the batch is added to it. Return False without such terms.
        """
        return False

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch, a scalar in nats: the cross-entropy with the labels."""
        return work.cross_entropy(work.logits(batch.images), batch.labels)

    def before_step(self, work: Work, gradient: torch.Tensor) -> None:
        """Change the complete gradient ``[P]`` of a step in place, before the optimizer uses it."""

    def after_batch(self, work: Work, batch: Batch) -> None:
        """Act after a step of the optimizer."""

    def after_round(self, work: Work) -> None:
        """Restore what :meth:`before_round` changed in the network, also after an error."""

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the tensors that :meth:`broadcast` expects, by default the model without private tensors."""
        return work.model()

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """Predict images ``[B, C, H, W]``, normalized, with the uncertainty that the run measures."""
        return of_network(work.net, images, work.passes, work.amp)

    def measure(self, work: Work, extras: list[dict[str, torch.Tensor]], last: bool) -> Record:
        """Return metrics of the test split from each member's ``extra``, ``last`` in an iteration or not."""
        return {}

    def findings(self, history: History) -> Findings | None:
        """Return a section of the report, made from the records of the arm, or None for no section.

        ``self.context`` is not available here.
        """
        return None

    # --- the trained model ---------------------------------------------------------------------------------

    def infer(
        self, net: nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the logits ``[B, classes]`` of a saved model with dropout off.

        ``tensors`` are the client's :meth:`client_tensors` and the tensors named in ``private_predicts``.
        """
        logits: torch.Tensor = net(images)
        return logits

    def misfit(
        self, net: nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the misfit ``[B]`` of a client's ``tensors`` (:meth:`infer`) to ``images [B, C, H, W]``.

        A saved model predicts for a new client with the tensors of the lowest misfit, unless it is None.
        """
        return None


# --- the registry -----------------------------------------------------------------------------------------


def probe(count: int, federation: Federation, net: nn.Module) -> torch.Tensor:
    """Return ``count`` inputs of zeros for a network that is checked."""
    zeros = blank(count, federation.shape, federation.inputs).to(next(net.parameters()).device)
    return zeros if federation.inputs.kind == "tokens" else zeros.float()


class _Algorithms(Registry[type[Algorithm]]):
    def add(self, name: str, entry: type[Algorithm]) -> None:
        """Register an algorithm, also a class that is defined again, as in a notebook."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"register({name!r}): expected a name")
        if not (isinstance(entry, type) and issubclass(entry, Algorithm)):
            raise TypeError(f"register({name!r}): expected a subclass of uefl.Algorithm, got {entry!r}")
        if not entry.__module__.startswith("uefl.algorithms."):
            self._import_modules()
        known = self._entries.get(name, entry)
        if (known.__module__, known.__qualname__) != (entry.__module__, entry.__qualname__):
            raise ValueError(
                f"register({name!r}): {known.__module__}.{known.__qualname__} already has this name; choose"
                " another name"
            )
        self._entries[name] = entry


ALGORITHMS = _Algorithms("uefl.algorithms", "algorithm", "uefl.algorithms")
A = TypeVar("A", bound=type[Algorithm])


@overload
def register(name: str) -> Callable[[A], A]: ...
@overload
def register(name: str, algorithm: A) -> A: ...
def register(name: str, algorithm: A | None = None) -> A | Callable[[A], A]:
    """Register an algorithm by name, in a decorator or in a call with the class.

    Raises:
        ValueError: another class has that name.
        TypeError: not a subclass of :class:`Algorithm`, or a name that is not text.
    """
    enter: Callable[[A], A] = ALGORITHMS.decorator(name)
    return enter if algorithm is None else enter(algorithm)


def registry() -> dict[str, type[Algorithm]]:
    """Return all algorithms by name: of this package, of installed packages, and registered by hand."""
    return {name: ALGORITHMS[name] for name in ALGORITHMS}


def find(name: str, place: str = "") -> type[Algorithm]:
    """Return an algorithm by its name.

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
