"""The choice of a backend, its errors, and the package without its compiled library."""

from __future__ import annotations

import re

import pytest
import torch

import uefl_kernels
from tests.fresh import python
from uefl_kernels import COMPILED, _library, backend, vq_assign
from uefl_kernels._library import check, has_kernel, load_error

from .conftest import normal


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_compiled_kernels_attach_to_the_cpu():
    assert has_kernel("uefl", "vq_assign", "CPU")
    assert has_kernel("uefl", "vq", "CPU")
    assert not has_kernel("uefl_reference", "vq", "CPU")
    assert load_error() is None
    with backend("cpu"):
        vq_assign(normal(4, 3), normal(5, 3))


def test_backend_restores_itself_after_an_error():
    with pytest.raises(ZeroDivisionError), backend("reference"):
        raise ZeroDivisionError
    assert _library._forced == "auto"


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match=r"^backend 'gpu'.*auto, reference, triton, cuda, cpu"),
        backend("gpu"),
    ):
        pass


def test_missing_backend_is_an_error_not_a_fallback():
    message = "^backend 'cuda'.*vq_assign.*cpu.*doctor"
    with backend("cuda"), pytest.raises(RuntimeError, match=message):
        vq_assign(normal(4, 3), normal(5, 3))
    with backend("cpu"), pytest.raises(RuntimeError, match=r"meta.*cpu"):
        vq_assign(normal(4, 3).to("meta"), normal(5, 3).to("meta"))


def test_environment_chooses_the_backend():
    code = "from uefl_kernels import _library; print(_library._forced)"
    assert python(code, UEFL_BACKEND="reference").stdout.strip() == "reference"
    result = python(code, UEFL_BACKEND="gpu")
    assert result.returncode != 0
    assert re.search("UEFL_BACKEND='gpu' .*auto, reference, triton, cuda, cpu", result.stderr)


def test_empty_variables_mean_unset():
    code = (
        "import torch; from uefl_kernels import _library; _library.check('vq', 'cpu');"
        " print(_library._forced)"
    )
    assert python(code, UEFL_BACKEND="", UEFL_CPU="").stdout.strip() == "auto"


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("forced", ["auto", "cpu"])
def test_check_finds_a_variant_that_does_not_exist(forced):
    code = (
        "from uefl_kernels import _library\ntry: _library.check('vq', 'cpu')\nexcept RuntimeError as error:"
        " print(error)"
    )
    done = python(code, UEFL_CPU="sse9", UEFL_BACKEND=forced)
    message = "UEFL_CPU=sse9 .*amx, avx512vnni, avx512, avx2.*portable.*\n"
    assert re.fullmatch(message, done.stdout), done.stderr
    assert python(code, UEFL_CPU="sse9", UEFL_BACKEND="reference").stdout == ""


def test_check_raises_the_errors_of_the_op():
    for name in ("vq", "vq_assign"):
        check(name, "cpu")
        with backend("cuda"), pytest.raises(RuntimeError, match=f"^backend 'cuda' .*{name} .*cpu.*cuda"):
            check(name, torch.device("cpu"))
        with backend("cpu"), pytest.raises(RuntimeError, match=f"^backend 'cpu' .*{name} .*meta"):
            check(name, "meta")


def test_composed_op_exists_if_its_search_exists():
    for namespace, key in (("uefl_cuda", "CUDA"), ("uefl_triton", "CUDA"), ("uefl", "CUDA")):
        assert has_kernel(namespace, "vq", key) == has_kernel(namespace, "vq_assign", key)
    assert has_kernel("uefl_cuda", "vq", "CUDA") == bool(_library._cuda_architectures)


