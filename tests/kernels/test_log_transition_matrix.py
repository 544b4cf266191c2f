"""log_transition_matrix refuses invalid arguments, and rounding affects its shares little.

test_transition_nll.py tests its values.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels import log_transition_matrix

P = torch.full((2, 4), 0.25, dtype=torch.float64)
BAD_PRIORS = {
    "integers": ((P.int(),), TypeError, r"class_priors.*torch\.int32.*float32"),
    "shape": ((P[0],), ValueError, r"class_priors.*\[M, K\].*\[4\]"),
    "negative": ((torch.tensor([[0.5, 0.5], [1.5, -0.5]]),), ValueError, r"set 1.*-0\.5.*class 1"),
    "NaN": ((torch.tensor([[0.5, torch.nan]]),), ValueError, "class_priors.*set 0.*nan.*class 1"),
    "no priors": ((None,), TypeError, "class_priors.*NoneType"),
    "no values": ((P, P[:, 0].to("meta")), ValueError, "set_priors.*meta"),
    "counts in bfloat16": ((P.bfloat16() * 8,), ValueError, r"class_priors.*set 0.*8.*0\.0078125"),
    "zero row": ((torch.zeros(1, 2),), ValueError, r"class_priors.*set 0 .*0,.*0\.0001"),
    "counts": ((P * 8,), ValueError, r"class_priors.*set 0.*8.*0\.0001.*counts"),
    "set priors": ((P, P[0]), ValueError, r"set_priors.*\[2\].*class_priors \[2, 4\].*\[4\]"),
    "empty set": ((P, torch.tensor([0.0, 1.0])), ValueError, "set_priors.*0.*set 0"),
    "target prior": ((P, None, torch.tensor([0.5, 0.5, 0.0, 0.0])), ValueError, "target_prior.*0.*class 2"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_priors_in_half_precision_may_be_off_by_their_rounding(dtype):
    tenth = torch.full((1, 10), 0.1, dtype=dtype)
    torch.testing.assert_close(
        log_transition_matrix(tenth, None, tenth[0]), torch.zeros(1, 10, dtype=torch.float64)
    )


def test_shares_are_divided_by_their_sum():
    shares = P, torch.tensor([0.3, 0.7], dtype=torch.float64), P[0]
    found = log_transition_matrix(*(share * (1 + 5e-5) for share in shares))
    torch.testing.assert_close(found, log_transition_matrix(*shares), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", BAD_PRIORS)
def test_wrong_priors(case):
    arguments, error, message = BAD_PRIORS[case]
    with pytest.raises(error, match=f"^log_transition_matrix: .*{message}"):
        log_transition_matrix(*arguments)
