import platform
import resource

import pytest
import torch

import uefl
from tests.federated import tiny
from uefl.config import Model
from uefl.errors import UserError
from uefl.models import encoders
from uefl.models.flat import FlatModule
from uefl.models.net import Net

TINY = Model(width=4, hidden=16)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("keys", "shape", "classes", "encoder", "total", "dim"),
    [
        ({}, (1, 28, 28), 10, 7_673_344, 10_038_282, 512),
        ({"encoder": "vgg16_bn"}, (3, 32, 32), 10, 14_723_136, 14_990_922, 512),
        ({"encoder": "vgg16_bn"}, (3, 32, 32), 43, 14_723_136, 15_007_851, 512),
        ({"encoder": "vgg16_bn"}, (3, 32, 32), 100, 14_723_136, 15_037_092, 512),
    ],
    ids=["cnn-10", "vgg-10", "vgg-43", "vgg-100"],
)
def test_parameter_counts_are_the_published_ones(keys, shape, classes, encoder, total, dim):
    net = Net(Model(**keys), shape, classes)
    assert (parameters(net.encoder), parameters(net), net.dim) == (encoder, total, dim)


@pytest.mark.parametrize(("size", "tokens"), [(28, 3), (32, 4)])
def test_cnn_token_grid(size, tokens):
    net = Net(TINY, (1, size, size), 10).eval()
    assert net.tokens(torch.zeros(2, 1, size, size)).shape == (2, tokens, tokens, 16)


def test_resnet18_takes_grey_images():
    net = Net(Model(encoder="resnet18"), (1, 28, 28), 10).eval()
    assert net.tokens(torch.zeros(1, 1, 28, 28)).shape == (1, 1, 1, 512)


def test_images_too_small_for_the_encoder():
    with pytest.raises(UserError, match=r"^images of 1 x 4 x 4 are too small for encoder 'cnn'; set a larger image_size, or another"):
        Net(TINY, (1, 4, 4), 10)


def test_a_one_token_model_tells_at_most_as_many_images_apart_as_it_has_codewords():
    torch.manual_seed(0)
    net, images = Net(TINY, (1, 8, 8), 3).eval(), torch.randn(200, 1, 8, 8)
    codebook = net.tokens(images[:5]).detach().reshape(5, 16)
    logits, _ = net.quantized(images, codebook, 0.25)
    known, _ = net.quantized(images[:5], codebook, 0.25)  # the rows of a batch are multiplied in blocks, which round each in its own way
    assert (torch.cdist(logits, known, compute_mode="donot_use_mm_for_euclid_dist") < 1e-5).sum(1).tolist() == [1] * 200
    assert float(torch.nn.functional.pdist(known).min()) > 1e-3


def test_the_small_network_is_its_blocks_with_their_relu_before_the_pooling():
    net, x = encoders.small_cnn(1, 4), torch.randn(6, 1, 12, 12)
    gradients = []
    for rectified_first in (False, True):
        net.zero_grad()
        y = x
        for convolution, block, pool, relu in zip(*(net[i::4] for i in range(4)), strict=True):
            if rectified_first:
                y = convolution(y)
                z = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(y)))))
                y = pool(torch.relu(y + z))
            else:
                y = relu(pool(block(convolution(y))))
        y.square().sum().backward()
        gradients.append((y.detach(), *(p.grad.clone() for p in net.parameters())))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
def test_memory_that_a_step_frees_is_there_for_the_next_one():
    tiny.workspace(tiny.settings())

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        parts = [torch.ones(2**20) for _ in range(5)]
        assert len(parts) == 5  # 20 MB
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    step()
    assert min(step() for _ in range(3)) < 500  # of 5120 pages


def test_flat_module_is_the_module():
    torch.manual_seed(0)
    net, twin = Net(TINY, (1, 8, 8), 3), Net(TINY, (1, 8, 8), 3)
    twin.load_state_dict(net.state_dict())
    flat = FlatModule(net)
    assert flat.values.numel() == parameters(twin)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    optimizers = [torch.optim.Adam([flat.values], lr=1e-3), torch.optim.Adam(twin.parameters(), lr=1e-3)]
    for _ in range(3):
        for model, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            model.encoder.train()
            model.head.eval()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    named = flat.named(flat.values.detach(), flat.buffers)
    for name, value in twin.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(named[name], value, rtol=1e-4, atol=1e-5)


