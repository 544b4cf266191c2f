"""A run computes the same bits in any context and with any settings of its caller.

The run does not change these settings.
"""

import hashlib
import os
import random
import warnings
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import uefl
from tests import fresh
from uefl.errors import UserError
from uefl.isolation import _ATTRIBUTES, isolated, plain_torch
from uefl.progress import PlainProgress
from uefl.seeds import make_repeatable

from .test_api import KEYS, clients, network
from .tiny import in_threads, settings, workspace_of


def small(out, **keys):
    """Train a network given in Python, with dropout, draws and steps."""
    own = {"clients": clients(), "model": network, "arms": {"fedavg": {}}, "rounds": [2]}
    return uefl.train(out=out, **KEYS | own | keys)


def result(out):
    """Return the model and the metrics of the run."""
    return {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest()
        for name in ("model-fedavg.safetensors", "metrics.jsonl")
    }


def setting(change, restore):
    """Return a context manager that changes a global setting."""

    @contextmanager
    def changed():
        change()
        try:
            yield
        finally:
            restore()

    return changed


def attribute(owner, name, value):
    before = getattr(owner, name)
    return setting(lambda: setattr(owner, name, value), lambda: setattr(owner, name, before))


@contextmanager
def hook_of_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        yield
    finally:
        handle.remove()


