"""One forward pass of ``VectorQuantize`` between its projections: choose, update, send gradients, measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from .. import VQOutput, vq, vq_with_sums
from .._gather import flat_indices, gather
from .._hold import hold
from . import _affine, _choose, _estimators, _losses
from ._codebook import Weight
from ._kmeans_init import by_book
from ._recompute import put

if TYPE_CHECKING:
    from .vector_quantize import VectorQuantize

Transform = Callable[[torch.Tensor], torch.Tensor]


class Call(NamedTuple):
    """What one call of ``forward`` asks for besides its input."""

    mask: torch.Tensor | None
    frozen: bool
    sampling: _choose.Sampling
    topk: int | None
    transform: Transform | None
    targets: torch.Tensor | None
    weight: Weight | None
    accumulate: bool
    ema: bool | None


class Chosen(NamedTuple):
    """What was chosen: indices ``[..., heads]`` or ``[..., k]``, their codewords, and what else came with them."""

    pool: torch.Tensor  # the codewords as the ops take them, [K, d] or [h, K, d]
    indices: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor | None
    output: VQOutput | None  # of the op, where it has chosen
    values: torch.Tensor | None  # the codewords, where the op has not
    near: torch.Tensor | None  # distances [h, n, K], where something else needs them

    def codes(self) -> torch.Tensor:
        """``[..., heads * d]`` or ``[..., k, d]``, with a gradient where codewords are learned."""
        if self.output is None:
            assert self.values is not None
            return self.values
        return gather(self.pool, self.indices).flatten(-2) if self.pool.requires_grad else self.output.quantized.detach()


class Quantized(NamedTuple):
    """``[..., heads * d]`` or ``[..., k, d]``, indices likewise, the weighted loss, its terms, and the cross entropy of targets."""

    values: torch.Tensor
    indices: torch.Tensor
    loss: torch.Tensor
    terms: _losses.LossBreakdown
    cross_entropy: torch.Tensor | None


def quantize(layer: VectorQuantize, given: torch.Tensor, call: Call) -> Quantized:
    """Quantise ``[..., heads * d]``, the channels last, and update the codewords as the call and the layer say."""
    book, mask = layer._codebook, call.mask
    rows = layer._unit(given) if book.cosine else given
    if mask is not None:  # whatever the padding holds, NaN included, nothing below sees it
        rows = rows.masked_fill(~mask.unsqueeze(-1), 0)
    if book.waiting:
        book.initialize(rows, mask)
    optimizing = layer.in_place_codebook_optimizer is not None
    updated = layer.training and not call.frozen and (optimizing or book.tracks(call.ema))  # here, or with topk by the caller
    changing = updated and call.topk is None
    before = book.memory.recall(rows) if changing else None  # not None: a checkpointed region runs this pass again
    if layer.training and book.affine is not None and before is None:
        _affine.update(book, rows, mask)
    in_place = given.new_zeros((), dtype=torch.float32)
    if changing and optimizing and before is None:
        in_place = _optimize(layer, rows, call)
    if before is not None:
        embed = put(book.embed, before)
    else:  # a copy where the codewords are updated in place: the backward pass still needs the ones that were chosen
        embed = hold(book.embed) if updated else book.embed
        if changing:
            book.memory.note(rows, embed)
    summed = changing and not optimizing  # also the second time, which must save the same tensors as the first
    chosen = _choose_codes(layer, rows, book.seen(embed), call, summed and book.tracks(call.ema))
    counts = chosen.counts if mask is None or call.topk else chosen.counts - _chosen_by_padding(chosen.indices, chosen.counts, mask)
    if before is None and call.topk is None:
        book.counts.copy_(counts.view_as(book.counts))
    if before is None and summed and chosen.sums is not None:  # the zeros of the padding have added nothing
        book.update(counts, chosen.sums, rows.detach(), mask, weight=call.weight, accumulate=call.accumulate, ema=call.ema)
    values = _route(layer, rows, chosen, call).to(given.dtype)
    loss, terms = _loss(layer, given, rows, chosen, call, in_place)
    targets = None if call.targets is None or chosen.near is None else _cross_entropy(chosen.near, _by_book(layer, call.targets, given))
    return Quantized(values, chosen.indices, loss, terms, targets)


# --- choosing ------------------------------------------------------------------------------------------------------------


def _choose_codes(layer: VectorQuantize, rows: torch.Tensor, codes: torch.Tensor, call: Call, summed: bool) -> Chosen:
    """By the op, or by what the call asks for instead."""
    sampling = call.sampling
    by_op = call.topk is None and call.transform is None and not (layer.training and (sampling.drawn or sampling.soft))
    measured = layer.training and (layer.codebook_diversity_loss_weight > 0 or layer.commitment_use_cross_entropy_loss)
    shared = codes[0] if len(codes) == 1 else codes  # what the ops take
    if not by_op:
        return _choose_otherwise(layer, rows, codes, call, summed, measured or call.targets is not None)
    near = None
    if measured or call.targets is not None:
        near = _choose.distances(by_book(_real(rows), *codes.shape[::2]), codes, layer.use_cosine_sim)
    learning = layer._learning(call.frozen)
    out, sums = _search(layer, rows, shared if learning else shared.detach(), float(learning and call.mask is None), summed)
    return Chosen(shared, out.indices, out.counts, sums, out, None, near)


def _search(
    layer: VectorQuantize, rows: torch.Tensor, codes: torch.Tensor, codebook_weight: float, summed: bool
) -> tuple[VQOutput, torch.Tensor | None]:
    call = vq_with_sums if summed else vq
    found = call(
        rows,
        codes,
        metric=layer._codebook.metric,
        codebook_weight=codebook_weight,
        commitment_weight=1.0,
        estimator="rotation" if layer.rotation_trick else "straight_through",
    )
    return found if summed else (found, None)  # type: ignore[return-value]


def _choose_otherwise(layer: VectorQuantize, rows: torch.Tensor, codes: torch.Tensor, call: Call, summed: bool, measured: bool) -> Chosen:
    cosine, k = layer.use_cosine_sim, call.topk
    sampling = call.sampling if layer.training else call.sampling._replace(drawn=False, soft=False)
    split = by_book(_real(rows), *codes.shape[::2])
    near, own = None, None
    if call.transform is not None:
        own = call.transform(codes).flatten(1, -3)
        own = F.normalize(own, dim=-1, eps=1e-6) if cosine else own
        near = _choose.own_distances(split, own, cosine)
    elif sampling.soft or measured:
        near = _choose.distances(split, codes, cosine)
    if own is None and k is not None and not sampling.drawn:
        indices = _choose.nearest(split.detach(), codes.detach(), cosine, k)
    elif near is not None:
        indices = _choose.draw(near.detach(), sampling, k)
    else:
        indices = _choose.draw_in_blocks(split, codes, cosine, sampling, k)
    where = indices if k is not None else indices.unsqueeze(-1)  # [h, n, k]
    pool = codes.unsqueeze(1).expand(-1, indices.shape[1], -1, -1) if own is None else own
    taken = torch.take_along_dim(pool, where.unsqueeze(-1), dim=2)
    if sampling.soft and sampling.temperature > 0 and near is not None:
        share = (near / sampling.temperature).softmax(-1)
        share = (share - share.detach()).unsqueeze(-2)
        taken = taken + share @ (codes.unsqueeze(1) if own is None else own)
    merged, found = _from_books(taken, rows, layer.heads), _from_books(where, rows, layer.heads)
    if k is not None:  # one head
        merged, found = merged.squeeze(-3), found.squeeze(-2)
    else:
        merged, found = merged.flatten(-3), found.squeeze(-1)
    shared = codes[0] if len(codes) == 1 else codes
    if k is None:
        counts, sums = _choose.tally(rows, shared, found)
    else:
        counts, sums = shared.new_zeros(shared.shape[:-1], dtype=torch.int64), None
    return Chosen(shared, found, counts, sums if summed else None, None, merged, near)


def _real(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _by_book(layer: VectorQuantize, indices: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Indices as the caller has them -> ``[h, n]``."""
    indices = indices.reshape(*given.shape[:-1], layer.heads)
    return by_book(indices, len(layer._codebook.embed), 1).squeeze(-1)