def test_private_parts_are_told_by_name_and_by_the_layer_that_holds_them():
    flat = FlatModule(Net(TINY, (1, 8, 8), 3))
    assert flat.private(lambda name, owner: False) is None
    values, buffers = flat.private(lambda name, owner: isinstance(owner, torch.nn.BatchNorm2d))
    assert int(buffers.sum()) == len(buffers) == len(flat.buffers)
    assert int(values.sum()) == len(buffers)  # scale and shift are as many as means and variances
    values, buffers = flat.private(lambda name, owner: name.startswith("head.fc2."))
    assert (int(values.sum()), int(buffers.sum())) == (16 * 3 + 3, 0)
    named = flat.named(values.float(), buffers.float())
    assert {name for name, part in named.items() if part.any()} == {"head.fc2.weight", "head.fc2.bias"}


def test_flat_module_set_changes_the_module_in_place():
    net = Net(TINY, (1, 8, 8), 3)
    flat = FlatModule(net)
    pointers = [p.data_ptr() for p in net.parameters()]
    flat.set(torch.full_like(flat.values, 2.0), torch.full_like(flat.buffers, 3.0))
    assert [p.data_ptr() for p in net.parameters()] == pointers
    assert all(bool((p == 2).all()) for p in net.parameters())
    assert all(bool((b == 3).all()) for b in net.buffers() if b.is_floating_point())


def fedul_net(image_shape, **keys):
    return Net(Model(**{"encoder": "cnn5x5"} | keys), image_shape, 10)


def test_fedul_networks_have_their_published_sizes():
    for image_shape in ((1, 28, 28), (3, 28, 28)):
        net = fedul_net(image_shape, width=64)
        assert sum(p.numel() for p in net.parameters()) == 14_219_210
        assert sum(b.numel() for b in net.buffers() if b.is_floating_point()) == 5_632
    assert sum(p.numel() for p in fedul_net((3, 32, 32), encoder="resnet18_nopool").parameters()) == 11_181_642


def test_a_grey_image_is_three_equal_channels_at_the_cost_of_one():
    net = fedul_net((1, 28, 28), width=4).double().train()
    grey = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    results = []
    for x in (grey, grey.expand(-1, 3, -1, -1)):
        net.zero_grad()
        logits = net(x)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in net.parameters())])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three, atol=1e-9, rtol=1e-9)


def test_resnet_without_pool_keeps_small_images_large():
    net = fedul_net((3, 32, 32), encoder="resnet18_nopool")
    assert net.tokens(torch.zeros(2, 3, 32, 32)).shape == (2, 2, 2, 512)


class Odd(torch.nn.Module):
    """Weights that two layers share, a buffer that is not saved, and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fixed = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.fixed.weight.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.out = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.norm(self.fixed(self.second(self.first(x.mean(1)[:, 0, :4])))) + self.table)


def test_a_flat_module_has_the_names_of_the_state_dict_and_knows_what_is_frozen():
    module = Odd()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = FlatModule(module)
    named = flat.named(flat.values.detach(), flat.buffers)
    assert set(named) == {name for name, tensor in before.items() if tensor.is_floating_point()}
    assert all(torch.equal(named[name], before[name]) for name in named)
    assert torch.equal(flat.values.detach()[flat.frozen], before["fixed.weight"].flatten())
    assert len(flat.values) == 16 + 16 + 8 + 15
    module.norm(torch.randn(5, 4))
    assert int(module.norm.num_batches_tracked) == 1
    flat.reset()
    assert int(module.norm.num_batches_tracked) == 0


@pytest.mark.parametrize("keys", [{"optimizer": "adamw"}, {"optimizer": "sgd"}, {"optimizer": "adam"}], ids=lambda keys: keys["optimizer"])
def test_an_odd_network_trains_and_what_is_frozen_stays(keys, tmp_path):
    sections = {"run": {"threads": 1, "passes": 2}, "training": {"rounds": [2], "local_epochs": 1, "weight_decay": 0.1, **keys}}
    data = {"clients": 2, "train_per_client": 40, "test_per_client": 10}
    net = OddDigits()
    fixed = net.fixed.weight.clone()
    run = uefl.train(sections | {"data": data, "arms": {"fedavg": {}}}, out=tmp_path / "run", model=net)
    trained = run.model("fedavg").members[0].net
    torch.testing.assert_close(trained.fixed.weight, fixed, rtol=0, atol=1e-6)
    assert not torch.equal(trained.first.weight, net.first.weight)
    assert trained.second.weight is trained.first.weight


class OddDigits(Odd):
    """For the ten digits."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 10)
