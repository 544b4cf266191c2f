"""What a client minimises on its sets: the batches of an epoch and the loss of one batch, an objective per class.

All are in nats. ``Transition`` is FedUL, the others are its baselines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

import uefl_kernels

from ..config import Config
from ..data.sets import SetSilo
from .client import Device

_PSEUDO_WARM_UP = 5  # rounds on the labels that the priors suggest
_PSEUDO_SURE = 0.4  # probability from which on a prediction counts as sure
_PSEUDO_MIXED = 0.3  # weight of the loss of mixed predictions
_PSEUDO_BETA = 0.75
_PROPORTION_DROPOUT = 0.2
_RAMP = 20  # epochs until the smoothness term has its full weight


class Objective:
    """Common to all: a random order of all images, cut into batches.

    Args:
        device: with the resident model.
        silo: the client's sets, on the device.
        round: rounds that have been trained before this one.
    """

    dropout: float | None = None
    """rate of every dropout of the network while training; None: as the network was made"""
    coupled_decay = False
    """``penalty`` is Adam's weight decay, not a sum of absolute values"""

    def __init__(self, device: Device, silo: SetSilo, round: int) -> None:
        self.device, self.config, self.silo, self.round = device, device.config, silo, round
        self.images = self.pick()

    def pick(self) -> torch.Tensor:
        """Positions of the images that are trained on, ``[n]`` int64."""
        return torch.arange(len(self.silo.sets))

    def epoch(self) -> Iterator[torch.Tensor]:
        """The batches of one pass, ``[b]`` positions each; a last one of a single image, which batch norm cannot take, is left out."""
        order = self.images[torch.randperm(len(self.images))].to(self.silo.images.device)
        yield from (batch for batch in order.split(self.config.batch_size) if len(batch) > 1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[b, C, H, W] normalised -> [b, K] float32."""
        logits: torch.Tensor
        with self.device.amp():
            logits, _ = self.device.net(x, None, 0.0)
        return logits.float()

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of normalised images ``x [b, C, H, W]`` at positions ``batch [b]``."""
        raise NotImplementedError


class Transition(Objective):
    """FedUL: the likelihood of the set that an image came from, through the transition from classes to sets."""

    def __init__(self, device: Device, silo: SetSilo, round: int) -> None:
        super().__init__(device, silo, round)
        self.matrix = log_transition(silo, self.config).to(device.device)
        self.marginal = self.matrix.logsumexp(0)
        legacy = self.config.loss == "legacy_double_softmax"
        self.kernel = uefl_kernels.transition_double_softmax if legacy else uefl_kernels.transition_nll

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Of the network's logits against the sets."""
        loss: torch.Tensor = self.kernel(self.logits(x), self.silo.sets[batch], self.matrix, log_marginal=self.marginal).mean()
        return loss


class Labels(Objective):
    """Cross-entropy with true labels, as labeled clients and the server have them."""

    def pick(self) -> torch.Tensor:
        """All images of the client, whichever set they are in."""
        assert self.silo.labels is not None
        return super().pick()

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Of the logits; the published code takes the softmax twice."""
        logits = self.logits(x)
        if self.config.loss == "legacy_double_softmax":
            logits = logits.softmax(1)
        assert self.silo.labels is not None
        return cross_entropy(logits, self.silo.labels[batch])


class TenthOfLabels(Labels):
    """As ``Labels``, with a tenth of the client's images, the same in every round."""

    def pick(self) -> torch.Tensor:
        """The first tenth of the images in an order of its own."""
        n = len(super().pick())
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.config.seed))
        return order[: max(2, round(n / 10))]