CALLERS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": setting(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "default device": setting(
        lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)
    ),
    "device context": lambda: torch.device("meta"),
    "deterministic": setting(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "matmul precision": setting(
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "no oneDNN": attribute(torch.backends.mkldnn, "enabled", False),
    "cudnn": attribute(torch.backends.cudnn, "benchmark", True),
    "flush denormal": setting(
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    ),
    "threads": setting(lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
    "hook of all modules": hook_of_all_modules,
    "NumPy errors": lambda: np.errstate(all="raise"),
    "seeds": setting(lambda: (torch.manual_seed(5), random.seed(5), np.random.seed(5)), lambda: None),  # noqa: NPY002
}


def process():
    """Return all global state of the process and of this thread that a run could change."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "contexts of autocast": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "anomalies": torch.is_anomaly_enabled(),
        "settings": [getattr(owner, name) for owner, name, _ in _ATTRIBUTES],
        "matmul": torch.get_float32_matmul_precision(),
        "denormal": sum([5e-324]) * 1.0,
        "threads": torch.get_num_threads(),
        "errors": np.geterr(),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "torch": torch.get_rng_state().tolist() if torch.get_default_device().type == "cpu" else None,
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the result of the run without any context."""
    torch.set_num_threads(1)
    small(out := tmp_path_factory.mktemp("alone") / "run")
    return result(out)


def check(tmp_path, alone, *callers):
    given = clients()
    with ExitStack() as stack:
        for caller in callers:
            stack.enter_context(CALLERS[caller]())
        before = process()
        run = small(tmp_path / "run", clients=given)
        after = process()
        model = run.model("fedavg")
        predicted = model.predict(given["arrays"][1][0])
        assert process() == after == before
    assert result(tmp_path / "run") == alone
    assert torch.equal(predicted, model.predict(given["arrays"][1][0]))
    assert predicted.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("caller", CALLERS)
def test_caller(tmp_path, alone, caller):
    check(tmp_path, alone, caller)


def test_caller_of_many_contexts(tmp_path, alone):
    check(tmp_path, alone, *CALLERS)


def with_fake_tensors(function):
    with FakeTensorMode():
        function(None)


def with_gradient(function):
    torch.func.grad(function)(torch.ones(()))


@pytest.mark.parametrize("context", [with_fake_tensors, with_gradient])
def test_contexts_that_replace_tensors_are_refused(tmp_path, context):
    with pytest.raises(UserError, match=r"torch\.func.*FakeTensorMode"):
        context(lambda _: small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_resumed_in_a_context(tmp_path, alone):
    """The caller has other settings when the run is resumed."""

    class StopTraining(Exception):
        pass

    class Stopping(PlainProgress):
        def round(self, arm, round, records):
            raise StopTraining

    with pytest.raises(StopTraining):
        small(tmp_path / "run", observer=Stopping())
    before = process()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        uefl.resume(tmp_path / "run", clients=clients(), model=network)
    assert process() == before
    assert result(tmp_path / "run") == alone


def test_failed_run_restores_the_process(tmp_path):
    before = process()
    with pytest.raises(uefl.UserError):
        small(tmp_path / "run", threads=2, model=lambda: nn.Linear(1, 1))
    assert process() == before


@pytest.mark.filterwarnings("default:a round is over")
def test_warnings_as_errors(tmp_path, alone):
    """A warning does not end a run, and the caller's filters are restored afterwards."""

    class Warned(PlainProgress):
        def round(self, arm, round, records):
            warnings.warn("a round is over", DeprecationWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        before = list(warnings.filters)
        small(tmp_path / "run", observer=Warned())
        assert list(warnings.filters) == before
    assert result(tmp_path / "run") == alone


def test_two_threads(tmp_path, alone):
    """Both runs draw from torch's global generator, and each has the bits of a separate run."""
    failed = []

    def work(out):
        try:
            small(out)
        except BaseException as error:
            failed.append(error)

    in_threads(work, [tmp_path / "a", tmp_path / "b"])
    assert not failed
    assert result(tmp_path / "a") == result(tmp_path / "b") == alone


DURING_A_RUN = """
from uefl.isolation import isolated as held

def use():
    with held():
        torch.nn.Linear(3, 3)(torch.randn(5, 3)).sum().backward()
"""


def test_process_forked_during_a_run_can_train():
    result = fresh.python(fresh.FORKED.format(DURING_A_RUN))
    assert result.stdout.strip() == "0", result.stderr


def test_current_folder_that_changes(tmp_path, alone, monkeypatch):
    class Moving(PlainProgress):
        def round(self, arm, round, records):
            monkeypatch.chdir("/")

    monkeypatch.chdir(tmp_path)
    run = small("run", observer=Moving())
    assert result(tmp_path / "run") == alone
    assert run.model("fedavg").classes


def test_run_within_a_run(tmp_path, alone):
    """An observer may start another run without an effect on the outer run."""

    class Nested(PlainProgress):
        def round(self, arm, round, records):
            if round == 0:
                small(tmp_path / "inner", seed=3)

    small(tmp_path / "run", observer=Nested())
    assert result(tmp_path / "run") == alone


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_num_threads(2),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
    ],
    ids=["threads", "dtype", "gradients", "autocast", "oneDNN"],
)
def test_an_observer_does_not_change_the_run(tmp_path, alone, change):
    class Changing(PlainProgress):
        def client(self, arm, round, client):
            change()

        def round(self, arm, round, records):
            records.pop().clear()

    before = process()
    small(tmp_path / "run", observer=Changing())
    assert process() == before
    assert result(tmp_path / "run") == alone


def test_an_observer_without_a_method_is_refused(tmp_path):
    with pytest.raises(uefl.UserError, match=r"observer: builtin.* 'start'; .*PlainProgress"):
        small(tmp_path / "run", observer=print)
    assert not (tmp_path / "run").exists()


def test_frozen_network_is_refused(tmp_path):
    with pytest.raises(uefl.UserError, match="requires_grad"):
        small(tmp_path / "run", model=network().requires_grad_(False))
    assert not (tmp_path / "run").exists()


def test_predictions_of_several_clients_in_threads(tmp_path):
    """A call puts the layers of its client into the network, and other calls do not see these layers."""
    arms = {"fedbn": {"algorithm": "fedper"}}
    run = uefl.train(
        "demo", out=tmp_path / "run", clients=clients(), arms=arms, **KEYS | {"width": 4, "hidden": 8}
    )
    model, images = run.model(), clients()["arrays"][1][0]
    alone = {client: model.predict(images, client) for client in model.clients}
    wrong = []

    def work(client):
        wrong.extend(
            client for _ in range(8) if not torch.equal(model.predict(images, client), alone[client])
        )

    in_threads(work, 2 * model.clients)
    assert len({tuple(each.flatten().tolist()) for each in alone.values()}) > 1
    assert not wrong


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["amp", "autocast of a network"])
def test_step_in_bfloat16_has_the_parameters_of_its_own(autocast, own):
    """Torch keeps the bfloat16 copy of a parameter until the outermost context of autocast ends."""
    workspace = workspace_of(settings("fedavg", precision="bf16"))
    caller = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    found = []
    with caller, plain_torch():
        assert not torch.is_autocast_enabled("cpu")
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16) if own else workspace.amp():
                found.append(workspace.net.eval()(workspace.example).float())
            workspace.flat.values.data.mul_(2)
    assert (found[1] - found[0]).abs().max() > 0.1
    with caller, workspace.amp():
        assert (workspace.net.eval()(workspace.example).float() - found[1]).abs().max() > 0.1


def test_gpu_first_used_in_a_run_has_the_seed_of_the_caller(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.default_generator.manual_seed(5)
    with isolated():
        torch.default_generator.manual_seed(7)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert seeds == [5]
    with isolated():
        torch.default_generator.manual_seed(7)
    assert seeds == [5]


def test_products_on_a_gpu_have_the_same_bits_on_every_stream(monkeypatch):
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    with isolated():
        make_repeatable(1, torch.device("cuda"))
        assert os.environ[name] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert name not in os.environ
    assert torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv(name, ":16:8")
    with isolated():
        make_repeatable(1, torch.device("cuda"))
        assert os.environ[name] == ":16:8"
