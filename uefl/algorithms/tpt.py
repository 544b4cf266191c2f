"""Training in the terminal phase, after the training error is zero.

Features collapse to the means of their classes.

Source: Papyan, Han and Donoho 2020 (PNAS); in a federation, Zhang, Cao and Liu (UEFL, ICML 2025), appendix F:
dropout is off, and the phase begins when the training accuracy exceeds 99.9 %.

A reply has ``sums [C, D]`` and ``counts [C]`` of the client's training images, and ``hits []``, the number of
correct predictions. A message with the means of all clients has the reply ``spread [2]`` and ``geometry [4]``
of ``uefl.collapse``, and ``own [6]``, the metrics of the client.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from ..client.work import Work
from ..collapse import ClassSums, Collapse, class_sums, geometry, neural_collapse, spread
from ..data.federation import Federation
from ..engines.base import Expected, Message, Reply
from ..errors import UserError
from ..models.layers import check_last, linear_layers
from ..server.turn import Turn
from . import base
from .base import Algorithm, ModelSpec, Record, State, register

_BATCH = 500
_LARGEST = 1e30  # largest sum of features or measurement, so that sums of squares stay within float64


@register("tpt")
class TPT(Algorithm):
    """FedAvg without dropout that continues after the training error is almost zero.

    The features are measured at the end of each iteration.
    """

    columns: ClassVar[dict[str, str]] = {
        "train_error": "share of a client's training images with a wrong prediction, with dropout off",
        "start_accuracy": "accuracy on the test split when the terminal phase began",
        "nc1": (
            "spread within classes divided by the spread between classes (neural collapse of all clients'"
            " training images)"
        ),
        "nc2b": "difference between the angles of class means and the angles of a simplex",
        "nc3": "squared distance of the last layer and the class means",
        "nc4": "share of images with a predicted class other than the class of the nearest mean",
        "nc1_silo": "nc1, separately for each client",
    }

    server_columns = frozenset(
        {"train_error", "start_accuracy", *Collapse._fields, *(f"{name}_silo" for name in Collapse._fields)}
    )
    asks_all = True  # every client is measured at the start of an iteration

    class Parameters(base.Parameters):
        """Parameters of the terminal phase."""

        threshold: float = Field(0.999, gt=0, le=1)
        """the phase begins when the training accuracy over all clients reaches this value"""
        extra: float = Field(1.0, ge=0)
        """iterations of the phase, as a multiple of the iterations before it"""

    def check(self, federation: Federation, arm: str, net: nn.Module) -> None:
        """Refuse a network with F.dropout, or without a last linear layer, which takes the features."""
        if not linear_layers(net):
            raise UserError(
                f"arm {arm!r}: neural collapse is measured on the input of the last linear layer, and the"
                " network has no linear layer; choose another network"
            )
        super().check(federation, arm, net)
        probe = base.probe(2, federation, net)
        check_last(net.eval(), linear_layers(net)[-1], probe, arm)
        if _draws(net, probe):
            raise UserError(
                f"arm {arm!r}: the network draws random numbers in training, as F.dropout does, and this"
                " algorithm trains without dropout; use modules such as nn.Dropout, which it turns off"
            )

    def build_model(self, spec: ModelSpec) -> nn.Module:
        """Build the usual network with every dropout at 0."""
        net = super().build_model(spec)
        for module in net.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.dropout = 0.0
        return net

    # --- the server's half ---------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: nn.Module) -> State:
        """Return the state of FedAvg and the start of the phase.

        The start is the number of iterations before the phase, and the clients' accuracies when it began.
        """
        state = super().server_state(values, buffers, net)
        state.plain = {"features": linear_layers(net)[-1].in_features, "start": None, "start_accuracy": {}}
        return state

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Reject measurements that no training images have, because they enter the means over all clients."""
        found, reported = reply.tensors, self.context.reported(reply)
        if "counts" in found:
            counts, hits = found["counts"].tolist(), int(found["hits"])
            if min(counts) < 0 or sum(counts) > reported:
                return f"counts has a number below 0, or more than {reported} images together"
            if not 0 <= hits <= sum(counts):
                return f"hits is {hits} of {sum(counts)} images"
        largest = max(reply.magnitudes.get(name, 0.0) for name in ("sums", "spread", "geometry", "own"))
        return f"it measures {largest:.3g}, more than {_LARGEST:g}" if largest > _LARGEST else None

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """Measure the collapse, and end the run after ``extra`` times the iterations before the phase."""
        done, plain, p = turn.iteration + 1, state.plain, self.parameters
        hits, images = self.measured(state, records, turn)
        if plain["start"] is None and hits >= p.threshold * images:
            plain["start"] = done
            plain["start_accuracy"] = {record["client"]: record["accuracy"] for record in records}
            turn.notice(
                f"after iteration {done}, the terminal phase begins: training accuracy {hits / images:.4f}"
            )
        elif plain["start"] is None and self.rounds(done) is None:
            reached = f"training accuracy {hits / images:.4f}, the phase begins at {p.threshold:g}"
            turn.notice(f"the terminal phase was not reached: {reached}; raise rounds or max_iterations")
        for record in records:
            record.setdefault("start_accuracy", plain["start_accuracy"].get(record["client"]))
        return plain["start"] is not None and done >= (1 + p.extra) * plain["start"]

    def measured(self, state: State, records: list[Record], turn: Turn) -> tuple[int, int]:
        """Return how many training images of all clients are predicted correctly, and their total.

        The records get the metrics of the first member.
        """
        classes, features = len(self.context.classes), state.plain["features"]
        sums, counts = Expected((classes, features), torch.float64), Expected((classes,), torch.int64)
        first = self.asked(
            state, turn, {"sums": sums, "counts": counts, "hits": Expected((), torch.int64)}, {}
        )
        total = {
            name: torch.stack([reply[name] for reply in first.values()]).sum(0)
            for name in ("sums", "counts", "hits")
        }
        hits, images = int(total.pop("hits")), max(int(total["counts"].sum()), 1)
        sizes = {"spread": 2, "geometry": 4, "own": 6}
        second = self.asked(
            state, turn, {name: Expected((size,), torch.float64) for name, size in sizes.items()}, total
        )
        within, disagree = (
            torch.stack([reply["spread"] for reply in second.values()]).sum(0) / images
        ).tolist()
        nc2a, nc2a_weights, nc2b, nc3 = next(iter(second.values()))["geometry"].tolist()
        common = Collapse(within, nc2a, nc2a_weights, nc2b, nc3, disagree)._asdict()
        for record in records:
            mine = first[record["client"]]
            own = zip(
                (f"{name}_silo" for name in Collapse._fields),
                second[record["client"]]["own"].tolist(),
                strict=True,
            )
            count = max(int(mine["counts"].sum()), 1)  # a client may send counts of zero
            found = common | {"train_error": 1 - int(mine["hits"]) / count}
            found |= own if len(ClassSums(mine["sums"], mine["counts"]).present) > 1 else {}
            record.update(found | record)
        return hits, images

    def asked(
        self, state: State, turn: Turn, expects: dict[str, Expected], tensors: dict[str, torch.Tensor]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the replies of all clients, by name."""
        messages = {client: self.broadcast(state, client, turn) for client in self.context.clients}
        for message in messages.values():
            message.tensors |= tensors
            message.expects = expects
        replies = turn.need(messages, "measure its training images")
        return {
            reply.client: {name: tensor.clone() for name, tensor in reply.tensors.items()}
            for reply in replies
        }

    # --- the client's half ---------------------------------------------------------------------------------

    @torch.no_grad()
    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Measure the training images, with dropout off and the running statistics of batch norm."""
        work.net.eval()
        features, logits = _features(work)
        labels, layer = work.train.labels, linear_layers(work.net)[-1]
        mine = class_sums(features, labels, len(self.context.classes))
        sent = work.message.tensors
        if "sums" not in sent:
            return mine._asdict() | {"hits": (logits.argmax(1) == labels).sum()}
        total = ClassSums(sent["sums"], sent["counts"])
        several = len(mine.present) > 1
        own = neural_collapse(features, labels, layer.weight, layer.bias) if several else torch.zeros(6)
        around = spread(total, features, labels, layer.weight, layer.bias)
        return {
            "spread": around,
            "geometry": geometry(total, layer.weight),
            "own": torch.tensor(own, dtype=torch.float64),
        }


def _draws(net: nn.Module, images: torch.Tensor) -> bool:
    """Return True if a network draws random numbers in training."""
    before = torch.get_rng_state()
    with torch.no_grad():
        copy.deepcopy(net).cpu().train()(images.cpu())
    return not torch.equal(before, torch.get_rng_state())


def _features(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input ``[N, D]`` of the last linear layer, and logits ``[N, C]``, float32, of all images."""
    kept: list[torch.Tensor] = []
    hook = linear_layers(work.net)[-1].register_forward_pre_hook(
        lambda _, inputs: kept.append(inputs[0].float())
    )
    try:
        logits = [work.logits(work.workspace.normalize(images)) for images in work.train.images.split(_BATCH)]
    finally:
        hook.remove()
    return torch.cat(kept), torch.cat(logits)
