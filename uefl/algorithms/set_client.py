"""A client with unlabeled sets, or the server with labeled images: measures the model it is sent and trains it.

Request tensors: ``values`` [P], ``statistics`` [Q]; and to go on with an optimizer, ``exp_avg`` and ``exp_avg_sq`` [P].

=============  ==========================================================================================
``evaluate``   metrics of the test split of the model as sent; without one, its entropy on the client's own images
``train``      local training with the objective named here (see ``objectives.py``)
``epochs``     passes over the images
``step``       steps that the optimizer has behind it, if it goes on
``keep``       send the optimizer's state back
=============  ==========================================================================================

with ``round`` and ``seed``, which make every random draw.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .. import metrics
from ..data.rotate import augment
from ..data.sets import SetSilo
from ..engines.base import Reply, Request
from ..seeds import derive
from .client import Device
from .objectives import OBJECTIVES, Objective

_EVALUATION_BATCH = 500


class SetClient:
    """One client on one device; callable with a request."""

    def __init__(self, silo: SetSilo, device: Device) -> None:
        self.name = silo.name
        self._device = device
        where = device.device
        labels = None if silo.labels is None else silo.labels.to(where)
        self._silo = replace(
            silo,
            images=silo.images.to(where),
            sets=silo.sets.to(where),
            priors=silo.priors.to(where),
            labels=labels,
            drawn=None if silo.drawn is None else silo.drawn.to(where),
            test=None if silo.test is None else silo.test.to(where),
        )

    def __call__(self, request: Request) -> Reply:
        """Do the work; see the module's docstring."""
        device, options = self._device, request.options
        device.flat.set(request.tensors["values"], request.tensors["statistics"])
        reply = Reply(self.name, examples=len(self._silo.sets))
        if options.get("evaluate"):
            reply.metrics = self._evaluate()
        if options.get("train"):
            with torch.random.fork_rng(devices=[device.device] if device.device.type == "cuda" else []):
                torch.manual_seed(derive(int(options["seed"]), "train", int(options["round"]), self.name))
                objective = OBJECTIVES[str(options["train"])](device, self._silo, int(options["round"]))
                reply.tensors, outcome = self._fit(objective, request)
                reply.metrics |= outcome
        return reply

    def _fit(self, objective: Objective, request: Request) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        device, config, flat = self._device, self._device.config, self._device.flat
        gradient = flat.values.grad
        assert gradient is not None
        optimizer = torch.optim.Adam([flat.values], lr=config.lr, weight_decay=config.penalty * objective.coupled_decay, fused=True)
        if "exp_avg" in request.tensors:
            moments = {name: request.tensors[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[flat.values] = {"step": torch.tensor(float(request.options["step"]), device=device.device), **moments}
        penalty = 0.0 if objective.coupled_decay else config.penalty
        total, images, steps = torch.zeros((), device=device.device), 0, 0
        device.net.train()
        with _Dropout(device.net, objective.dropout):
            for _ in range(int(request.options["epochs"])):
                for batch in objective.epoch():
                    x = device.normalize(augment(self._silo.images[batch], config.augment))
                    if penalty:  # the gradient begins as that of the penalty instead of zero
                        torch.sign(flat.values.detach(), out=gradient).mul_(penalty)
                    else:
                        gradient.zero_()
                    loss = objective.loss(x, batch)
                    loss.backward()
                    optimizer.step()
                    total += loss.detach() * len(batch)
                    images, steps = images + len(batch), steps + 1
        tensors = {"values": flat.values.detach(), "statistics": flat.statistics}
        if request.options.get("keep"):
            tensors |= {name: optimizer.state[flat.values][name] for name in ("exp_avg", "exp_avg_sq")}
        return tensors, {"train_loss": float(total) / images if images else math.nan, "steps": steps}

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float | list[int]]:
        device, test = self._device, self._silo.test
        device.net.eval()
        parts = []
        for images in (self._silo if test is None else test).images.split(_EVALUATION_BATCH):
            with device.amp():
                logits, _ = device.net(device.normalize(images), None, 0.0)
            parts.append(logits.float().softmax(1))
        probs = torch.cat(parts)
        values = {"entropy": torch.special.entr(probs.double()).sum(1).mean()}
        if test is not None:
            measures = {"accuracy": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece}
            values |= {name: measure(probs, test.labels) for name, measure in measures.items()}
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


class _Dropout:
    """Every dropout of the network but that on the logits at one rate, for as long as an objective trains; None: as they are."""

    def __init__(self, net: torch.nn.Module, rate: float | None) -> None:
        self._rate = rate
        on_logits = getattr(net.head, "logit_drop", None)
        dropouts = (m for m in net.modules() if isinstance(m, torch.nn.Dropout) and m is not on_logits)
        self._modules = list(dropouts) if rate is not None else []

    def __enter__(self) -> None:
        self._before = [m.p for m in self._modules]
        for m in self._modules:
            assert self._rate is not None
            m.p = self._rate

    def __exit__(self, *_: object) -> None:
        for m, p in zip(self._modules, self._before, strict=True):
            m.p = p
