"""Differential privacy of whole clients.

Updates are clipped to a norm, noise is added, and an accountant computes the privacy spent.

``central``: the server adds the noise to the sum of a round. A reader of all models, except the server,
learns little about whether a client took part. Each client takes part with a fixed probability. The run's key
determines the draw. The sum is divided by the expected number of participants. So only the noisy sum depends
on the participants.

``local``: each client adds the noise to its own update before it sends it, so the server, too, learns little
about the client's data.

Noise depends on the key, the place in the run and the hidden numbers. The same updates get the same noise;
other updates get independent noise.

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", algorithm 1 with
flat clipping and the estimator of fixed denominators; Mironov, Talwar, Zhang 2019, "Renyi Differential
Privacy of the Sampled Gaussian Mechanism".
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri

from .aggregation import WeightedMean
from .checkpoint import replaced
from .errors import UserError
from .paths import read_bytes

if TYPE_CHECKING:
    from .algorithms.base import Algorithm, State
    from .client.workspace import Workspace
    from .config import Config, RunSection
    from .data.federation import Federation
    from .engines.base import Reply
    from .server.participants import Participants

KEY = "noise.key"
"""file of a run folder; it exists until the run has finished"""
_ORDERS = [
    *(1 + x / 100 for x in (1, 2, 5)),
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(80, 96, 128, 192, 256, 512),
]
_HIDES = {
    "central": "the participation of one client, from readers of the models, but not from the server",
    "local": "the data of one client, from all readers of its updates, also from the server",
}
_OUTSIDE = (
    "metrics.jsonl, reports, plots, the numbers of images and all measurements of clients have no noise"
)


class Privacy:
    """The mechanism of a run, made from its secret key, and the privacy that it spends."""

    def __init__(self, run: RunSection, key: bytes) -> None:
        self.run, self._key = run, key
        self.central = run.privacy == "central"
        self._recorded = 0, 0.0

    def releases(self, participants: PoissonParticipants | Participants, rounds: int) -> int:
        """Return the number of rounds or, with ``local``, the most requests to a single client."""
        if self.central or self.run.participation == 1:
            return rounds
        return max(
            Counter(name for round in range(rounds) for name in participants.of(round)).values(), default=0
        )

    def epsilon(self, releases: int) -> float:
        """Return the epsilon for ``run.delta`` after a number of releases."""
        return 0.0 if releases == 0 else _epsilon(releases * self._release, self.run.delta)

    @property
    def _release(self) -> npt.NDArray[np.float64]:
        """Return the Renyi divergence of one release at each order.

        With ``central``, one client more or less changes a sum by up to the clipping norm, if the client is
        drawn. With ``local``, a different update changes the sum by up to twice the norm, and the server
        knows the participants.
        """
        run = self.run
        return (
            _divergence(run.participation, run.noise_multiplier)
            if self.central
            else _of_update(run.noise_multiplier)
        )

    def record(self, participants: PoissonParticipants | Participants, rounds: int) -> dict[str, float]:
        """Return the privacy of the model after a number of rounds, for each line of metrics.jsonl."""
        if rounds != self._recorded[0]:
            self._recorded = rounds, self.epsilon(self.releases(participants, rounds))
        return {"epsilon": self._recorded[1]}

    def affords(self, releases: int) -> bool:
        """Return whether this number of releases stays within ``run.max_epsilon``."""
        return self.run.max_epsilon == 0 or self.epsilon(releases) <= self.run.max_epsilon

    def notice(self, rounds: int) -> str:
        """Return a line for the user about the given number of rounds, before the first one."""
        bound = f", but max_epsilon permits only {self.run.max_epsilon:g}" if not self.affords(rounds) else ""
        spend = "1 round spends" if rounds == 1 else f"{rounds} rounds spend"
        return (
            f"{self.run.privacy} privacy: {spend} epsilon {self.epsilon(rounds):.3g} at delta"
            f" {self.run.delta:g}{bound}"
        )

    def summary(self, releases: int) -> dict[str, Any]:
        """Return, for summary.json, the guarantee after the releases of all arms together, and its limits."""
        keys = {
            key: getattr(self.run, key)
            for key in ("privacy", "clip_norm", "noise_multiplier", "participation", "delta")
        }
        return {
            **keys,
            "epsilon": self.epsilon(releases),
            "hides": _HIDES[self.run.privacy],
            "outside": _OUTSIDE,
        }

    # --- the mechanism -------------------------------------------------------------------------------------

    def participants(self, clients: tuple[str, ...], arm: str) -> PoissonParticipants:
        """Draw the participants of each round of an arm."""
        return PoissonParticipants(clients, self.run.participation, self._key, arm)

    def averages(self, algorithm: Algorithm, state: State) -> dict[str, Any]:
        """Return averages as :class:`uefl.aggregation.Rule` does, with noisy sums for nonempty ones.

        Raises:
            TypeError: an average that is not a plain weighted mean.
        """
        expected, found = self.run.participation * len(algorithm.context.clients), {}
        for name, mean in algorithm.averages(state).items():
            if not isinstance(mean, WeightedMean):
                raise TypeError(
                    f"the average of {name} is not a weighted mean; the algorithm must set only_the_model ="
                    " False"
                )
            if mean.old.numel():
                found[name] = NoisyMean(mean.old, expected)
        return found

    def add(self, algorithm: Algorithm, state: State, averages: dict[str, Any], update: Reply) -> None:
        """Add the update of a client without its weight, with all its tensors clipped together."""
        factor = clip_factor(
            {name: (update.tensors[name], mean.old) for name, mean in averages.items()}, self.run.clip_norm
        )
        for name, mean in averages.items():
            mean.add(update.tensors[name], factor)

    def finish(self, averages: dict[str, Any], *place: str | int) -> None:
        """Add noise to every sum of a round."""
        for name, mean in averages.items():
            mean.sum += gaussian(
                self._key, mean.sum, self.run.clip_norm * self.run.noise_multiplier, *place, name
            )

    def hidden(
        self, update: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor], *place: str | int
    ) -> dict[str, torch.Tensor]:
        """Return an update as a client sends it with ``local``: its clipped change, with noise."""
        factor = clip_factor({name: (x, sent[name]) for name, x in update.items()}, self.run.clip_norm)
        made = {}
        for name, x in update.items():
            change = (
                factor * (x.double() - sent[name].double())
                if factor > 0
                else torch.zeros_like(x, dtype=torch.float64)
            )
            noise = gaussian(self._key, change, self.run.clip_norm * self.run.noise_multiplier, *place, name)
            made[name] = (sent[name].double() + change + noise).to(x.dtype)
        return made


class NoisyMean:
    """old + (sum of clipped changes + noise) / the expected number of clients, all in float64."""

    def __init__(self, old: torch.Tensor, expected: float) -> None:
        self.old, self._expected = old, expected
        self.sum = torch.zeros_like(old, dtype=torch.float64)

    def add(self, x: torch.Tensor, weight: float) -> None:
        """Add the change of a client, times a factor that clips it."""
        self.sum.add_(x.double() - self.old.double(), alpha=weight)

    def result(self) -> torch.Tensor:
        """Return the new tensor, float32."""
        return (self.old.double() + self.sum / self._expected).float()


class PoissonParticipants:
    """Draw each participant of an arm with the probability ``share``, from the key of a run."""

    def __init__(self, clients: tuple[str, ...], share: float, key: bytes, arm: str) -> None:
        self._clients, self._share, self._key, self._arm = clients, share, key, arm

    def of(self, round: int) -> tuple[str, ...]:
        """Return the names that are drawn for a round, sorted and possibly none."""
        draws = uniform(self._key, b"", len(self._clients), "participants", self._arm, round)
        return tuple(name for name, draw in zip(self._clients, draws, strict=True) if draw < self._share)


def spent_by(updates: Mapping[float, int], delta: float) -> float:
    """Return the epsilon of a client over all its runs, from its noisy updates by ``noise_multiplier``."""
    divergences = [count * _of_update(noise) for noise, count in updates.items() if count]
    return _epsilon(np.sum(divergences, axis=0), delta) if divergences else 0.0


def _epsilon(divergence: npt.NDArray[np.float64], delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    with warnings.catch_warnings():
        # the best order is at an end of the list: the bound holds, but a tighter one may exist
        warnings.simplefilter("ignore")
        spent, _ = get_privacy_spent(orders=_ORDERS, rdp=divergence, delta=delta)
    return max(float(spent), 0.0)


def _of_update(noise: float) -> npt.NDArray[np.float64]:
    """Return the Renyi divergence of an update with ``local``, which may differ by twice the norm."""
    return _divergence(1.0, noise / 2)


@lru_cache(maxsize=16)
def _divergence(sampled: float, noise: float) -> npt.NDArray[np.float64]:
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(
        compute_rdp(q=sampled, noise_multiplier=noise, steps=1, orders=_ORDERS), dtype=np.float64
    )


def clip_factor(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], norm: float) -> float:
    """Return the factor, at most 1, that clips all changes ``new - old`` together to the length ``norm``.

    The L2 norm is over all tensors, in float64. If it is not finite, no part may be used: the factor is 0.
    """
    square = sum(float((new.double() - old.double()).square().sum()) for new, old in pairs.values())
    if not math.isfinite(square):
        return 0.0
    return min(1.0, norm / math.sqrt(square)) if square > 0 else 1.0


def gaussian(key: bytes, hides: torch.Tensor, deviation: float, *place: str | int) -> torch.Tensor:
    """Return normal noise in the shape of a float64 tensor, derived from the key and that tensor.

    Another deviation has an independent draw, because two scales of one draw would reveal the tensor.
    """
    values = np.ascontiguousarray(hides.detach().cpu().numpy())
    drawn = ndtri(
        uniform(key, values.tobytes(), values.size, "noise", float(deviation).hex(), *place)
    ).reshape(values.shape)
    return torch.from_numpy(deviation * drawn).to(hides.device)


def uniform(key: bytes, data: bytes, count: int, *place: str | int) -> npt.NDArray[np.float64]:
    """Return numbers ``[count]`` in (0, 1), from SHAKE-256 of the key, the place and the data.

    The numbers are multiples of 2^-53. Without the key, they cannot be distinguished from random numbers.
    """
    inputs = ("/".join(map(str, place)).encode(), data)
    stream = hashlib.shake_256(key + b"".join(hashlib.sha256(value).digest() for value in inputs)).digest(
        8 * count
    )
    bits = np.frombuffer(stream, dtype="<u8") >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


# --- the run ----------------------------------------------------------------------------------------------


def key_of(out: Path, begun: bool) -> bytes:
    """Return the secret key of a run, which the system draws at its begin for the owner only.

    Raises:
        UserError: the run has begun and its key is gone.
    """
    path = out / KEY
    if path.exists():
        return read_bytes(path)
    if begun:
        raise UserError(
            f"{path} is missing; it has the secret key of this run's noise. Restore it, or start again in"
            " another folder"
        )
    draw_key(path)
    return read_bytes(path)


def draw_key(path: Path) -> None:
    """Draw a secret key of 32 bytes into a file that only its owner may read."""
    with replaced(path) as new, os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))


def check(cfg: Config, arm: str, workspace: Workspace) -> None:
    """Refuse a run without a guarantee of privacy, before anything is written.

    Raises:
        UserError: the library is missing; the algorithm or the network sends tensors without noise; the
            budget is too small for a round.
    """
    run = cfg.run
    if run.privacy == "none":
        return
    check_accountant(f"key 'run.privacy': {run.privacy!r}")
    algorithm: Algorithm = workspace.algorithm
    name = cfg.arms[arm].algorithm
    if not algorithm.only_the_model:
        raise UserError(
            f"key 'run.privacy': arm {arm!r} ({name}) uses more from its clients than the mean of a model,"
            " so noise on the model would hide only a part; omit the arm"
        )
    if workspace.private_names():
        raise UserError(
            f"key 'run.privacy': arm {arm!r} ({name}) keeps private layers at its clients, and sends the"
            " mean of these layers without noise to measure other clients; omit the arm"
        )
    if workspace.flat.buffers.numel():
        raise UserError(
            f"key 'run.privacy': the network of arm {arm!r} has running statistics of batch norm, which noise"
            " makes useless; set norm_layer = 'group', or give a network without them"
        )
    privacy = Privacy(run, b"")
    if not privacy.affords(1):
        raise UserError(
            f"key 'run.max_epsilon': one round spends {privacy.epsilon(1):.3g}; raise max_epsilon above"
            " this, or raise noise_multiplier"
        )


def check_accountant(what: str) -> None:
    """Refuse ``what`` if the accountant is not installed.

    Raises:
        UserError: opacus is not installed.
    """
    try:
        import opacus  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs an accountant; in a clone of uefl: pip install '.[privacy]'") from None


def without_statistics(cfg: Config, federation: Federation) -> Federation:
    """Return a federation without the mean and deviation of pixels if noise does not protect them."""
    if cfg.run.privacy == "none":
        return federation
    channels = len(federation.mean)
    return replace(federation, mean=(0.0,) * channels, std=(1.0,) * channels)
