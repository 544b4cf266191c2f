"""``ResidualVQ``: several quantizers in a row, each on the residual of the ones before.

``GroupedResidualVQ`` has one for each group of channels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .._gather import take_along
from .._numbers import as_integer
from . import _distributed
from ._codebook import Coder, set_counts
from ._losses import masked_mean
from ._recompute import runs_again
from ._shared import (
    Float32Module,
    Layout,
    as_indices,
    check_codebooks,
    count_of_each,
    counts,
    differentiable,
    directional,
    fixed,
    indices_of_each,
    no_autocast,
    numbers,
    project,
    refuse_together,
    without_padding,
)
from ._stages import Stages
from .vector_quantize import VectorQuantize

# total, indices, losses, input of each
Passed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


class ResidualQuantizer(Coder):
    """Quantizers in a row.

    Training may leave out the last ones (``quantize_dropout``).
    """

    layers: nn.ModuleList
    quantize_dropout: bool
    _part_of: str | None = None  # the class of the grouped layer that calls this one, for errors

    def __init__(
        self, num_quantizers: int, quantize_dropout: bool, cutoff_index: int, multiple_of: int
    ) -> None:
        super().__init__()
        self._num_quantizers = num_quantizers
        self.quantize_dropout = quantize_dropout and num_quantizers > 1
        self.quantize_dropout_cutoff_index = cutoff_index
        self.quantize_dropout_multiple_of = multiple_of

    num_quantizers = fixed(
        "num_quantizers", lambda layer: layer._num_quantizers, "Q, the number of quantizers."
    )

    @property
    def _title(self) -> str:
        """Return the class that errors name."""
        return self._part_of or type(self).__name__

    @property
    def quantize_dropout_cutoff_index(self) -> int:
        """Return the first quantizer behind which others may be left out."""
        return self._cutoff

    @quantize_dropout_cutoff_index.setter
    def quantize_dropout_cutoff_index(self, place: int) -> None:
        if as_integer(place) is None or not 0 <= place < self._num_quantizers:
            raise ValueError(
                f"{type(self).__name__}: quantize_dropout_cutoff_index={place!r} must be an int from 0 to"
                f" {self._num_quantizers - 1}"
            )
        self._cutoff = place

    @property
    def quantize_dropout_multiple_of(self) -> int:
        """Return the number of which the number of kept quantizers is a multiple."""
        return self._multiple

    @quantize_dropout_multiple_of.setter
    def quantize_dropout_multiple_of(self, count: int) -> None:
        (self._multiple,) = counts(type(self).__name__, quantize_dropout_multiple_of=count)

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector, the sum of log2(K)."""
        sizes: list[Any] = [layer.codebook_size for layer in self.layers]
        return sum(map(math.log2, sizes))

    def _kept(self, device: torch.device, seed: int | None) -> int:
        """Draw how many quantizers run, the same number in all processes.

        On tensors without values, all of them run.
        """
        if not (self.training and self.quantize_dropout):
            return self._num_quantizers
        if seed is not None:  # as the peer draws for this seed
            last = random.Random(seed).randrange(self._cutoff, self._num_quantizers)
        else:
            if device.type != "meta" and _distributed.rank_and_size()[1] == 1:
                device = torch.device("cpu")  # the host waits for no GPU
            drawn = _distributed.drawn_on_all(self._cutoff, self._num_quantizers, device)
            last = self._num_quantizers - 1 if drawn is None else drawn
        return min(self._num_quantizers, -(-(last + 1) // self._multiple) * self._multiple)

    def _check_n_q(self, n_q: int | torch.Tensor, examples: int, searching: bool = False) -> int:
        """Return how many quantizers run, or raise ValueError or TypeError for numbers that do not fit."""
        name = self._title
        if not isinstance(n_q, torch.Tensor):
            (kept,) = counts(name, n_q=n_q)
        else:
            least, kept = map(int, as_indices(name, n_q, name="n_q").aminmax()) if n_q.numel() else (1, 1)
            refuse_together(
                name,
                (n_q.shape != (examples,), f"n_q must have shape [{examples}], got {list(n_q.shape)}"),
                (least < 1, f"n_q holds {least}, expected at least 1"),
                (searching, "beam_size needs one n_q for all examples; give one number"),
            )
        if kept > self._num_quantizers:
            raise ValueError(f"{name}: n_q is {kept}, expected at most num_quantizers={self._num_quantizers}")
        return kept

    def _number(self, x: torch.Tensor, n_q: int | torch.Tensor | None, seed: int | None) -> int:
        """Return the number of quantizers that run: ``n_q``, or a number that is drawn."""
        return self._kept(x.device, seed) if n_q is None else self._check_n_q(n_q, x.shape[0])

    def _agreed(self, kept: int, n_q: int | torch.Tensor, x: torch.Tensor) -> tuple[int, int | torch.Tensor]:
        """Return how many quantizers run in any process, and the ``n_q`` of this process.

        Each quantizer that runs sends messages in training.
        """
        most = _distributed.largest(kept, x.device) if self.training else kept
        if most > kept and not isinstance(n_q, torch.Tensor):
            n_q = torch.full((x.shape[0],), kept, device=x.device)
        return most, n_q

    @staticmethod
    def _of_examples(
        layer: Any,
        x: torch.Tensor,
        place: int,
        n_q: int | torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """Call a layer on the examples of x that use the quantizer at ``place``.

        The others get zeros and index -1.
        """
        options = {} if mask is None else {"mask": mask}
        if not isinstance(n_q, torch.Tensor):
            return layer(x, **options)
        used = (n_q.to(x.device).long() > place).nonzero().squeeze(-1)
        options = {name: value[used] for name, value in options.items()}
        quantized, indices, *losses = layer(x[used], **options)
        filled = indices.new_full((x.shape[0], *indices.shape[1:]), -1)
        return (
            quantized.new_zeros(x.shape).index_copy(0, used, quantized),
            filled.index_copy(0, used, indices),
            *losses,
        )

    def _padded(self, indices: torch.Tensor) -> torch.Tensor:
        """Fill up indices ``[..., q]`` to ``[..., Q]`` by -1, for quantizers that are left out."""
        indices = as_indices(self._title, indices, least=-1)
        if not indices.dim() or not 1 <= indices.shape[-1] <= self._num_quantizers:
            raise ValueError(
                f"{self._title}: indices must have shape [..., 1 to {self._num_quantizers}], got"
                f" {list(indices.shape)}"
            )
        return nn.functional.pad(indices, (0, self._num_quantizers - indices.shape[-1]), value=-1)


class ResidualVQ(ResidualQuantizer):
    """Quantize x, then each residual: a vector becomes the sum of one codeword per quantizer.

    Args:
        dim: length of the vectors.
        num_quantizers: how many; may be left out when ``codebook_size`` names a size for each.
        codebook_size: K of all quantizers, or one for each.
        codebook_dim: length of the codewords; where it is not ``dim``, ``project_in`` and ``project_out`` are
            linear.
        shared_codebook: one codebook for all quantizers, updated once at the end of a step from all their
            rests.
        diveq: learn the codewords through the sum of all quantizers, moved by noise (``directional_reparam``
            of the whole).
        quantize_dropout: in training, leave out the quantizers behind a random one, so that fewer indices
            also decode. Under ``torch.distributed`` all processes leave out the same, which costs a message
            and a wait for the device. It breaks the graph of ``torch.compile``, so ``fullgraph=True`` raises
            an error.
        quantize_dropout_cutoff_index: the first quantizer behind which they may be left out.
        quantize_dropout_multiple_of: keep a multiple of this many.
        channel_last: False for ``[B, D, N]`` input (the peer fails there).
        accept_image_fmap: ``[B, D, H, W]`` input.
        implicit_neural_codebook: the codewords of a quantizer depend on the sum of those before, by an MLP
            (QINCo); they are learned. Every position has K codewords of its own then, which plain PyTorch
            compares: N x K x d in memory.
        mlp_kwargs: ``dim_hidden`` and ``depth`` of those MLPs.
        beam_size: follow this number of best sums of codewords instead of one; the k nearest of a quantizer
            need N x K in blocks of rows.
        eval_beam_size: the same outside training; ``beam_size`` by default.
        beam_score_quantizer_weights: weight of each quantizer's loss in the choice.
        quant_grad_frac: the share of a quantizer's gradient that reaches the ones before it through the rest.
        return_zeros_for_masked_padding: False returns the input at masked positions.
        project_each: ``codebook_dim`` belongs to each quantizer, which projects to it and back on its own
            (DAC). Not an argument of the peer.
        **vq_kwargs: arguments of every :class:`VectorQuantize`, with one head.

    Attributes:
        codebook_sizes: K of each quantizer.
        layers: the quantizers.
        perplexity, usage: ``[Q]``, of each quantizer, as in :class:`VectorQuantize`.
        codebooks: ``[Q, K, d]``, or a tuple of ``[K, d]`` where sizes differ.

    Raises:
        ValueError: sizes that do not fit, or options that exclude each other.
        TypeError: an unknown argument.

    Departures from the peer: outside training ``diveq`` moves nothing by noise; ``beam_size`` counts the
    codewords that were chosen. In a checkpointed region, ``beam_size`` updates the codewords once, but the
    second run searches the updated codewords.

    Source: Zeghidour et al. 2021, "SoundStream", algorithm 1.

    Equivalent to: ``vector_quantize_pytorch.ResidualVQ`` 1.32 with the same arguments, which also loads its
    state_dict; images, where that class fails, work.
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
        project_each: bool = False,
        **vq_kwargs: Any,
    ) -> None:
        sizes = _sizes_of(codebook_size, num_quantizers, shared_codebook)
        weights = _weights_of(beam_score_quantizer_weights, len(sizes))
        separate = bool(vq_kwargs.pop("separate_codebook_per_head", False))
        refuse_together(
            "ResidualVQ",
            (heads != 1, f"heads={heads} is not supported, because a residual has one head; set heads=1"),
            (separate, "separate_codebook_per_head needs several heads, but a residual has one"),
            (eval_beam_size is not None and beam_size is None, "eval_beam_size needs beam_size"),
            (
                implicit_neural_codebook and beam_size is not None,
                "implicit_neural_codebook excludes beam_size",
            ),
            (
                project_each and (shared_codebook or implicit_neural_codebook or diveq),
                "project_each excludes shared_codebook, implicit_neural_codebook and diveq",
            ),
        )
        super().__init__(
            len(sizes), quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of
        )
        self._dim, self._codebook_dim = counts(
            "ResidualVQ", dim=dim, codebook_dim=dim if codebook_dim is None else codebook_dim
        )
        numbers("ResidualVQ", None, quant_grad_frac=quant_grad_frac)
        self.channel_last, self.accept_image_fmap = channel_last, accept_image_fmap
        self.return_zeros_for_masked_padding = return_zeros_for_masked_padding
        self.quant_grad_frac = 1.0 if diveq else quant_grad_frac
        self.beam_size = beam_size
        self.eval_beam_size = beam_size if eval_beam_size is None else eval_beam_size
        self.beam_score_weights = weights
        self._shared, self._diveq, self._implicit = shared_codebook, diveq, implicit_neural_codebook
        self._project_each = project_each
        self._build(sizes, vq_kwargs, mlp_kwargs or {})

    def _build(self, sizes: Sequence[int], vq_kwargs: dict[str, Any], mlp_kwargs: Mapping[str, Any]) -> None:
        """Make the projections, the quantizers and their MLPs."""
        if self._implicit or self._diveq:
            vq_kwargs |= {"learnable_codebook": True, "ema_update": False}
        if self._diveq:
            vq_kwargs |= {"route_gradients_to_input": False, "commitment_weight": 0.0}
        if self._shared:
            vq_kwargs |= {"manual_ema_update": True, "manual_in_place_optimizer_update": True}
        inner = self.codebook_dim
        if self._project_each:
            vq_kwargs |= {"codebook_dim": inner}
            inner = self.dim
        project = inner != self.dim
        self.project_in: nn.Module = nn.Linear(self.dim, inner) if project else nn.Identity()
        self.project_out: nn.Module = nn.Linear(inner, self.dim) if project else nn.Identity()
        self.layers = nn.ModuleList(VectorQuantize(inner, size, **vq_kwargs) for size in sizes)
        self.mlps: Any = (None,) * (len(sizes) - 1)
        if self._implicit:
            options = {"l2norm_output": self._quantizers[0].use_cosine_sim, **mlp_kwargs}
            self.mlps = nn.ModuleList(ImplicitCodebook(inner, **options) for _ in sizes[1:])
        for layer in self._quantizers[1:] if self._shared else []:
            layer._codebook = self._quantizers[0]._codebook
            if layer.in_place_codebook_optimizer is not None:
                layer.in_place_codebook_optimizer = self._quantizers[0].in_place_codebook_optimizer

    # --- attributes of a built layer -----------------------------------------------------------------------

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    codebook_dim = fixed("codebook_dim", lambda layer: layer._codebook_dim, "Length of a codeword.")
    codebook_sizes = fixed(
        "codebook_sizes",
        lambda layer: tuple(layer.codebook_size for layer in layer._quantizers),
        "K of each quantizer.",
    )
    codebook_size = fixed(
        "codebook_size", lambda layer: layer._quantizers[0].codebook_size, "K of the first quantizer."
    )
    uniform_codebook_size = fixed(
        "uniform_codebook_size",
        lambda layer: len(set(layer.codebook_sizes)) == 1,
        "True if all quantizers have codebooks of one size.",
    )
    shared_codebook = fixed(
        "shared_codebook", lambda layer: layer._shared, "True if all quantizers have one codebook."
    )
    diveq = fixed(
        "diveq",
        lambda layer: layer._diveq,
        "True if the codewords are learned through the sum of all quantizers.",
    )
    implicit_neural_codebook = fixed(
        "implicit_neural_codebook",
        lambda layer: layer._implicit,
        "True if codewords depend on the sum of the earlier ones.",
    )
    project_each = fixed(
        "project_each", lambda layer: layer._project_each, "True if each quantizer projects on its own."
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if ``project_in`` and ``project_out`` are linear.",
    )
    vq_is_ema_updating = fixed(
        "vq_is_ema_updating",
        lambda layer: layer._quantizers[0].ema_update,
        "True if moving averages make the codewords.",
    )

    @property
    def layout(self) -> Layout:
        """Return the place of the channels in the input."""
        return Layout(self._title, self.dim, self.channel_last, 2 if self.accept_image_fmap else 0)

    @property
    def codebooks(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the codewords, ``[Q, K, d]``, or a tuple of ``[K, d]`` where sizes differ."""
        codebooks = tuple(layer.codebook for layer in self._quantizers)
        return torch.stack(codebooks) if self.uniform_codebook_size else codebooks

    @property
    def _quantizers(self) -> list[VectorQuantize]:
        return [layer for layer in self.layers if isinstance(layer, VectorQuantize)]

    @property
    def perplexity(self) -> torch.Tensor:
        """Return the perplexity of each quantizer in the last forward pass, ``[Q]``.

        A quantizer that was left out has 1. A shared codebook has one value, of all its quantizers.
        """
        return torch.stack([layer.perplexity for layer in self._quantizers])

    @property
    def usage(self) -> torch.Tensor:
        """Return the share of codewords of each quantizer that the last forward pass chose, ``[Q]``."""
        return torch.stack([layer.usage for layer in self._quantizers])

    # --- from indices to codewords -------------------------------------------------------------------------

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the codeword of every quantizer, ``[Q, ..., d]``.

        With ``project_each`` the codewords are projected back.

        Args:
            indices: integers of any width ``[..., q]``; with fewer than Q of them, or -1, the codeword is
                zero.
        """
        codewords: list[torch.Tensor] = []
        for layer, mlp, chosen in zip(
            self._quantizers, (None, *self.mlps), self._padded(indices).unbind(-1), strict=True
        ):
            found = (
                layer.get_output_from_indices(chosen) if self._project_each else layer._float32_codes(chosen)
            )
            if mlp is not None:
                found = mlp(found, condition=torch.stack(codewords).sum(0))
                found = found.masked_fill((chosen < 0).unsqueeze(-1), 0)
            codewords.append(found)
        return self._quantizers[0]._codebook.as_model(torch.stack(codewords))

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices.

        A position with only indices -1 is zero.
        """
        indices = as_indices(self._title, indices)
        output = project(self.project_out, self.get_codes_from_indices(indices).sum(0))
        output = output.masked_fill((indices < 0).all(-1, keepdim=True), 0)
        return self.layout.outward(output, output.dim())

    # --- forward -------------------------------------------------------------------------------------------

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
        n_q: int | torch.Tensor | None = None,
    ) -> Any:
        """Quantize x and, in training, update the codewords (not under ``freeze_codebook``).

        Args:
            x: ``[..., dim]``, ``[B, dim, N]`` for ``channel_last=False``, or ``[B, dim, H, W]`` for
                ``accept_image_fmap``; dtypes as :class:`VectorQuantize`.
            mask: bool, the shape of x without its channels; False marks padding. Not for images.
            indices: int64 ``[..., Q]``, or Q of ``[...]``: ``(quantized, loss)`` is returned then, with the
                sum of the quantizers' cross entropies (where the peer fails).
            return_all_codes: also return the codeword of every quantizer, ``[Q, ..., d]``.
            sample_codebook_temp, freeze_codebook, beam_size: override the constructor's for this call.
            rand_quantize_dropout_fixed_seed: it decides the quantizers that are left out, as in the
                peer.
            n_q: use the first quantizers only: a number for all examples, or integers ``[B]``, one for each;
                instead of ``quantize_dropout``. An example has no part in the losses and updates of the
                others. Processes may give different numbers, which costs a message and a wait in training.

        Returns:
            ``(quantized, indices, losses)``, and the codewords if requested. quantized has the shape of x,
            indices are int64 ``[..., Q]`` with -1 where masked or left out, losses are ``[Q]``.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`VectorQuantize`.
        """
        self.layout.check(x, mask)
        start = self.project_in(without_padding(self.layout.inward(x), mask))
        options = {
            "mask": mask,
            "sample_codebook_temp": sample_codebook_temp,
            "freeze_codebook": freeze_codebook,
        }
        if indices is not None:
            if isinstance(indices, (list, tuple)):
                indices = torch.stack(indices_of_each(self._title, indices, self._num_quantizers), -1)
            stacked = as_indices(self._title, indices)
            check_codebooks(self._title, stacked, self._num_quantizers)
            total, loss = self._cross_entropies(start, stacked, options)
            return self._output(x, start, total, mask), loss
        if beam_size is None:
            beam_size = self.beam_size if self.training else self.eval_beam_size
        searching = beam_size is not None and counts(self._title, beam_size=beam_size)[0] > 1
        kept = (
            self._kept(x.device, rand_quantize_dropout_fixed_seed)
            if n_q is None
            else self._check_n_q(n_q, x.shape[0], searching)
        )
        if n_q is not None and not searching:
            kept, n_q = self._agreed(kept, n_q, x)
        if isinstance(n_q, torch.Tensor):
            options["n_q"] = n_q.to(x.device)
        frozen = self._quantizers[0].freeze_codebook if freeze_codebook is None else freeze_codebook
        update_shared = self.training and self._shared and not frozen and not runs_again()
        if update_shared:
            self._quantizers[0]._clear_gradients()
        if searching and beam_size is not None:
            total, all_indices, losses, inputs = self._beam_search(start, kept, beam_size, options)
        elif (stages := self._stages(start, kept, options)) is not None:
            (total, all_indices, losses), inputs = stages.quantize(start), []
        else:
            total, all_indices, losses, inputs = self._in_turn(start, kept, options)
        if update_shared:
            self._update_shared(inputs, mask, n_q)
        if kept < self._num_quantizers:
            all_indices = self._padded(all_indices)
            losses = nn.functional.pad(losses, (0, self._num_quantizers - kept))
        if self.training and not losses.requires_grad:
            losses = differentiable(losses)
        if searching or self._shared or kept < self._num_quantizers:
            self._count(all_indices)
        result = (self._output(x, start, total, mask), all_indices, losses)
        return (*result, self.get_codes_from_indices(all_indices)) if return_all_codes else result

    def _stages(self, start: torch.Tensor, kept: int, options: dict[str, Any]) -> Stages | None:
        """Return the quantizers that are kept where one op runs them all.

        Return None where an option needs them one by one.
        """
        if (
            options["mask"] is not None
            or "n_q" in options
            or self._implicit
            or self.quant_grad_frac > 0
            or (self.training and self._shared)
        ):
            return None
        stages = Stages(self._quantizers[:kept], options["freeze_codebook"])
        return stages if stages.fit(start) else None

    def _in_turn(self, start: torch.Tensor, kept: int, options: dict[str, Any]) -> Passed:
        """Quantize the residual by each quantizer that is kept."""
        residual, total = start, torch.zeros_like(start)
        indices, losses, inputs = [], [], []
        n_q, mask = options.pop("n_q", None), options.pop("mask")
        for place, layer in enumerate(self._quantizers[:kept]):
            inputs.append(residual)
            used = _used(start, mask, n_q, place)
            quantized, chosen, loss = layer(
                residual, mask=used, codebook_transform_fn=self._transform(place, total), **options
            )
            residual = residual - self._passed(quantized)
            total = total + quantized
            indices.append(chosen)
            losses.append(loss)
        return total, torch.stack(indices, -1), torch.stack(losses), inputs

    def _beam_search(self, start: torch.Tensor, kept: int, width: int, options: dict[str, Any]) -> Passed:
        """Follow the best ``width`` sums of codewords, and update by the best one at the end."""
        if self.training and not all(layer.has_commitment_loss for layer in self._quantizers[:kept]):
            raise ValueError(
                "ResidualVQ: beam_size compares candidates by the commitment loss, so in training it needs"
                " commitment_weight above 0 and excludes diveq and directional_reparam"
            )
        mask = options["mask"]
        beams = Beams.begin(start)
        for place, layer in enumerate(self._quantizers[:kept]):
            wide = None if mask is None else mask.unsqueeze(-1).expand(beams.scores.shape)
            quantized, chosen, loss = layer(beams.residual, topk=width, **options | {"mask": wide})
            keep = width if place < kept - 1 else 1
            beams = beams.extend(
                quantized, chosen, loss, self._passed(quantized), self.beam_score_weights[place], keep
            )
        best = beams.end()
        losses = torch.stack([masked_mean(loss.unsqueeze(-1), mask) for loss in best.losses.unbind(-1)])
        inputs = list(best.inputs.unbind(-2))
        if self.training and not options["freeze_codebook"]:
            for layer, given, chosen in zip(self._quantizers, inputs, best.indices.unbind(-1), strict=False):
                layer.update_indices(given.detach(), chosen, mask=mask)
        return best.total, best.indices, losses, inputs

    def _count(self, indices: torch.Tensor) -> None:
        """Set the counts of quantizers that were left out, share a codebook, or were searched by beams."""
        codebooks = [layer._codebook for layer in self._quantizers]
        counts = [
            _counted(chosen, size)
            for chosen, size in zip(indices.unbind(-1), self.codebook_sizes, strict=True)
        ]
        if self._shared:
            codebooks, counts = codebooks[:1], [torch.stack(counts).sum(0)]
        set_counts(codebooks, [count.unsqueeze(0) for count in counts])

    def _cross_entropies(
        self, start: torch.Tensor, indices: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the codewords and the summed cross entropy of given indices ``[..., Q]``."""
        residual, total, losses = start, torch.zeros_like(start), []
        for place, (layer, chosen) in enumerate(zip(self._quantizers, indices.unbind(-1), strict=True)):
            transform = self._transform(place, total)
            quantized, loss = layer(residual, indices=chosen, codebook_transform_fn=transform, **options)
            residual, total = residual - self._passed(quantized), total + quantized
            losses.append(loss)
        return total, torch.stack(losses).sum()

    def _transform(self, place: int, total: torch.Tensor) -> Any:
        if not self._implicit or place == 0:
            return None
        return partial(cast(ImplicitCodebook, self.mlps[place - 1]).of_all, condition=total)

    def _passed(self, quantized: torch.Tensor) -> torch.Tensor:
        """Return the codeword to subtract.

        ``quant_grad_frac`` of the gradient goes through it.
        """
        passed = quantized.detach()
        return passed + self.quant_grad_frac * (quantized - passed) if self.quant_grad_frac > 0 else passed

    def _update_shared(
        self, inputs: list[torch.Tensor], mask: torch.Tensor | None, n_q: int | torch.Tensor | None
    ) -> None:
        """Update the codebook that all quantizers share, once for all of them."""
        first = self._quantizers[0]
        if first.ema_update:
            first._codebook.set_to_averages()
        first.update_in_place_optimizer()
        given = torch.stack([residual.detach() for residual in inputs], -2)
        used = [_used(residual, mask, n_q, place) for place, residual in enumerate(inputs)]
        kept = [each for each in used if each is not None]  # all of them or none
        first.expire_codes_(given, torch.stack(kept, -1) if kept else None)

    def _output(
        self, x: torch.Tensor, start: torch.Tensor, total: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Project the sum of the codewords back, and fill the padding."""
        if self._diveq and self.training:
            total = directional(start, total, 5e-3)
        output: torch.Tensor = self.project_out(total)
        if mask is not None:
            padding = (
                torch.zeros_like(output)
                if self.return_zeros_for_masked_padding
                else self.layout.inward(x).to(output.dtype)
            )
            output = torch.where(mask.unsqueeze(-1), output, padding)
        return self.layout.outward(output, x.dim())


def _sizes_of(codebook_size: int | Sequence[int], number: int | None, shared: bool) -> list[int]:
    """Return K of each quantizer."""
    same = as_integer(codebook_size)
    if number is None and same is not None:
        raise ValueError("ResidualVQ: give num_quantizers, or one codebook_size for each quantizer")
    count = 0 if number is None else counts("ResidualVQ", num_quantizers=number)[0]
    sizes = (
        [same] * count if same is not None else count_of_each("ResidualVQ", "codebook_size", codebook_size)
    )
    refuse_together(
        "ResidualVQ",
        (
            not sizes or len(sizes) != (count or len(sizes)),
            f"codebook_size {codebook_size} does not fit num_quantizers={number}; name at least one",
        ),
        (
            shared and len(set(sizes)) > 1,
            f"shared_codebook=True needs one codebook_size, got {codebook_size}",
        ),
    )
    return sizes


def _weights_of(weights: Sequence[float] | None, quantizers: int) -> list[float]:
    """Return the weight of the loss of each quantizer in the choice of a beam, 1 by default."""
    found = [1.0] * quantizers if weights is None else list(weights)
    if len(found) != quantizers:
        raise ValueError(
            f"ResidualVQ: beam_score_quantizer_weights must have {quantizers} weights, one for each"
            f" quantizer; got {len(found)}"
        )
    return found


def _used(
    x: torch.Tensor, mask: torch.Tensor | None, n_q: int | torch.Tensor | None, place: int
) -> torch.Tensor | None:
    """Return the mask of the vectors ``[..., d]`` that the quantizer at a place is to quantize.

    Return None for all.
    """
    if not isinstance(n_q, torch.Tensor):
        return mask
    used = (n_q.to(x.device).long() > place).view(-1, *[1] * (x.dim() - 2)).expand(x.shape[:-1])
    return used if mask is None else used & mask


def _counted(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each of ``size`` codewords was chosen, ``[size]``, where an index is not -1."""
    places = indices.reshape(-1) + 1
    counts = torch.zeros(size + 1, dtype=torch.int64, device=places.device)
    return counts.scatter_add(0, places, torch.ones_like(places))[1:]  # not in place, for vmap


class Beams(NamedTuple):
    """Beam search: ``j`` candidates of each position."""

    residual: torch.Tensor  # [..., j, d], the residual
    total: torch.Tensor  # [..., j, d], the sum of the codewords
    scores: torch.Tensor  # [..., j]
    indices: torch.Tensor  # [..., j, layers]
    losses: torch.Tensor  # [..., j, layers]
    inputs: torch.Tensor  # [..., j, layers, d], of each quantizer

    @classmethod
    def begin(cls, x: torch.Tensor) -> Beams:
        """Make one candidate, which is all of x ``[..., d]``."""
        lead = x.shape[:-1]
        return cls(
            x.unsqueeze(-2),
            torch.zeros_like(x).unsqueeze(-2),
            x.new_zeros(*lead, 1),
            torch.zeros(*lead, 1, 0, dtype=torch.int64, device=x.device),
            x.new_zeros(*lead, 1, 0, dtype=torch.float32),
            x.new_zeros(*lead, 1, 0, x.shape[-1]),
        )

    def extend(
        self,
        codewords: torch.Tensor,
        indices: torch.Tensor,
        losses: torch.Tensor,
        passed: torch.Tensor,
        weight: float,
        keep: int,
    ) -> Beams:
        """Extend every candidate by each of its k codewords ``[..., j, k, d]``.

        Keep the ``keep`` results with the least loss.

        ``passed`` has the codewords to subtract. ``weight`` is the weight of this layer's loss in the score.
        """
        k = indices.shape[-1]

        def times(held: torch.Tensor, dims: int) -> torch.Tensor:  # [..., j, *] -> [..., j, k, *]
            shape = list(held.unsqueeze(-1 - dims).shape)
            shape[-1 - dims] = k
            return held.unsqueeze(-1 - dims).expand(shape)

        inputs = torch.cat([self.inputs, self.residual.unsqueeze(-2)], -2)
        grown = (
            (times(self.residual, 1) - passed, 1),
            (times(self.total, 1) + codewords, 1),
            (times(self.scores, 0) - losses * weight, 0),
            (torch.cat([times(self.indices, 1), indices.unsqueeze(-1)], -1), 1),
            (torch.cat([times(self.losses, 1), losses.unsqueeze(-1)], -1), 1),
            (times(inputs, 2), 2),
        )
        flat = [held.flatten(-2 - dims, -1 - dims) for held, dims in grown]
        if flat[2].shape[-1] > keep:
            best = flat[2].topk(keep, dim=-1).indices
            flat = [_take(held, best, dims) for held, (_, dims) in zip(flat, grown, strict=True)]
        return Beams(*flat)

    def end(self) -> Beams:
        """Return the best candidate, without its dimension."""
        best = self.scores.argmax(-1, keepdim=True)
        dims = (1, 1, 0, 1, 1, 2)
        return Beams(
            *(_take(held, best, after).squeeze(-1 - after) for held, after in zip(self, dims, strict=True))
        )


def _take(held: torch.Tensor, best: torch.Tensor, dims: int) -> torch.Tensor:
    """Take the candidates ``best`` of ``held``.

    There are ``dims`` dimensions after the dimension of the candidates.
    """
    return take_along(held, best.reshape(*best.shape, *(1,) * dims), held.dim() - 1 - dims)


class ImplicitCodebook(Float32Module):
    """Map a codeword and the sum of the codewords before it to the codeword of a position.

    The map is a residual MLP (QINCo). It stays in float32, as the codewords do.

    The peer's ``MLP``. Source: Huijben et al. 2024, "Residual Quantization with Implicit Neural Codebooks".
    """

    def __init__(
        self, dim: int, dim_hidden: int | None = None, depth: int = 4, l2norm_output: bool = False
    ) -> None:
        super().__init__()
        hidden = dim if dim_hidden is None else dim_hidden
        # as the codewords where the default dtype is bfloat16
        linear = partial(nn.Linear, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        self.proj_in = linear(2 * dim, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(linear(dim, hidden), nn.SiLU(), linear(hidden, dim)) for _ in range(depth)
        )
        self.l2norm_output = l2norm_output

    def forward(self, codewords: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        """Return the codewords for stored codewords ``[..., d]`` and conditions ``[..., d]``."""
        with no_autocast(codewords.device):
            x = self.proj_in(torch.cat((condition.to(codewords.dtype), codewords), -1))
            for layer in self.layers:
                x = layer(x) + x
        return nn.functional.normalize(x, dim=-1) if self.l2norm_output else x

    def of_all(self, codewords: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        """Return the codewords ``[h, ..., K, d]`` for all stored codewords ``[h, K, d]``.

        There is one set for each condition ``[..., d]``.
        """
        codebooks, k, d = codewords.shape
        lead = condition.shape[:-1]
        codewords = codewords.reshape(codebooks, *(1,) * len(lead), k, d).expand(codebooks, *lead, k, d)
        found: torch.Tensor = self(
            codewords, condition=condition.unsqueeze(-2).expand(codebooks, *lead, k, d)
        )
        return found


class GroupedResidualVQ(Coder):
    """Cut the channels into ``groups`` equal parts, each quantized by a :class:`ResidualVQ` of its own.

    Args:
        dim: length of the vectors, a multiple of ``groups``.
        groups: how many parts.
        accept_image_fmap: ``[B, D, H, W]`` input.
        channel_last: False for ``[B, D, N]`` input.
        **kwargs: arguments of every :class:`ResidualVQ`.

    Attributes:
        rvqs: the groups' quantizers.
        codebooks: ``[groups, Q, K, d]``, or a tuple of ``[K, d]`` per group if the sizes of the quantizers
            differ.
        perplexity, usage: ``[groups, Q]``, as in :class:`ResidualVQ`.

    Raises:
        ValueError, TypeError: as :class:`ResidualVQ`, or ``dim`` is not a multiple of ``groups``.

    Source: Yang et al. 2023, "HiFi-Codec".

    Equivalent to: ``vector_quantize_pytorch.GroupedResidualVQ`` 1.32 with the same arguments, which also
        loads its state_dict.
    """

    def __init__(
        self,
        *,
        dim: int,
        groups: int = 1,
        accept_image_fmap: bool = False,
        channel_last: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        dim, groups = counts("GroupedResidualVQ", dim=dim, groups=groups)
        if dim % groups:
            raise ValueError(
                f"GroupedResidualVQ: dim={dim} cannot be cut into groups={groups}; make it a multiple"
            )
        self._dim = dim
        options = {"accept_image_fmap": accept_image_fmap, "channel_last": channel_last, **kwargs}
        self.rvqs = nn.ModuleList(ResidualVQ(dim=dim // groups, **options) for _ in range(groups))
        for rvq in self._residuals:
            rvq._part_of = "GroupedResidualVQ"

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    groups = fixed("groups", lambda layer: len(layer.rvqs), "The number of parts of the channels.")
    accept_image_fmap = fixed(
        "accept_image_fmap", lambda layer: layer.rvqs[0].accept_image_fmap, "True if images are taken."
    )
    channel_last = fixed(
        "channel_last", lambda layer: layer.rvqs[0].channel_last, "True if the channels come last."
    )

    @property
    def _residuals(self) -> list[ResidualVQ]:
        return [rvq for rvq in self.rvqs if isinstance(rvq, ResidualVQ)]

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector, over all groups."""
        return sum(rvq.bits_per_vector for rvq in self._residuals)

    @property
    def codebooks(self) -> torch.Tensor | tuple[tuple[torch.Tensor, ...], ...]:
        """Return the codewords, ``[groups, Q, K, d]``.

        If the sizes of the quantizers differ, return a tuple of ``[K, d]`` per group.
        """
        codebooks = tuple(tuple(rvq.codebooks) for rvq in self._residuals)
        return (
            torch.stack([torch.stack(group) for group in codebooks])
            if self._residuals[0].uniform_codebook_size
            else codebooks
        )

    @property
    def perplexity(self) -> torch.Tensor:
        """Return the perplexity of each quantizer in the last forward pass, ``[groups, Q]``."""
        return torch.stack([rvq.perplexity for rvq in self._residuals])

    @property
    def usage(self) -> torch.Tensor:
        """Return the share of codewords that the last forward pass chose, ``[groups, Q]``."""
        return torch.stack([rvq.usage for rvq in self._residuals])

    @property
    def split_dim(self) -> int:
        """Return the dimension of the channels."""
        return 1 if self.accept_image_fmap or not self.channel_last else -1

    def get_codes_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Return ``[groups, Q, ..., d]`` for the indices of each group, ``[groups, ..., q]``."""
        of_groups = indices_of_each("GroupedResidualVQ", indices, len(self.rvqs))
        pairs = zip(self._residuals, of_groups, strict=True)
        return torch.stack([rvq.get_codes_from_indices(chosen) for rvq, chosen in pairs])

    def get_output_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Return the quantized vectors that ``forward`` returns with these indices."""
        of_groups = indices_of_each("GroupedResidualVQ", indices, len(self.rvqs))
        pairs = zip(self._residuals, of_groups, strict=True)
        return torch.cat([rvq.get_output_from_indices(chosen) for rvq, chosen in pairs], self.split_dim)

    def forward(
        self,
        x: torch.Tensor,
        indices: Sequence[torch.Tensor] | torch.Tensor | None = None,
        return_all_codes: bool = False,
        sample_codebook_temp: float | None = None,
        freeze_codebook: bool | None = None,
        mask: torch.Tensor | None = None,
        n_q: int | torch.Tensor | None = None,
    ) -> Any:
        """Quantize x, with the arguments of :class:`ResidualVQ`.

        All groups leave out the quantizers behind the same random one.

        Returns:
            ``(quantized, indices, losses)``: indices int64 ``[groups, ..., Q]``, losses ``[groups, Q]``, and
            the codewords ``[groups, Q, ..., d]`` if requested; ``(quantized, loss)`` for given indices
            ``[groups, ..., Q]``.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`ResidualVQ`.
        """
        Layout("GroupedResidualVQ", self.dim, self.channel_last, 2 if self.accept_image_fmap else 0).check(
            x, mask
        )
        options: dict[str, Any] = {
            "mask": mask,
            "return_all_codes": return_all_codes,
            "sample_codebook_temp": sample_codebook_temp,
            "freeze_codebook": freeze_codebook,
            "n_q": n_q,
        }
        if self.training and n_q is None and self._residuals[0].quantize_dropout:
            options["rand_quantize_dropout_fixed_seed"] = _distributed.drawn_on_all(0, 10_000, x.device)
        given = (
            [None] * self.groups
            if indices is None
            else indices_of_each("GroupedResidualVQ", indices, self.groups)
        )
        groups = x.chunk(self.groups, self.split_dim if x.dim() > 2 else -1)
        found = [
            rvq(group, indices=i, **options)
            for rvq, group, i in zip(self._residuals, groups, given, strict=True)
        ]
        quantized, *others = zip(*found, strict=True)
        output = torch.cat(quantized, self.split_dim if x.dim() > 2 else -1)
        if indices is not None:
            return output, torch.stack(others[0]).sum()
        return (output, *map(torch.stack, others))
