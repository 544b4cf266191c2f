import ast
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

from tests import fresh
from tests.federated.command_line import accepted
from uefl_kernels import _library as library
from uefl_kernels import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Remove all settings, because each test defines the compiled parts."""
    for name in doctor.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_forced", "auto")


@pytest.fixture
def host(monkeypatch):
    """Return a replacement of the compiled NumPy front end."""
    module = types.SimpleNamespace(
        variant=lambda: "avx2", cpu_features=lambda: {"avx2": True, "avx512f": False}
    )
    monkeypatch.setitem(sys.modules, "uefl_kernels._host", module)
    return module


def kernels(monkeypatch, *present):
    """Pretend that exactly these (namespace, dispatch key) pairs have kernels."""
    monkeypatch.setattr(library, "has_kernel", lambda namespace, name, key: (namespace, key) in present)
    monkeypatch.setattr(library, "_cuda_architectures", ("80-real", "90a-real", "100-virtual"))


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is one device of sm_90."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def choices(device):
    return {c["op"]: (c["backend"], c["why"]) for c in doctor.collect()["ops"] if c["device"] == device}


def test_versions_and_environment_are_printed(monkeypatch, host):
    monkeypatch.setenv("UEFL_DATA", "/data")
    found = doctor.collect()
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["environment"] == {
        "UEFL_BACKEND": None,
        "UEFL_DATA": "/data",
        "UEFL_CPU": None,
        "UEFL_CUDA_SEARCH": None,
    }


def test_compiled_cpu_kernels_are_named_with_their_variant(monkeypatch, host):
    kernels(monkeypatch, ("uefl", "CPU"))
    assert {"vq_assign", "vq", "kmeans", "mc_dropout_mlp", "transition_nll", "set_proportion_loss"} <= set(
        choices("cpu")
    )
    assert set(choices("cpu").values()) == {("cpu", "compiled, avx2")}


def test_the_reference_runs_without_compiled_kernels(monkeypatch, host):
    kernels(monkeypatch)
    monkeypatch.setattr(library, "_load_error", "missing")
    found = doctor.collect()
    assert found["compiled"] == {"loaded": False, "reason": "missing", "advice": doctor.COMPILE}
    backend, why = choices("cpu")["vq"]
    assert backend == "reference"
    assert "compiled" in why
    shown = [value for _, value in doctor.facts(found)]
    assert doctor.COMPILE in shown
    assert any(value.endswith(": missing") for value in shown)


def test_the_doctor_agrees_with_the_dispatcher():
    for op, (backend, _) in choices("cpu").items():
        assert backend == ("cpu" if library.has_kernel("uefl", op, "CPU") else "reference")
    assert doctor.collect()["compiled"]["loaded"] == (library.load_error() is None)


def test_an_absent_host_module_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "uefl_kernels._host", None)
    cpu = doctor.collect()["cpu"]
    assert cpu["variant"] is None
    assert cpu["reason"]


def test_invalid_variant_or_backend_ends_the_command():
    for name in ("UEFL_CPU", "UEFL_BACKEND"):
        if name == "UEFL_CPU" and not library.COMPILED:
            continue
        result = fresh.python(
            "import sys; sys.argv = ['uefl', 'doctor']; from uefl.cli import main; main()", **{name: "foo"}
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {name}=")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("present", "capability", "triton", "backend", "why"),
    [
        ([("uefl_cuda", "CUDA")], (9, 0), True, "cuda", "architecture"),
        ([("uefl_cuda", "CUDA"), ("uefl_triton", "CUDA")], (7, 5), True, "triton", "GPU"),
        ([("uefl_triton", "CUDA")], (9, 0), True, "triton", "nvcc"),
        ([("uefl_triton", "CUDA")], (9, 0), False, "reference", "Triton"),
        ([], (9, 0), True, "reference", "kernel"),
    ],
    ids=["cuda", "old-device", "no-nvcc", "neither", "no-kernel"],
)
def test_choice_on_a_gpu(monkeypatch, host, gpu, present, capability, triton, backend, why):
    kernels(monkeypatch, *present)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(library, "triton_available", lambda: triton)
    for chosen, reason in choices("cuda:0").values():
        assert chosen == backend
        assert why in reason


def test_a_forced_backend_is_named_or_its_absence_explained(monkeypatch, host):
    monkeypatch.setenv("UEFL_BACKEND", "reference")
    monkeypatch.setattr(library, "_forced", "reference")
    assert choices("cpu")["vq"] == ("reference", "UEFL_BACKEND=reference")
    monkeypatch.setenv("UEFL_BACKEND", "cuda")
    monkeypatch.setattr(library, "_forced", "cuda")
    backend, why = choices("cpu")["vq"]
    assert backend == "error"
    assert re.search(r"\bcpu, .*\bcuda\b", why)


def test_command_prints_both_tables(host, gpu, monkeypatch):
    kernels(monkeypatch, ("uefl_cuda", "CUDA"))
    output = accepted("doctor")
    for text in ("torch", "avx2", "A GPU, sm_90", "vq_assign", "cuda:0", "UEFL_BACKEND"):
        assert text in output
    assert "avx512f" not in output


_WITHOUT_PANDAS = "import sys; sys.modules['pandas'] = None; "


def test_a_missing_extra_names_its_install_command():
    result = fresh.python(f"{_WITHOUT_PANDAS}import uefl")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: ")
    assert "pandas" in result.stderr.splitlines()[-1]
    assert "pip install '.[federated]'" in result.stderr


def test_command_without_the_extra_has_only_the_doctor():
    code = f"{_WITHOUT_PANDAS}sys.argv[0] = 'uefl'; from uefl_kernels.__main__ import main; main()"
    result = fresh.python(code, "presets")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "pip install '.[federated]'" in result.stderr
    result = fresh.python(code, "doctor", UEFL_BACKEND="", UEFL_CPU="")
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("torch", "vq_assign", "UEFL_BACKEND", "pip install '.[federated]'"):
        assert word in result.stdout
    result = fresh.python(code, "doctor", UEFL_BACKEND="none")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_the_extra_lists_every_package_that_uefl_imports():
    """Packages of other extras are left out, and pyarrow, which only Parquet files need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    federated = {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["federated"]}
    of_extras = {"flwr", "httpx", "cryptography", "opacus", "tensorboard", "google", "grpc", "pyarrow"}
    distributions = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w"}
    # pydantic and scikit-learn install these
    distributions |= {"annotated_types": "pydantic", "scipy": "scikit-learn"}
    imported = set()
    for path in (ROOT / "uefl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.partition(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "uefl", "uefl_kernels", "torch", "numpy", *of_extras}
    assert {distributions.get(name, name) for name in imported} == federated
