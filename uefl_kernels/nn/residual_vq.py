"""``ResidualVQ``: several quantisers in a row, each on what the ones before left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, cast

import torch
from torch import nn

from .._numbers import as_integer
from . import _beam
from ._arguments import counts, refuse_together
from ._dropped import QuantizeDropout
from ._estimators import directional
from ._implicit import ImplicitCodebook
from ._layout import Layout
from ._losses import masked_mean
from .vector_quantize import VectorQuantize


class ResidualVQ(nn.Module):
    """Quantise x, then the rest, then the rest of that: a vector becomes one codeword per quantiser, and their sum.

    Args:
        dim: length of the vectors.
        num_quantizers: how many; may be left out when ``codebook_size`` names a size for each.
        codebook_size: K of all quantisers, or one for each.
        codebook_dim: length of the codewords; where it is not ``dim``, ``project_in`` and ``project_out`` are linear.
        shared_codebook: one codebook for all quantisers, updated once at the end of a step from all their rests.
        diveq: learn the codewords through the sum of all quantisers, moved by noise (``directional_reparam`` of the whole).
        quantize_dropout: in training, leave out the quantisers behind a random one, so that fewer indices also decode. Under
            ``torch.distributed`` all processes leave out the same, which costs a message and a wait for the device.
        quantize_dropout_cutoff_index: the first quantiser behind which they may be left out.
        quantize_dropout_multiple_of: keep a multiple of this many.
        channel_last: False for ``[B, D, N]`` input (the peer fails there).
        accept_image_fmap: ``[B, D, H, W]`` input.
        implicit_neural_codebook: the codewords of a quantiser depend on the sum of those before, by an MLP (QINCo); they are learned.
            Every position has K codewords of its own then, which plain PyTorch compares: N x K x d in memory.
        mlp_kwargs: ``dim_hidden`` and ``depth`` of those MLPs.
        beam_size: follow so many best sums of codewords instead of one; the k nearest of a quantiser need N x K in blocks of rows.
        eval_beam_size: outside training; as ``beam_size`` by default.
        beam_score_quantizer_weights: of each quantiser's loss in the choice.
        quant_grad_frac: the share of a quantiser's gradient that reaches the ones before it through the rest.
        return_zeros_for_masked_padding: False returns the input at masked positions.
        **vq_kwargs: of every :class:`VectorQuantize`, with one head.

    Attributes:
        codebook_sizes: K of each quantiser.
        layers: the quantisers, whose ``perplexity`` and ``usage`` say how each of them is used.
        codebooks: ``[Q, K, d]``, or a tuple of ``[K, d]`` where sizes differ.

    Raises:
        ValueError: sizes that do not fit, or options that exclude each other.
        TypeError: an argument that nobody knows.

    Departures from the peer: outside training ``diveq`` moves nothing by noise; ``beam_size`` counts the codewords that were chosen.
    In a checkpointed region ``beam_size`` updates the codewords once, but the second time searches the updated ones.

    Source: Zeghidour et al. 2021, "SoundStream", algorithm 1.

    Equivalent to: ``vector_quantize_pytorch.ResidualVQ`` 1.32 with the same arguments, which also loads its state_dict; images, where
    that class fails, work.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_quantizers: int | None = None,
        codebook_size: int | Sequence[int],
        codebook_dim: int | None = None,
        shared_codebook: bool = False,
        diveq: bool = False,
        heads: int = 1,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        channel_last: bool = True,
        accept_image_fmap: bool = False,
        implicit_neural_codebook: bool = False,
        mlp_kwargs: Mapping[str, Any] | None = None,
        beam_size: int | None = None,
        eval_beam_size: int | None = None,
        beam_score_quantizer_weights: Sequence[float] | None = None,
        quant_grad_frac: float = 0.0,
        return_zeros_for_masked_padding: bool = True,
        **vq_kwargs: Any,
    ) -> None:
        super().__init__()
        same = as_integer(codebook_size)
        if num_quantizers is None and same is not None:
            raise ValueError("ResidualVQ: name num_quantizers, or one codebook_size for each of them")
        count = 0 if num_quantizers is None else index(num_quantizers)
        sizes = [same] * count if same is not None else list(cast("Sequence[int]", codebook_size))
        if not sizes or len(sizes) != (count or len(sizes)):
            raise ValueError(f"ResidualVQ: codebook_size {codebook_size} does not fit num_quantizers={num_quantizers}; name at least one")
        weights = [1.0] * len(sizes) if beam_score_quantizer_weights is None else list(beam_score_quantizer_weights)
        refuse_together(
            "ResidualVQ",
            (heads != 1, f"heads={heads} is not supported, a residual has one; heads=1"),
            (bool(vq_kwargs.pop("separate_codebook_per_head", False)), "separate_codebook_per_head needs heads, and a residual has one"),
            (shared_codebook and len(set(sizes)) > 1, f"shared_codebook=True needs one codebook_size, got {codebook_size}"),
            (eval_beam_size is not None and beam_size is None, "eval_beam_size needs beam_size"),
            (
                len(weights) != len(sizes),
                f"beam_score_quantizer_weights must name {len(sizes)}, one for each quantiser, got {len(weights)}",
            ),
            (implicit_neural_codebook and beam_size is not None, "implicit_neural_codebook excludes beam_size"),
        )
        if implicit_neural_codebook or diveq:
            vq_kwargs |= {"learnable_codebook": True, "ema_update": False}
        if diveq:
            vq_kwargs |= {"route_gradients_to_input": False, "commitment_weight": 0.0}
        if shared_codebook:
            vq_kwargs |= {"manual_ema_update": True, "manual_in_place_optimizer_update": True}
        codebook_dim = dim if codebook_dim is None else codebook_dim
        self.dim, self.num_quantizers = dim, len(sizes)
        self.codebook_dim, self.codebook_sizes = codebook_dim, tuple(sizes)
        self.channel_last, self.accept_image_fmap = channel_last, accept_image_fmap
        self.quantize_dropout = quantize_dropout and len(sizes) > 1
        self.dropout = QuantizeDropout(len(sizes), quantize_dropout_cutoff_index, quantize_dropout_multiple_of)
        self.dropout.check("ResidualVQ")
        self.quant_grad_frac = 1.0 if diveq else quant_grad_frac
        self.shared_codebook, self.diveq = shared_codebook, diveq
        self.implicit_neural_codebook = implicit_neural_codebook
        self.beam_size, self.eval_beam_size = beam_size, beam_size if eval_beam_size is None else eval_beam_size
        self.beam_score_weights = weights
        self.return_zeros_for_masked_padding = return_zeros_for_masked_padding
        self.has_projections = codebook_dim != dim
        self.project_in: nn.Module = nn.Linear(dim, codebook_dim) if self.has_projections else nn.Identity()
        self.project_out: nn.Module = nn.Linear(codebook_dim, dim) if self.has_projections else nn.Identity()
        self.layers = nn.ModuleList(VectorQuantize(codebook_dim, size, **vq_kwargs) for size in sizes)
        if implicit_neural_codebook:
            cosine = self._quantizers[0].use_cosine_sim
            options = {"l2norm_output": cosine, **(mlp_kwargs or {})}
            self.mlps = nn.ModuleList(ImplicitCodebook(codebook_dim, **options) for _ in sizes[1:])
        for layer in self._quantizers[1:] if shared_codebook else []:
            layer._codebook = self._quantizers[0]._codebook
            if layer.in_place_codebook_optimizer is not None:
                layer.in_place_codebook_optimizer = self._quantizers[0].in_place_codebook_optimizer

    @property
    def layout(self) -> Layout:
        """Where the channels of the input are."""
        return Layout("ResidualVQ", self.dim, self.channel_last, 2 if self.accept_image_fmap else 0)

    @property
    def codebook_size(self) -> int:
        """K of the first quantiser."""
        return self.codebook_sizes[0]

    @property
    def codebooks(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See the class."""
        books = tuple(layer.codebook for layer in self._quantizers)
        return torch.stack(books) if len({len(book) for book in books}) == 1 else books

    @property
    def _quantizers(self) -> list[VectorQuantize]:
        return [layer for layer in self.layers if isinstance(layer, VectorQuantize)]

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """The codeword of every quantiser, ``[Q, ..., d]``.

        Args:
            indices: int64 ``[..., q]``; with fewer than Q of them, or -1, the codeword is zero.
        """
        if not 1 <= indices.shape[-1] <= self.num_quantizers:
            raise ValueError(f"ResidualVQ: indices must have shape [..., 1 to {self.num_quantizers}], got {list(indices.shape)}")
        missing = self.num_quantizers - indices.shape[-1]
        indices = nn.functional.pad(indices, (0, missing), value=-1)
        codes: list[torch.Tensor] = []
        for place, (layer, chosen) in enumerate(zip(self._quantizers, indices.unbind(-1), strict=True)):
            found = layer.get_codes_from_indices(chosen)
            if self.implicit_neural_codebook and place > 0:
                found = self.mlps[place - 1](found, condition=torch.stack(codes).sum(0))
                found = found.masked_fill((chosen < 0).unsqueeze(-1), 0)
            codes.append(found)
        return torch.stack(codes)

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """What ``forward`` returns as quantized for these indices; a position whose indices are all -1 is zero."""
        output: torch.Tensor = self.project_out(self.get_codes_from_indices(indices).sum(0))
        output = output.masked_fill((indices < 0).all(-1, keepdim=True), 0)
        return self.layout.outward(output, output.dim())

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        indices: torch.Tensor | Sequence[torch.Tensor] | None = None,
        return_all_codes: bool = False,
        sample_codebook_temp: float | None = None,
        freeze_codebook: bool | None = None,
        beam_size: int | None = None,
        rand_quantize_dropout_fixed_seed: int | None = None,
    ) -> Any:
        """Quantise x and, in training, update the codewords (not under ``freeze_codebook``).

        Args:
            x: ``[..., dim]``, ``[B, dim, N]`` for ``channel_last=False``, or ``[B, dim, H, W]`` for ``accept_image_fmap``; dtypes as
                :class:`VectorQuantize`.
            mask: bool, the shape of x less its channels; False marks padding. Not for images.
            indices: int64 ``[..., Q]``, or Q of ``[...]``: ``(quantized, loss)`` is returned then, with the sum of the quantisers' cross
                entropies (where the peer fails).
            return_all_codes: also return the codeword of every quantiser, ``[Q, ..., d]``.
            sample_codebook_temp, freeze_codebook, beam_size: override the constructor's for this call.
            rand_quantize_dropout_fixed_seed: which quantisers are left out then depends on it alone, as in the peer.

        Returns:
            ``(quantized, indices, losses)``, and the codes when asked. quantized has the shape of x, indices are int64 ``[..., Q]``
            with -1 where masked or left out, losses are ``[Q]``.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`VectorQuantize`.
        """
        self.layout.check(x, mask)
        if beam_size is None:
            beam_size = self.beam_size if self.training else self.eval_beam_size
        start = self.project_in(self.layout.inward(x))
        kept = self.num_quantizers
        if self.training and self.quantize_dropout and indices is None:
            kept = self.dropout.kept(x.device, rand_quantize_dropout_fixed_seed)
        options = {"sample_codebook_temp": sample_codebook_temp, "freeze_codebook": freeze_codebook}
        if indices is not None:
            stacked = indices if isinstance(indices, torch.Tensor) else torch.stack(list(indices), -1)
            return self._cross_entropies(x, start, stacked, mask, options)
        if beam_size is not None and counts("ResidualVQ", beam_size=beam_size)[0] > 1:
            total, all_indices, losses, inputs = self._beam_search(start, mask, kept, beam_size, options)
        else:
            total, all_indices, losses, inputs = self._in_turn(start, mask, kept, options)
        if self.training and self.shared_codebook:
            self._update_shared(inputs)
        left_out = self.num_quantizers - kept
        all_indices = nn.functional.pad(all_indices, (0, left_out), value=-1)
        losses = nn.functional.pad(losses, (0, left_out))
        result = (self._output(x, start, total, mask), all_indices, losses)
        return (*result, self.get_codes_from_indices(all_indices)) if return_all_codes else result

    def _in_turn(
        self, start: torch.Tensor, mask: torch.Tensor | None, kept: int, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        residual, total = start, torch.zeros_like(start)
        indices, losses, inputs = [], [], []
        for place, layer in enumerate(self._quantizers[:kept]):
            inputs.append(residual)
            quantized, chosen, loss = layer(residual, mask=mask, codebook_transform_fn=self._transform(place, total), **options)
            residual = residual - self._passed(quantized)
            total = total + quantized
            indices.append(chosen)
            losses.append(loss)
        return total, torch.stack(indices, -1), torch.stack(losses), inputs

    def _beam_search(
        self, start: torch.Tensor, mask: torch.Tensor | None, kept: int, width: int, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        beams = _beam.begin(start)
        for place, layer in enumerate(self._quantizers[:kept]):
            wide = None if mask is None else mask.unsqueeze(-1).expand(beams.scores.shape)
            quantized, chosen, loss = layer(beams.residual, mask=wide, topk=width, **options)
            keep = width if place < kept - 1 else 1
            beams = _beam.extend(beams, quantized, chosen, loss, self._passed(quantized), self.beam_score_weights[place], keep)
        best = _beam.end(beams)
        losses = torch.stack([masked_mean(loss.unsqueeze(-1), mask) for loss in best.losses.unbind(-1)])
        inputs = list(best.inputs.unbind(-2))
        if self.training and not options["freeze_codebook"]:
            for layer, given, chosen in zip(self._quantizers, inputs, best.indices.unbind(-1), strict=False):
                layer.update_indices(given.detach(), chosen, mask=mask)
        return best.total, best.indices, losses, inputs

    def _cross_entropies(
        self, x: torch.Tensor, start: torch.Tensor, indices: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual, total, losses = start, torch.zeros_like(start), []
        for place, (layer, chosen) in enumerate(zip(self._quantizers, indices.unbind(-1), strict=True)):
            transform = self._transform(place, total)
            quantized, loss = layer(residual, indices=chosen, mask=mask, codebook_transform_fn=transform, **options)
            residual, total = residual - self._passed(quantized), total + quantized
            losses.append(loss)
        return self._output(x, start, total, mask), torch.stack(losses).sum()

    def _transform(self, place: int, total: torch.Tensor) -> Any:
        if not self.implicit_neural_codebook or place == 0:
            return None
        return partial(cast(ImplicitCodebook, self.mlps[place - 1]).of_all, condition=total)

    def _passed(self, quantized: torch.Tensor) -> torch.Tensor:
        """What is subtracted: ``quant_grad_frac`` of the gradient goes through it."""
        passed = quantized.detach()
        return passed + self.quant_grad_frac * (quantized - passed) if self.quant_grad_frac > 0 else passed

    def _update_shared(self, inputs: list[torch.Tensor]) -> None:
        first = self._quantizers[0]
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a checkpointed region runs again
        if first.ema_update:
            first._codebook.update_ema()
        first.update_in_place_optimizer()
        first.expire_codes_(torch.stack([given.detach() for given in inputs], -2))

    def _output(self, x: torch.Tensor, start: torch.Tensor, total: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.diveq and self.training:
            total = directional(start, total, 5e-3)
        output: torch.Tensor = self.project_out(total)
        if mask is not None:
            padding = torch.zeros_like(output) if self.return_zeros_for_masked_padding else self.layout.inward(x).to(output.dtype)
            output = torch.where(mask.unsqueeze(-1), output, padding)
        return self.layout.outward(output, x.dim())
