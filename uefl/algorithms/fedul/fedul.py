"""FedUL, and its forms M1 and M2: the server trains on labeled images after the average."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

import uefl_kernels

from ...client.work import Batch, Work
from ...data.federation import Federation, SetData
from ...errors import InvalidPriors
from ...fields import check_unused
from ...server.teacher import Teacher
from ...server.turn import Turn
from ..base import State, register
from . import expert
from .sets import Labeled, SetAlgorithm, needs_labeled, server_loss


@register("fedul")
class FedUL(SetAlgorithm):
    """Maximize the likelihood of each image's set, through the transition from classes to sets."""

    ops = ("transition_nll",)
    static_step = True

    class Parameters(Labeled):
        """Parameters of FedUL."""

        server: Literal["none", "finetune", "blend"] = "none"
        """the server's step: `none`; `finetune` the average on labeled images (M1); `blend` it with a model
        f' (M2)"""
        server_epochs: int = Field(1, ge=1)
        """epochs over the server's labeled images in a round"""
        h: float = Field(0.5, ge=0, le=1)
        """with `blend`: the broadcast model is (1 - h) f + h f'"""
        h_schedule: Literal["constant", "rise", "fall"] = "constant"
        """how h changes over the rounds: `constant`; `rise`: linearly, up to h in the last round; `fall`:
        linearly, down from h"""
        recalibrate: bool = False
        """with `blend`: measure the running statistics of batch norm with (1 - h) f + h f' on the labeled
        images"""
        resync: bool = False
        """with `blend`: f' starts every round from the broadcast model with a new optimizer; `false`: f'
        starts from its state after the last round"""
        test_prior: tuple[Annotated[float, Field(gt=0)], ...] = ()
        """class shares under which the model's output is a posterior; `[]`: uniform"""

        @model_validator(mode="after")
        def _sums_to_one(self) -> Any:
            if self.test_prior and abs(sum(self.test_prior) - 1) > 1e-4:
                raise ValueError(
                    f"test_prior: expected numbers that sum to 1, but their sum is {sum(self.test_prior):g}"
                )
            return self

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse M1 and M2 without labeled images of the server, and a prior of other classes."""
        super().check(federation, arm, net)
        if self.context.model.frozen_batch_norm:
            why = "frozen batch norm keeps its running statistics"
            check_unused(self.parameters, "recalibrate", why, f"arms.{arm}.")
        if self.parameters.server != "none":
            needs_labeled(federation, arm)
        prior, classes = self.parameters.test_prior, len(federation.classes)
        if prior and len(prior) != classes:
            raise InvalidPriors(
                f"key 'arms.{arm}.test_prior': expected {classes} numbers, one per class, got {len(prior)}"
            )

    # --- the client ----------------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Compute the transition from class probabilities to set probabilities."""
        matrix = log_transition(work.sets, self.parameters.test_prior).to(work.workspace.device)
        work.memory |= {"matrix": matrix, "marginal": matrix.logsumexp(0)}

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the loss of the network's logits against the sets."""
        legacy = self.parameters.loss == "legacy_double_softmax"
        kernel = uefl_kernels.transition_double_softmax if legacy else uefl_kernels.transition_nll
        loss: torch.Tensor = kernel(
            work.logits(batch.images),
            batch.labels,
            work.memory["matrix"],
            log_marginal=work.memory["marginal"],
        ).mean()
        return loss

    # --- the server ----------------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg, and f' for M2."""
        state = super().server_state(values, buffers, net)
        if self.parameters.server == "blend":
            expert.begin(state)
        return state

    def serve(self, state: State, turn: Turn, server: Teacher | None) -> bool:
        """Fine-tune the average, or blend it with f'."""
        p = self.parameters
        if p.server == "none":
            return False
        assert server is not None
        if p.server == "finetune":
            state.plain["outcome"]["server_loss"] = server.train(
                state.tensors,
                seed=self.context.seed,
                round=turn.round,
                epochs=p.server_epochs,
                loss=server_loss(p.loss),
                keep=False,
            )
        else:
            expert.train(state, turn, server, seed=self.context.seed, epochs=p.server_epochs, loss=p.loss)
            expert.blend(state, self.share(turn))
            if p.recalibrate:
                state.tensors["buffers"] = server.recalibrated(state.model)
            if p.resync:
                expert.synchronize(state)
        return True

    def share(self, turn: Turn) -> float:
        """Return the share of f' in the model of this round."""
        rounds, p = self.rounds(0) or 1, self.parameters
        grown = {"constant": 1.0, "rise": (turn.round + 1) / rounds, "fall": 1 - turn.round / rounds}
        return float(p.h * grown[p.h_schedule])


def log_transition(data: SetData, test_prior: tuple[float, ...] = ()) -> torch.Tensor:
    """Return the transition from classes to a client's sets, log(pi_m Pi[m, k] / pi_k) ``[M, K]`` float32."""
    sizes = data.sizes.double()
    target = data.priors.new_tensor(test_prior) if test_prior else None
    return uefl_kernels.log_transition_matrix(data.priors, sizes / sizes.sum(), target).float()
