"""A client's turn: measure the model, then reply to the algorithm or train.

Options of a message, in the order of execution:

=================  ==========================================================================================
``evaluate``       measure the model as sent: metrics of the test split, entropy of the holdout split
``train``          ``before_round`` of the algorithm, the training loop, and the expected update
``personalized``   with ``train``: measure the model after training
``ask``            instead of ``train``: the algorithm's ``reply``; the value distinguishes the asks of a run
``newcomer``       the client has never trained: measure it with the ``private_mean``, train from its own
=================  ==========================================================================================

``round`` and ``seed`` determine every random draw. ``last`` marks the last measurement of an iteration. With
``evaluate`` and a ``private_mean``, the accuracy with that state is measured too: the global model.

The messages of the members of an ensemble arrive as one (``engines.base.join``). The client measures the
members together and trains one after the other. The reply numbers their tensors.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import statistics
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from uefl_kernels import metrics

from ..data.federation import ClientData, LabeledData, SetData, Split
from ..devices import gpus_of
from ..engines.base import Message, Reply, number, split
from ..errors import UserError
from ..lazy import Lazy
from ..privacy import Privacy, uniform
from ..seeds import derive, seed_torch
from ..uncertainty import Prediction, ensemble
from . import evaluation
from .training import Outcome, fit
from .work import Work, recorded
from .workspace import Workspace

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm


_PACKAGE = __name__.partition(".")[0]
_LOGGER = logging.getLogger(_PACKAGE)
_KEPT = 1000
Tensors = dict[str, torch.Tensor]


class DataCache:
    """Read and keep the data of clients on one device.

    The data of the first 1000 clients stay in memory. With more clients, the others are read in every turn.
    """

    def __init__(self, read: Callable[[str], LabeledData | SetData], device: torch.device) -> None:
        self._read, self._device = read, device
        self._kept: dict[str, LabeledData | SetData] = {}

    def __call__(self, name: str) -> LabeledData | SetData:
        """Return one client's data, on the device."""
        found = self._kept.get(name)
        if found is None:
            found = on_device(self._read(name), self._device)
            if len(self._kept) < _KEPT:
                self._kept[name] = found
        return found


class Clients:
    """Run all clients of a run in this process, and keep their images from one arm to the next."""

    def __init__(self, clients: Iterable[ClientData], device: torch.device) -> None:
        self.key = secrets.token_bytes(32)
        """secret key of the noise of clients that add it themselves"""
        self.secrets: Mapping[str, bytes] = {}
        """the secrets of some clients by name, see :class:`Client`"""
        self._clients = {client.name: client for client in clients}
        self.data = DataCache(lambda name: self._clients[name].load(), device)

    def handlers(self, workspace: Workspace) -> Mapping[str, Client]:
        """Return the function of every client that handles its messages in one arm."""
        return Lazy(
            self._clients,
            lambda name: Client(name, partial(self.data, name), workspace, self.key, self.secrets.get(name)),
        )


@dataclass
class ModelResults:
    """The results of one model in a turn."""

    measured: dict[str, Prediction] = field(default_factory=dict)
    """predictions by split"""
    with_mean: Prediction | None = None
    """predictions of the test split with the ``private_mean``"""
    sent: Tensors = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)
    training: dict[str, float] = field(default_factory=dict)

    def copied(self, live: Collection[int]) -> ModelResults:
        """Return the results with copies of live tensors: the next member or client uses the same network.

        Args:
            live: addresses of the memory of the resident network.
        """
        sent, kept = (
            {name: t.clone() if t.untyped_storage().data_ptr() in live else t for name, t in each.items()}
            for each in (self.sent, self.kept)
        )
        return replace(self, sent=sent, kept=kept)


