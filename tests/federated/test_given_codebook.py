"""A network given in Python with a codebook between its two parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import uefl
from tests.federated.interrupted import Killer
from uefl.errors import UserError

KEYS = {
    "run": {"threads": 1, "precision": "fp32", "passes": 3},
    "data": {"clients": 2, "train_per_client": 32, "test_per_client": 12},
    "training": {"rounds": [1, 1], "local_epochs": 1, "batch_size": 16, "lr": 1e-2},
    "arms": {"uefl": {"codewords": 4, "segments": 2, "gamma": 0.0, "stop_when_certain": False}, "fedavg": {}},
}


class TwoParts(nn.Module):
    """16 patches of an image as tokens of 8 elements, and a head with dropout."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 7, stride=7)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)
        )

    def tokens(self, images):
        return self.patches(images).flatten(2).transpose(1, 2)

    def forward(self, images):
        return self.head(self.tokens(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return uefl.train(KEYS, out=tmp_path_factory.mktemp("given") / "run", model=TwoParts)


def test_its_codebook_grows_and_is_measured(run):
    records = run.metrics[run.metrics.arm == "uefl"]
    assert set(records.codewords[records["round"] == 1]) == {4}
    assert set(records.codewords[records["round"] == 2]) == {4, 8}
    assert (records.perplexity > 1).all()
    assert (records.mutual_info > 0).all()  # passes with dropout on differ


def test_its_saved_model_predicts_behind_the_codebook(run):
    model = uefl.load(run.path, model=TwoParts).model("uefl")
    images = torch.randint(0, 256, (3, *model.shape), dtype=torch.uint8)
    net, own = model.members[0].net, model.members[0].clients["silo-0"]
    tokens = net.tokens((images - model.mean) / model.std).reshape(-1, 4)
    nearest = torch.cdist(tokens, own["codebook"]).argmin(1)
    logits = net.head(own["codebook"][nearest].reshape(3, 16, 8))
    torch.testing.assert_close(model.predict(images, "silo-0"), logits.softmax(-1))


def test_given_codebook_resumes_bit_for_bit(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        uefl.train(KEYS, out=tmp_path / "run", model=TwoParts, observer=Killer(4))
    uefl.resume(tmp_path / "run", model=TwoParts)
    for name in ("metrics.jsonl", "model-uefl.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (run.path / name).read_bytes()


def without(name):
    class Lacking(TwoParts):
        def __init__(self):
            super().__init__()
            if name == "head":
                self.out, self.head = self.head, None

        tokens = None if name == "tokens" else TwoParts.tokens

        def forward(self, images):
            return (self.head or self.out)(TwoParts.tokens(self, images))

    return Lacking


@pytest.mark.parametrize(("name", "kind"), [("tokens", "method"), ("head", "module")])
def test_one_that_lacks_a_part_is_refused_by_name(tmp_path, name, kind):
    with pytest.raises(UserError, match=rf"model: .*\[B, T, D\].*Lacking .*{kind} '{name}'"):
        uefl.train(KEYS, out=tmp_path / "run", model=without(name))
    assert not (tmp_path / "run").exists()
    uefl.train(KEYS, out=tmp_path / "run", model=without(name), arms=["fedavg"], rounds=[1])


def test_tokens_of_another_shape_are_refused(tmp_path):
    class Flat(TwoParts):
        def tokens(self, images):
            return super().tokens(images).flatten(1)

    with pytest.raises(UserError, match=r"tokens .*\[2, 128\]"):
        uefl.train(KEYS, out=tmp_path / "run", model=Flat)


def test_tokens_that_are_no_tensor_are_refused(tmp_path):
    class Pair(TwoParts):
        def tokens(self, images):
            return super().tokens(images), images

        def forward(self, images):
            return self.head(self.tokens(images)[0])

    with pytest.raises(UserError, match=r"'tokens' .*tuple; .*\[B, T, D\]"):
        uefl.train(KEYS, out=tmp_path / "run", model=Pair)
