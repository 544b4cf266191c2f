"""``BinaryMapper``: draw random bits from logits, and return them as a one-hot vector with a gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from .._checks import check_dense
from ._shared import ConstantBuffers, absent, as_indices, counts, explained, fixed, no_torchscript

NAT = math.log(2)


class BinaryMapper(ConstantBuffers):
    """Draw bits from logits ``[..., bits]`` and return the one-hot vector of the number that they form.

    Args:
        bits: number of bits; there are ``2 ** bits`` codes.
        kl_loss_threshold: the loss is zero up to this divergence from bits of probability 1/2, in nats.
        deterministic_on_eval: outside training, take the more probable bit.

    Raises:
        ValueError: bits below 1 or above 62.

    Source: Fleuret 2025, "The Free Transformer", section 3.4.

    Equivalent to: ``vector_quantize_pytorch.BinaryMapper`` 1.32 with the same arguments.
    """

    _power_two: torch.Tensor

    __prepare_scriptable__ = no_torchscript

    def __init__(
        self, bits: int = 1, kl_loss_threshold: float = NAT, deterministic_on_eval: bool = False
    ) -> None:
        super().__init__()
        (bits,) = counts("BinaryMapper", bits=bits)
        if bits > 62:
            raise ValueError(f"BinaryMapper: bits is {bits}, more than the 62 that an index can have")
        self.kl_loss_threshold, self.deterministic_on_eval = kl_loss_threshold, deterministic_on_eval
        self._bits = bits
        self._register_constants()

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        return {"_power_two": 2 ** torch.arange(self._bits, device=device)}

    zero = absent("zero")
    bits = fixed("bits", lambda layer: layer._bits, "Number of bits.")
    power_two = fixed(
        "power_two",
        lambda layer: layer._power_two,
        "Value of each bit in an index, from 1 to half of `num_codes`.",
    )
    num_codes = fixed("num_codes", lambda layer: 2**layer._bits, "Number of codes.")
    codes = fixed(
        "codes",
        lambda layer: layer._bits_of(torch.arange(layer.num_codes, device=layer._power_two.device)),
        "Bits of all codes.",
    )

    def binary_entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the entropy of the bits ``[..., bits]``, in nats, ``[...]``."""
        prob = logits.sigmoid()
        terms = prob * F.logsigmoid(logits) + (1 - prob) * F.logsigmoid(-logits)
        return terms.sum(-1).neg()

    def calc_aux_loss(self, logits: torch.Tensor, reduce_aux_kl_loss: bool = True) -> torch.Tensor:
        """Return the part of the divergence from fair bits above the threshold: a mean, or ``[...]``."""
        loss: torch.Tensor = (self.bits * NAT - self.binary_entropy(logits) - self.kl_loss_threshold).relu()
        if not reduce_aux_kl_loss:
            return loss
        return loss.mean() if loss.numel() > 0 else loss.sum()

    def log_prob(
        self,
        logits: torch.Tensor,
        *,
        indices: torch.Tensor | None = None,
        one_hot: torch.Tensor | None = None,
        sum_bits: bool = True,
    ) -> torch.Tensor:
        """Return the log probability of codes, which are given as indices or as one-hot vectors.

        The shape is ``[...]``, or ``[..., bits]`` with one value for each bit if ``sum_bits`` is False.

        Raises:
            ValueError: none or both of ``indices`` and ``one_hot``.
        """
        if (indices is None) == (one_hot is None):
            raise ValueError("BinaryMapper: give either indices or one_hot")
        if one_hot is not None:
            indices = one_hot.argmax(-1)
        drawn = self._bits_of(self._indices(indices))
        found = torch.where(drawn, F.logsigmoid(logits), F.logsigmoid(-logits))
        return found.sum(-1) if sum_bits else found

    def _indices(self, indices: Any) -> torch.Tensor:
        return as_indices("BinaryMapper", indices, least=0, size=self.num_codes)

    def _bits_of(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.unsqueeze(-1).bitwise_and(self._constant("_power_two")) != 0

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the index of a vector."""
        return float(self.bits)

    @torch.no_grad()
    def encode(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the number of the more probable bits of logits ``[..., bits]``, int64 ``[...]``."""
        return self(logits, deterministic=True, return_indices=True)[1]  # type: ignore[no-any-return]

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the one-hot vectors ``[..., 2 ** bits]`` of indices, integers of any width."""
        return F.one_hot(self._indices(indices), self.num_codes).float()

    @explained
    def forward(
        self,
        logits: torch.Tensor,
        temperature: float = 1.0,
        straight_through: bool | None = None,
        calc_aux_loss: bool | None = None,
        deterministic: bool | None = None,
        return_indices: bool = False,
        reduce_aux_kl_loss: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Draw codes.

        Args:
            logits: ``[..., bits]``.
            temperature: the logits are divided by it before the draw.
            straight_through: give the one-hot vector the gradient of the probabilities. The default is True
                in training.
            calc_aux_loss: return the loss instead of 0. The default is True in training.
            deterministic: take the more probable bits.
            return_indices: also return the numbers of the codes.
            reduce_aux_kl_loss: return the mean of the loss.

        Returns:
            ``(one_hot, loss)`` or ``(one_hot, indices, loss)``: ``[..., 2 ** bits]``, int64 ``[...]`` and a
            scalar.

        Raises:
            ValueError: a shape that does not fit, or NaN in logits on the CPU.
            TypeError: the input is not a tensor of floats.
        """
        check_dense("BinaryMapper", "logits", logits)
        if logits.dim() == 0 or logits.shape[-1] != self.bits:
            raise ValueError(
                f"BinaryMapper: logits must have shape [..., {self.bits}], got {[*logits.shape]}"
            )
        if deterministic is None:
            deterministic = self.deterministic_on_eval and not self.training
        prob = (logits / temperature).sigmoid()
        on_host = logits.device.type == "cpu" and not torch.compiler.is_compiling()
        on_host = on_host and not isinstance(prob, FakeTensor)
        readable = on_host and torch._C._functorch.peek_interpreter_stack() is None
        if readable and not deterministic and bool(prob.isnan().any()):
            raise ValueError("BinaryMapper: logits hold NaN, which is not a probability of a bit")
        drawn = (prob > 0.5).long() if deterministic else prob.bernoulli().long()
        indices = (self._constant("_power_two") * drawn).sum(-1)
        one_hot = F.one_hot(indices, self.num_codes).float()
        loss = logits.new_zeros(())
        if self.training if calc_aux_loss is None else calc_aux_loss:
            loss = self.calc_aux_loss(logits, reduce_aux_kl_loss)
        if self.training if straight_through is None else straight_through:
            ones = self.codes.to(logits.dtype).t()
            soft = (F.logsigmoid(logits) @ ones + F.logsigmoid(-logits) @ (1 - ones)).exp()
            one_hot = one_hot + (soft - soft.detach())
        return (one_hot, indices, loss) if return_indices else (one_hot, loss)
