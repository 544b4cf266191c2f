"""Backends: which one runs, what is refused, and the package without its compiled library."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import uefl_kernels
from uefl_kernels import COMPILED, backend, vq_assign
from uefl_kernels._library import has_kernel, load_error

from .conftest import normal


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)


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
    from uefl_kernels import _library

    assert _library._forced == "auto"


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"^backend 'gpu' is not known; use one of auto, reference, triton, cuda, cpu"), backend("gpu"):
        pass


def test_backend_that_is_absent_is_an_error_not_a_fallback():
    message = r"^backend 'cuda' cannot run vq_assign here: the input is on cpu, expected cuda; see `uefl doctor`"
    with backend("cuda"), pytest.raises(RuntimeError, match=message):
        vq_assign(normal(4, 3), normal(5, 3))
    with backend("cpu"), pytest.raises(RuntimeError, match="the input is on meta, expected cpu"):
        vq_assign(normal(4, 3).to("meta"), normal(5, 3).to("meta"))


def test_environment_chooses_the_backend():
    code = "from uefl_kernels import _library; print(_library._forced)"
    assert python(code, UEFL_BACKEND="reference").stdout.strip() == "reference"
    result = python(code, UEFL_BACKEND="gpu")
    assert result.returncode != 0
    assert "UEFL_BACKEND='gpu' is not a backend; use one of auto, reference, triton, cuda, cpu" in result.stderr


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
    assert result.stdout.startswith("backend 'cpu' cannot run vq here: the compiled CPU kernels are absent (not built")


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


def test_public_names():
    assert set(uefl_kernels.__all__) <= set(dir(uefl_kernels))
    for name in uefl_kernels.__all__:
        assert getattr(uefl_kernels, name).__doc__ or not callable(getattr(uefl_kernels, name))
    assert torch.ops.uefl.vq_assign.default._schema.name == "uefl::vq_assign"