def _from_books(values: torch.Tensor, rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[h, n, ...]`` in the order of ``by_book`` -> ``[..., heads, ...]``."""
    lead, extra = rows.shape[:-1], values.shape[2:]
    if len(values) > 1:
        return values.view(heads, *lead, *extra).movedim(0, len(lead))
    return values.view(lead[0], heads, *lead[1:], *extra).movedim(1, len(lead))


def _chosen_by_padding(indices: torch.Tensor, counts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How many masked positions each codeword was chosen by, the shape of counts."""
    padding = (~mask).unsqueeze(-1).expand_as(indices).reshape(-1).long()
    chosen = torch.zeros(counts.numel(), dtype=torch.int64, device=indices.device)
    return chosen.scatter_add_(0, flat_indices(counts.unsqueeze(-1), indices), padding).view(counts.shape)


# --- gradients and losses ------------------------------------------------------------------------------------------------


def _route(layer: VectorQuantize, rows: torch.Tensor, chosen: Chosen, call: Call) -> torch.Tensor:
    """Choose where the gradient of quantized goes: in training to the input, else to codewords that are learned."""
    values = None
    if layer.training and rows.requires_grad and layer.route_gradients_to_input:
        x = rows if call.topk is None else rows.unsqueeze(-2)
        if layer.directional_reparam:
            values = _by_head(layer, x, chosen.codes(), lambda a, b: _estimators.directional(a, b, layer.directional_reparam_variance))
        elif chosen.output is not None:
            values = chosen.output.quantized
        elif layer.rotation_trick:
            values = _by_head(layer, x, chosen.codes(), _estimators.rotate)
        else:
            values = _estimators.straight_through(x, chosen.codes())
    values = chosen.codes() if values is None else values
    if layer.training and layer.sync_update_v > 0:
        values = values + layer.sync_update_v * (values - values.detach())
    return values


def _by_head(
    layer: VectorQuantize, x: torch.Tensor, codes: torch.Tensor, apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    heads = (-1, (layer.heads, layer.codebook_dim))
    return apply(x.unflatten(*heads), codes.unflatten(*heads)).flatten(-2)


def _loss(
    layer: VectorQuantize, given: torch.Tensor, rows: torch.Tensor, chosen: Chosen, call: Call, in_place: torch.Tensor
) -> tuple[torch.Tensor, _losses.LossBreakdown]:
    commitment = _commitment(layer, given, rows, chosen, call)
    zero = torch.zeros_like(in_place)
    diversity, orthogonal = zero, zero
    weighted = layer.training or call.topk is not None
    loss = commitment * (layer.commitment_weight if layer.commitment_weight > 0 else 1.0) if weighted else commitment
    if layer.training and layer.codebook_diversity_loss_weight > 0 and chosen.near is not None:
        kept = None if call.mask is None else _by_book(layer, call.mask.unsqueeze(-1).expand(chosen.indices.shape), given)
        diversity = _losses.diversity(chosen.near, kept, given.shape[1:-1].numel(), layer.codebook_diversity_temperature)
        loss = loss + diversity * layer.codebook_diversity_loss_weight
    if layer.training and layer.orthogonal_reg is not None:
        book = layer._codebook
        orthogonal = layer.orthogonal_reg(hold(book.embed), book.counts)
        loss = loss + orthogonal * layer.orthogonal_reg.weight
    return loss, _losses.LossBreakdown(commitment, diversity, orthogonal, in_place)


def _commitment(layer: VectorQuantize, given: torch.Tensor, rows: torch.Tensor, chosen: Chosen, call: Call) -> torch.Tensor:
    """Mean squared distance to the codewords, over what the mask lets through; zero, or NaN for NaN, where it would not be used."""
    out, mask = chosen.output, call.mask
    learning = layer._learning(call.frozen)
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    off = layer.commitment_weight == 0 or layer.directional_reparam
    if call.topk is not None and (not off or not layer.training):
        target = chosen.codes() if learning else chosen.codes().detach()
        error = (rows.to(dtype).unsqueeze(-2) - target.to(dtype)).square().mean(-1)
        return error if mask is None else error.masked_fill(~mask.unsqueeze(-1), 0)
    if not layer.training or off:
        loss = (rows.sum() if out is None else out.loss).detach()
        return torch.where(loss.isnan(), loss, 0.0).to(dtype)
    if layer.commitment_use_cross_entropy_loss:
        assert chosen.near is not None
        indices = chosen.indices if mask is None else chosen.indices.masked_fill(~mask.unsqueeze(-1), -1)
        return _cross_entropy(chosen.near, _by_book(layer, indices, given))
    if mask is None and out is not None:
        # The op adds one such mean per weight; the peer's loss is a single one whose gradient goes both ways.
        return out.loss - out.loss.detach() / 2 if learning else out.loss
    # With a mask the peer measures to the input as it was given, also where unit vectors are what is quantised.
    target = chosen.codes() if learning else chosen.codes().detach()
    return _losses.mean_square((rows if mask is None else given).to(dtype) - target.to(dtype), mask)


def _cross_entropy(near: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Of codewords ``[h, n]``, -1 for none, as if minus the distances ``[h, n, K]`` were logits; 0 without any."""
    total = F.cross_entropy(near.flatten(0, 1), indices.flatten(), ignore_index=-1, reduction="sum")
    return total / (indices >= 0).sum().clamp(min=1)


def _optimize(layer: VectorQuantize, rows: torch.Tensor, call: Call) -> torch.Tensor:
    """A step of the codewords' own optimizer towards the rows, and what else the batch does to them; returns its loss."""
    book = layer._codebook
    # In a checkpointed region, its hooks would run the whole of it again for this backward pass.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        codes = book.seen(hold(book.embed))
        chosen = _choose_codes(layer, rows.detach(), codes, call._replace(targets=None), book.tracks(call.ema))
        loss = _losses.mean_square(chosen.codes() - _real(rows.detach()), call.mask)
        loss.backward()  # type: ignore[no-untyped-call]
    counts = chosen.counts if call.mask is None else chosen.counts - _chosen_by_padding(chosen.indices, chosen.counts, call.mask)
    if chosen.sums is not None:
        book.update(counts, chosen.sums, rows.detach(), call.mask, weight=call.weight, accumulate=call.accumulate, ema=call.ema)
    if not layer.manual_in_place_optimizer_update:
        layer.update_in_place_optimizer()
    return loss.detach()
