"""What the README shows works: its Python runs, its commands name what there is, its links lead somewhere."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.federated.tiny import federation, settings
from uefl import config
from uefl.models import saved
from uefl.models.net import Net

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"\buefl train [^\n`;#]+", README)


def given(snippet):
    """What a reader has at hand where the snippet begins."""
    if "VectorQuantize" in snippet:
        return {"images": torch.randn(2, 256, 8, 8)}
    if "KMeans" in snippet:
        import uefl_kernels

        return {"uefl_kernels": uefl_kernels, "x": torch.randn(200, 8)}
    if "MCDropout" in snippet:
        layers = torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)
        return {"model": torch.nn.Sequential(*layers), "images": torch.randn(5, 3, 2, 2)}
    if "transition" in snippet:
        import uefl_kernels

        priors, logits = torch.rand(4, 3).softmax(1), torch.randn(9, 3, requires_grad=True)
        which = {"class_priors": priors, "set_priors": torch.full((4,), 0.25), "logits": logits, "which_set": torch.arange(9) % 4}
        return {"uefl_kernels": uefl_kernels} | which
    return {"images": federation().silos[0].load().test.images.numpy()}


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number, tmp_path, monkeypatch):
    snippet = SNIPPETS[number]
    if "saved.load" in snippet:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs/mine").mkdir(parents=True)
        cfg = settings("uefl")
        net = Net(cfg.model, (1, 8, 8), 3)
        weights = {name: value for name, value in net.state_dict().items() if value.is_floating_point()}
        networks = [(weights, {"silo-3": {"codebook": torch.randn(4, net.dim)}})]
        saved.save(tmp_path / "runs/mine/model-uefl.safetensors", cfg, "arm", federation(), networks)
    exec(snippet, given(snippet))


def test_the_snippets_are_found():
    assert len(SNIPPETS) == README.count("```python") == 6


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_the_readme_names_can_be_configured(command):
    _, _, source, *options = shlex.split(command.replace("$s", "0"))
    named = dict(zip(options[::2], options[1::2], strict=True)) if not source.startswith("--") else {}
    assert set(named) <= {"--out", "--seed", "--set"}
    if named:
        config.load(source, [named["--set"]] if "--set" in named else None)
    else:
        assert source == "--resume" or source in config.presets()


def test_targets_modules_presets_and_links_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    modules = re.findall(r"python -m ([a-z_.]+)", README)
    links = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"presets? `([a-z0-9-]+)`|`([a-z]+-[59])`", README)
    assert all([made, modules, links, named])
    assert set(made) <= targets
    assert all(importlib.util.find_spec(module) for module in modules)
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
    for name in named:
        assert "".join(name) in config.presets(), name