class Client:
    """One client in one arm.

    An instance is called with a message.

    Args:
        key: the secret that seeds the noise, if the client itself adds noise.
        secret: makes the draws that protect the client's data. None: derived from the seed of the run, so
            that an experiment can be repeated. Then this process has the images of all clients.
    """

    def __init__(
        self,
        name: str,
        data: Callable[[], LabeledData | SetData],
        workspace: Workspace,
        key: bytes,
        secret: bytes | None = None,
    ) -> None:
        self.name, self._data, self._workspace, self._key = name, data, workspace, key
        self._secret = secret or simulated(workspace.context.run.seed, name)

    def __call__(self, message: Message) -> Reply:
        """Handle a message.

        See the module's docstring.
        """
        with self.guarded():
            works = self.works(message)
            return self.reply(works, [self._part(work) for work in works])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the state of torch's generators, and log errors."""
        try:
            with torch.random.fork_rng(devices=gpus_of(self._workspace.device)):
                yield
        except Exception as error:
            self._log(error)
            raise

    def _log(self, error: Exception) -> None:
        """Log which client and method raised an error in a user's algorithm or network.

        A RuntimeError only rejects the reply and the run continues, so this is the only place that shows its
        traceback. Errors of built-in algorithms are logged at level ``DEBUG``.
        """
        algorithm = self._workspace.algorithm
        ours = (
            type(algorithm).__module__.partition(".")[0] == _PACKAGE
            and self._workspace.context.network is None
        )
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        methods = (
            f".{frame.f_code.co_name}"
            for frame in frames
            if isinstance(frame.f_locals.get("self"), type(algorithm))
        )
        place = (
            f"client {self.name}: {type(algorithm).__name__}{next(methods, '')} raised {type(error).__name__}"
        )
        level = logging.DEBUG if ours else logging.ERROR
        _LOGGER.log(level, place, exc_info=error if isinstance(error, RuntimeError) else None)

    def works(self, message: Message) -> list[Work]:
        """Return the work of each model in a message: one, or the members of an ensemble."""
        return [self._work(member) for member in split(message.to(self._workspace.device))]

    def reply(self, works: list[Work], results: list[ModelResults]) -> Reply:
        """Return the reply with the results of each model."""
        first, options = works[0], works[0].message.options
        # under local privacy the number of examples is not a weight
        local = self._workspace.context.run.privacy == "local"
        reply = Reply(self.name, examples=1 if local else first.examples)
        measured = [result.measured for result in results if result.measured]
        if measured:
            reply.metrics = dict(
                evaluation.summarized(self.algorithm(first), first, measured, bool(options.get("last")))
            )
        with_mean = [result.with_mean for result in results if result.with_mean is not None]
        if with_mean and isinstance(first.test, Split):
            reply.metrics["global_accuracy"] = float(
                metrics.accuracy(ensemble(with_mean).probs, first.test.labels)
            )
        reply.tensors, reply.private = (
            (results[0].sent, results[0].kept)
            if len(results) == 1
            else (number([result.sent for result in results]), number([result.kept for result in results]))
        )
        for key in dict.fromkeys(key for result in results for key in result.training):
            reply.training[key] = statistics.fmean(
                result.training[key] for result in results if key in result.training
            )
        return reply

    def _part(self, work: Work) -> ModelResults:
        """Measure one model and train it, or reply for it."""
        results = self.begin(work)
        if work.message.options.get("train"):
            algorithm = self.algorithm(work)
            if not algorithm.trains_clients:
                raise UserError(
                    f"{type(algorithm).__name__} trains only at the server, but the message of the server"
                    " asks the client to train"
                )
            try:
                self.prepare(work)
                outcome = fit(algorithm, work)
            finally:
                algorithm.after_round(work)
            self.finish(work, results, outcome)
        return results.copied(self._workspace.flat.storages())

    def begin(self, work: Work) -> ModelResults:
        """Measure one model, or reply for it, and load it for training."""
        algorithm, options, message = self.algorithm(work), work.message.options, work.message
        results = ModelResults()
        if options.get("evaluate"):
            if message.private_mean:
                results.with_mean = self._global(work)
            measured = self._with_private_mean(work) if options.get("newcomer") else work
            self._workspace.load(measured.message)
            self._seed(work, "evaluate")
            results.measured = evaluation.predictions(algorithm, measured)
        if not options.get("evaluate") or options.get("newcomer"):
            self._workspace.load(message)
        if not options.get("train") and options.get("ask"):
            self._seed(work, "ask", str(options["ask"]))
            results.sent = algorithm.reply(work)
            results.kept = message.private | work.private
        return results

    def prepare(self, work: Work) -> None:
        """Let the algorithm prepare the training of the loaded network, and seed the training."""
        self._seed(work, "before")
        self.algorithm(work).before_round(work)
        self._seed(work, "train")

    def finish(self, work: Work, results: ModelResults, outcome: Outcome) -> None:
        """Add the results of training.

        The network has the trained model.

        Raises:
            TypeError: the network has replaced a tensor, or a private run would keep tensors without noise.
        """
        algorithm = self.algorithm(work)
        if (name := self._workspace.flat.replaced()) is not None:
            raise TypeError(f"the network replaces its tensor {name!r}; write into it: {name}.copy_(...)")
        results.training = {"train_loss": outcome.loss, "steps": float(outcome.steps)}
        results.sent, results.kept = algorithm.update(work), work.private | self._workspace.private()
        run = self._workspace.context.run
        if run.privacy != "none" and results.kept:
            name = f"{type(algorithm).__name__}: work.private has {min(results.kept)!r}"
            raise TypeError(f"{name}, which gets no noise; the algorithm must set only_the_model = False")
        if run.privacy == "local":
            results.sent = Privacy(run, self._key).hidden(
                results.sent, work.message.tensors, self.name, work.round
            )
        work.metrics = {name: float(value) for name, value in (work.noted() | work.metrics).items()}
        results.training |= recorded(work.metrics, "work.metrics")
        if work.message.options.get("personalized") and isinstance(work.test, Split):
            self._seed(work, "personalized")
            prediction = evaluation.predict(algorithm, work, work.test.images)
            results.training["personalized_accuracy"] = float(
                metrics.accuracy(prediction.probs, work.test.labels)
            )
            results.training["personalized_entropy"] = float(prediction.entropy.mean())

    def _global(self, work: Work) -> Prediction:
        """Predict the test split with the ``private_mean``."""
        again = self._with_private_mean(work)
        self._workspace.load(again.message)
        self._seed(again, "global")
        assert isinstance(again.test, Split)
        return evaluation.predict(self.algorithm(again), again, again.test.images)

    def _with_private_mean(self, work: Work) -> Work:
        message = work.message
        return self._work(Message(message.tensors, message.options, private=message.private_mean))

    def _work(self, message: Message) -> Work:
        seed, round = int(message.options["seed"]), int(message.options["round"])
        place = ("ask", str(message.options["ask"])) if "ask" in message.options else ()
        generator = torch.Generator().manual_seed(derive(seed, "own", *place, round, self.name))
        private = {name: t for name, t in message.private.items() if not name.startswith("net.")}
        return Work(
            self.name,
            self._data(),
            self._workspace,
            message,
            seed,
            round,
            generator,
            partial(uniform, self._secret),
            private,
        )

    def algorithm(self, work: Work) -> Algorithm:
        """Return the algorithm with the seed of this member of an ensemble."""
        return self._workspace.algorithm.bound(replace(self._workspace.context, seed=work.seed))

    def _seed(self, work: Work, *purpose: str) -> None:
        seed_torch(derive(work.seed, *purpose, work.round, self.name))


def simulated(seed: int, name: str) -> bytes:
    """Return the secret of a client of an experiment, derived from the seed of the run."""
    return hashlib.sha256(f"{seed}/secret/{name}".encode()).digest()


def on_device(data: LabeledData | SetData, device: torch.device) -> LabeledData | SetData:
    """Move a client's data to a device.

    If the holdout is the test split, both stay the same object.
    """
    if isinstance(data, LabeledData):
        test = data.test.to(device)
        holdout = test if data.holdout is data.test else data.holdout.to(device)
        return LabeledData(data.train.to(device), holdout, test)
    moved: dict[str, Any] = {
        name: None if part is None else part.to(device) for name, part in vars(data).items()
    }
    return SetData(**moved)