class PseudoLabels(Objective):
    """FedPL: first the likeliest class of each set as the label of all its images, then the network's own predictions.

    The likeliest is that of the priors that were drawn for the set, as published; of the priors in use where ``silo.drawn`` is None.
    Of the latter, sure ones (probability 0.4 or more) are labels; each is also mixed with an unsure one, in the logits.
    Where there are no unsure ones the mixed term is left out (the published code then leaves out the batch).
    """

    coupled_decay = True

    def __init__(self, device: Device, silo: SetSilo, round: int) -> None:
        super().__init__(device, silo, round)
        self.guess = (silo.priors if silo.drawn is None else silo.drawn).argmax(1)[silo.sets]
        self.beta = torch.distributions.Beta(_PSEUDO_BETA, _PSEUDO_BETA)

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with pseudo-labels."""
        logits = self.logits(x)
        if self.round < _PSEUDO_WARM_UP:
            return cross_entropy(logits, self.guess[batch])
        confidence, label = logits.detach().softmax(1).max(1)
        sure, unsure = (logits[mask] for mask in (confidence >= _PSEUDO_SURE, confidence < _PSEUDO_SURE))
        sure_label, unsure_label = label[confidence >= _PSEUDO_SURE], label[confidence < _PSEUDO_SURE]
        if len(sure) == 0:
            return 0 * logits.sum()
        loss = cross_entropy(sure, sure_label)
        pairs = min(len(sure), len(unsure))
        if pairs == 0:
            return loss
        share = float(self.beta.sample())
        mixed = share * sure[:pairs] + (1 - share) * unsure[:pairs]
        both = share * cross_entropy(mixed, sure_label[:pairs]) + (1 - share) * cross_entropy(mixed, unsure_label[:pairs])
        return loss + _PSEUDO_MIXED * both


class Proportions(Objective):
    """FedLLP: a step per set, cross-entropy between its priors and the mean of its predictions."""

    dropout = _PROPORTION_DROPOUT

    def epoch(self) -> Iterator[torch.Tensor]:
        """The sets in a random order; one of a single image, which batch norm cannot take, is left out."""
        members = [(self.silo.sets == m).nonzero().flatten() for m in range(len(self.silo.priors))]
        yield from (members[m] for m in torch.randperm(len(members)).tolist() if len(members[m]) > 1)

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Of one set."""
        offsets = torch.tensor([0, len(batch)], device=x.device)
        target = self.silo.priors[self.silo.sets[batch[:1]]].float().clamp(1e-7, 1 - 1e-7)
        return uefl_kernels.set_proportion_loss(self.logits(x), offsets, target).mean()


class SmoothProportions(Proportions):
    """FedLLP-VAT: and virtual adversarial training, whose weight grows over the first 20 epochs.

    Source: Miyato et al. 2018, "Virtual Adversarial Training"; Tsai & Lin 2020, "Learning from Label Proportions with Consistency".
    """

    def __init__(self, device: Device, silo: SetSilo, round: int) -> None:
        super().__init__(device, silo, round)
        self.step = 0 if self.config.vat_legacy_ramp else round * self.config.local_epochs * len(silo.priors)

    def epoch(self) -> Iterator[torch.Tensor]:
        """The published ramp begins anew with every epoch."""
        if self.config.vat_legacy_ramp:
            self.step = 0
        yield from super().epoch()

    def loss(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Of one set, plus the weighted smoothness of the predictions around its images."""
        progress = min(1.0, self.step / (_RAMP * len(self.silo.priors)))
        self.step += 1
        return super().loss(x, batch) + self.config.vat_weight * math.exp(-5 * (1 - progress) ** 2) * self.smoothness(x)

    def smoothness(self, x: torch.Tensor) -> torch.Tensor:
        """KL(p(x) || p(x + r)), r the direction of length ``vat_epsilon`` in which it grows fastest, by one power step.

        In float32, since the probing step is far below bfloat16's resolution; the running statistics are left as they are.
        """
        with torch.autocast(x.device.type, enabled=False), _FrozenStatistics(self.device.net):
            with torch.no_grad():
                p = self._log_probs(x).exp()
            direction = _unit(torch.randn_like(x)).requires_grad_()
            distance = _divergence(p, self._log_probs(x + self.config.vat_xi * direction))
            (slope,) = torch.autograd.grad(distance, direction)
            return _divergence(p, self._log_probs(x + self.config.vat_epsilon * _unit(slope)))

    def _log_probs(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        logits, _ = self.device.net(x, None, 0.0)
        return logits.float().log_softmax(1)


class _FrozenStatistics:
    """Batch norm normalises by the batch, but its running statistics stay as they are."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._norms = [m for m in net.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]

    def __enter__(self) -> None:
        self._hidden = [(norm.running_mean, norm.running_var) for norm in self._norms]
        for norm in self._norms:
            norm.running_mean = norm.running_var = None
            norm.track_running_stats = False

    def __exit__(self, *_: object) -> None:
        for norm, (mean, var) in zip(self._norms, self._hidden, strict=True):
            norm.running_mean, norm.running_var, norm.track_running_stats = mean, var, True


OBJECTIVES: dict[str, type[Objective]] = {
    "transition": Transition,
    "labels": Labels,
    "tenth": TenthOfLabels,
    "pseudo": PseudoLabels,
    "proportions": Proportions,
    "smooth-proportions": SmoothProportions,
}


def log_transition(silo: SetSilo, config: Config) -> torch.Tensor:
    """log of pi_m Pi[m, k] / pi_k, ``[M, K]`` float32: what turns class probabilities into those of a client's sets."""
    sizes = silo.sizes.double()
    target = silo.priors.new_tensor(config.test_prior) if config.test_prior else None
    return uefl_kernels.log_transition_matrix(silo.priors, sizes / sizes.sum(), target).float()


def _unit(d: torch.Tensor) -> torch.Tensor:
    """Each image's direction at length 1."""
    length = d.detach().flatten(1).norm(dim=1).add(1e-8)
    unit: torch.Tensor = d.detach() / length[:, None, None, None]
    return unit


def _divergence(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.kl_div(log_q, p, reduction="batchmean")
