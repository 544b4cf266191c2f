"""The gradient of ``mc_dropout_mlp``: the masks are drawn again, pass by pass, and nothing of the forward
pass is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from . import reference

aten = torch.ops.aten
# gradient, input of the activation
_SLOPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": aten.gelu_backward,
    "relu": lambda gradient, z: aten.threshold_backward(gradient, z, 0),
    "silu": aten.silu_backward,
    "tanh": lambda gradient, z: aten.tanh_backward(gradient, z.tanh()),
}


def mc_dropout_mlp_backward(
    grad_mean: torch.Tensor,
    grad_entropy: torch.Tensor,
    grad_variance: torch.Tensor,
    mean: torch.Tensor,
    x: torch.Tensor,
    parameters: torch.Tensor,
    widths: Sequence[int],
    p: Sequence[float],
    passes: int,
    activation: str,
    consistent: bool,
    seed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by x and by the flat parameters, in their dtypes. With l the logits of a pass, q their
    softmax and H its entropy:

    dL/dq = (grad_mean + 2 grad_variance (q - mean)) / passes    dL/dl = q (dL/dq - <q, dL/dq>) - grad_entropy q (ln q + H) / passes
    """
    keep = torch.ops.uefl.dropout_mask.default
    start = x.to(parameters.dtype)
    head = reference.layers(parameters, widths)
    grad_x, grad_parameters = torch.zeros_like(start), torch.zeros_like(parameters)
    grad_head = reference.layers(grad_parameters, widths)  # views, summed into

    def drop(value: torch.Tensor, t: int, stream: int) -> torch.Tensor:
        return reference.drop(value, seed, t, stream, p[stream], consistent, keep)

    for t in range(passes):
        # of each layer: what the activation before it took, and what it took itself
        sums, inputs = [start], []
        for i, (weight, bias) in enumerate(head):
            inputs.append(drop(reference.ACTIVATIONS[activation](sums[i]) if i > 0 else start, t, i))
            sums.append(nn.functional.linear(inputs[i], weight, bias))
        log_q = drop(sums[-1], t, len(head)).log_softmax(-1)
        q = log_q.exp()
        grad_q = (grad_mean + 2 * grad_variance * (q - mean)) / passes
        entropy = torch.special.entr(q).sum(-1, keepdim=True)
        surprise = torch.where(q > 0, q * log_q, 0.0) + q * entropy
        gradient = (
            q * (grad_q - (q * grad_q).sum(-1, keepdim=True)) - grad_entropy.unsqueeze(-1) / passes * surprise
        )
        gradient = drop(gradient, t, len(head))
        for i in reversed(range(len(head))):
            grad_head[i][0].addmm_(gradient.T, inputs[i])
            grad_head[i][1].add_(gradient.sum(0))
            gradient = drop(gradient @ head[i][0], t, i)
            if i > 0:
                gradient = _SLOPES[activation](gradient, sums[i])
        grad_x += gradient
    return grad_x.to(x.dtype), grad_parameters