def test_a_device_that_the_cuda_kernels_were_not_built_for(monkeypatch):
    monkeypatch.setattr(_library, "has_kernel", lambda namespace, name, key: True)
    monkeypatch.setattr(_library, "_cuda_architectures", ("90a-real",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert re.search("90a-real.*cuda:0", _library._absent("cuda", "vq", torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _library._absent("cuda", "vq", torch.device("cuda", 0)) is None


def test_the_package_finds_a_function_once():
    code = (
        "import uefl_kernels as k; before = 'vq' in vars(k); print(before, k.vq is vars(k)['vq'], k.vq is"
        " k._api.vq)"
    )
    assert python(code).stdout.split() == ["False", "True", "True"]


class OnGpu:
    """The attributes of a CUDA tensor that resolve() reads."""

    device, is_cuda = torch.device("cuda", 0), True


@pytest.mark.parametrize(("built", "namespace"), [(True, "uefl_cuda"), (False, "uefl")])
def test_an_eager_call_on_a_gpu_goes_to_the_kernel_itself(monkeypatch, built, namespace):
    """Compiled graphs and direct calls skip the Python function."""
    monkeypatch.setattr(_library, "_native", lambda name, device: built)
    for name in ("vq_assign", "kmeans_step", "transition_nll"):
        assert _library.resolve(name, OnGpu()) is _library._overloads[namespace, name]
        with monkeypatch.context() as compiling:
            compiling.setattr(torch.compiler, "is_compiling", lambda: True)
            assert _library.resolve(name, OnGpu()) is _library._overloads["uefl", name]


def test_backend_of_a_device_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(_library, "has_kernel", lambda namespace, name, key: True)
    monkeypatch.setattr(_library, "cuda_architecture_built", lambda device: not asked.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _library._native.cache_clear()
    try:
        assert [_library._native("vq_assign", OnGpu.device) for _ in range(3)] == [True] * 3
    finally:
        _library._native.cache_clear()
    assert asked == [OnGpu.device]


DEFAULT = ("80-real", "90a-real", "100-real", "100-virtual")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ((), (9, 0), False),
        (DEFAULT, (7, 5), False),
        (DEFAULT, (8, 0), True),
        (DEFAULT, (8, 9), True),
        (DEFAULT, (9, 0), True),
        (DEFAULT, (10, 3), True),
        (DEFAULT, (12, 0), True),
        (("90a-real",), (10, 0), False),
        (("90a",), (10, 0), False),
        (("80-real",), (9, 0), False),
        (("86-real",), (8, 0), False),
        (("80-virtual",), (9, 0), True),
        (("80",), (12, 1), True),
        (("100f",), (10, 3), True),
        (("100f",), (12, 0), False),
        (("OFF",), (8, 0), False),
    ],
)
def test_which_device_runs_what_was_built(architectures, capability, runs):
    assert _library._runs_on(architectures, capability) == runs


WITHOUT = """
from pathlib import Path
exists = Path.exists
Path.exists = lambda self: self.name != "_C.abi3.so" and exists(self)
import torch, uefl_kernels
from uefl_kernels import _library, vq, backend
assert not uefl_kernels.COMPILED
assert "not built" in _library.load_error()
x, codebook = torch.randn(20, 6), torch.randn(5, 3, requires_grad=True)
vq(x, codebook).loss.backward()
assert codebook.grad.any()
try:
    with backend("cpu"):
        vq(x, codebook)
except RuntimeError as error:
    print(error)
"""


def test_package_works_without_the_compiled_library():
    result = python(WITHOUT)
    assert result.returncode == 0, result.stderr
    assert re.match("backend 'cpu' .*vq .*absent", result.stdout)


BROKEN = """
import torch
def refuse(path): raise OSError("undefined symbol: torch_something")
torch.ops.load_library = refuse
import uefl_kernels
print(uefl_kernels.COMPILED, uefl_kernels._library.load_error())
"""


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_library_that_does_not_load_is_reported():
    assert python(BROKEN).stdout.strip() == "False undefined symbol: torch_something"


def test_submodules_need_no_import_of_their_own():
    done = python(
        "import uefl_kernels as u; print(u.nn.VectorQuantize.__name__, u.metrics.ece.__name__,"
        " u.numpy.vq_assign.__name__)"
    )
    assert done.stdout == "VectorQuantize ece vq_assign\n", done.stderr


def test_public_names():
    assert set(uefl_kernels.__all__) <= set(dir(uefl_kernels))
    for name in uefl_kernels.__all__:
        assert getattr(uefl_kernels, name).__doc__ or not callable(getattr(uefl_kernels, name))
    assert torch.ops.uefl.vq_assign.default._schema.name == "uefl::vq_assign"


Z, LOG = normal(8, 3), torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2]]).log()
DIFFERENTIABLE = {
    "mc_dropout_mlp": lambda z: (
        uefl_kernels.mc_dropout_mlp(z, [normal(4, 3)], p=0.5, input_dropout=True, seed=0).entropy
    ),
    "transition_nll": lambda z: uefl_kernels.transition_nll(z, torch.zeros(8, dtype=torch.int64), LOG),
    "log_transition_probs": lambda z: uefl_kernels.log_transition_probs(z, LOG),
    "transition_double_softmax": lambda z: uefl_kernels.transition_double_softmax(
        z, torch.zeros(8, dtype=torch.int64), LOG
    ),
    "set_proportion_loss": lambda z: uefl_kernels.set_proportion_loss(z, torch.tensor([0, 4, 8]), LOG.exp()),
}


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_forward_mode_raises(op):
    with pytest.raises(RuntimeError, match=f"^{op}:.*forward-mode"):
        torch.func.jvp(DIFFERENTIABLE[op], (Z,), (Z,))


@pytest.mark.skipif(not has_kernel("uefl_cuda", "vq_backward", "CUDA"), reason="built without nvcc")
@pytest.mark.parametrize(
    ("name", "options"),
    [("vq_assign", ("l2", True)), ("vq", ("l2", True, False, 1.0, 0.25, False))],
    ids=["vq_assign", "vq"],
)
def test_a_gpu_without_code_runs_the_portable_op(name, options):
    """A CPU tensor under the CUDA key selects the portable op."""
    (cuda,) = (
        line for line in torch._C._dispatch_dump(f"uefl::{name}").splitlines() if line.startswith("CUDA:")
    )
    assert ".cu:" in cuda, "Python runs between the call and the kernel"
    x, codebook = normal(6, 3), normal(4, 3)
    reference = getattr(torch.ops.uefl_reference, name).default
    library = torch.library.Library("uefl_portable", "IMPL")
    library.impl(name, lambda *given: reference(*given), "CPU")
    op = getattr(torch.ops.uefl, name).default
    got = op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), x, codebook, *options)
    torch.testing.assert_close(got, reference(x, codebook, *options), rtol=0, atol=0)
