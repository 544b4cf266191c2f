import copy
import pickle
import platform
import resource
from contextlib import nullcontext

import pytest
import torch

import uefl
from tests.federated.tiny import KEYS, arm, federation, finish, settings, values, workspace_of
from uefl.algorithms.base import registry
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.config import Model
from uefl.data.federation import ClientData, Federation, LabeledData, Split
from uefl.errors import UserError
from uefl.models.flat import FlatModule
from uefl.models.gaussian import GaussianNet
from uefl.models.layers import BatchStatistics, batch_norms, freeze_batch_norm, linear_layers
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
        ({}, (3, 32, 32), 10, 7_673_344 + 2 * 9 * 128, 7_673_344 + 2 * 9 * 128 + 8193 * 512 + 5130, 512),
        ({"encoder": "resnet18"}, (3, 32, 32), 10, 11_176_512, 11_176_512 + 513 * 512 + 5130, 512),
        # with VHL's head of 5,130 parameters these are the known 11,173,962
        (
            {"encoder": "resnet18_3x3", "pooled": True},
            (3, 32, 32),
            10,
            11_168_832,
            11_168_832 + 513 * 512 + 5130,
            512,
        ),
        ({"encoder": "pixel_mlp", "hidden": 1024}, (1, 28, 28), 10, 803_840, 1_863_690, 1024),
        ({"encoder": "lenet", "hidden": 1024}, (1, 28, 28), 10, 198_948, 1_258_798, 1024),
        ({"encoder": "lenet", "hidden": 1024}, (3, 32, 32), 10, 1_746_752, 2_806_602, 1024),
        ({"encoder": "lenet", "hidden": 1024}, (3, 32, 32), 100, 1_746_752, 2_898_852, 1024),
    ],
)
def test_parameter_counts_are_the_published_ones(keys, shape, classes, encoder, total, dim):
    with torch.device("meta"):  # no numbers are drawn
        net = Net(Model(**keys), shape, classes)
    assert (parameters(net.encoder), parameters(net), net.dim) == (encoder, total, dim)


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize(
    ("encoder", "positions"), [("resnet18", 1), ("resnet18_nopool", 4), ("resnet18_3x3", 16), ("lenet", 1)]
)
def test_positions_of_small_images(encoder, positions, size):
    with torch.device("meta"):
        assert Net(Model(encoder=encoder), (1, size, size), 10).positions == positions


@pytest.mark.parametrize(
    ("encoder", "shape"), [("pixel_mlp", (1, 12, 12)), ("lenet", (1, 28, 28)), ("lenet", (3, 32, 32))]
)
def test_fedcr_networks_equal_their_published_layers(encoder, shape):
    """Each convolution has a ReLU before its pooling, and each hidden layer has a ReLU."""
    net, x = Net(Model(encoder=encoder, hidden=16), shape, 10).eval(), torch.randn(3, *shape)
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    *linear, last = linear_layers(net)
    twin = GaussianNet(net, 8, hidden=True)
    logits, means = net(x), twin.distribution(x).mean
    for convolution in convolutions:
        x = torch.nn.functional.max_pool2d(convolution(x).relu(), 2)
    x = x.flatten(1)
    for layer in linear:
        x = layer(x).relu()
    torch.testing.assert_close(logits, last(x))
    torch.testing.assert_close(means, twin.gaussian(x)[:, :8])


@pytest.mark.parametrize(("size", "tokens"), [(28, 3), (32, 4)])
def test_cnn_token_grid(size, tokens):
    net = Net(TINY, (1, size, size), 10).eval()
    assert net.tokens(torch.zeros(2, 1, size, size)).shape == (2, tokens, tokens, 16)


@pytest.mark.parametrize(
    ("pooled", "inputs", "positions"), [(False, 9 * 16, 9), (True, 16, 1)], ids=["tokens", "pooled"]
)
def test_features_are_per_position_or_their_mean(pooled, inputs, positions):
    net = Net(TINY.model_copy(update={"pooled": pooled}), (1, 28, 28), 10).eval()
    images = torch.randn(2, 1, 28, 28)
    assert (net.positions, net.head.fc1.in_features) == (positions, inputs)
    expected = net.encoder(images).permute(0, 2, 3, 1)
    expected = expected.mean((1, 2), keepdim=True) if pooled else expected
    torch.testing.assert_close(net.tokens(images), expected)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("pooled", [False, True], ids=["tokens", "pooled"])
def test_segments_are_contiguous_parts_of_a_token(segments, pooled):
    net = Net(TINY.model_copy(update={"pooled": pooled}), (1, 28, 28), 10).eval()
    tokens, codebook = net.tokens(torch.randn(3, 1, 28, 28)).detach(), torch.randn(5, 16 // segments)
    out = Quantizer()(tokens, codebook)
    pieces = tokens.reshape(-1, 16 // segments)
    nearest = torch.cdist(pieces.double(), codebook.double()).argmin(1)
    assert torch.equal(out.values, codebook[nearest].reshape(tokens.shape))
    assert torch.equal(out.codes, nearest.reshape(3, -1))
    assert out.codes.shape == (3, net.positions * segments)


def small_images(*sizes):
    """Return a federation with one client for each number of training images, of 3 x 32 x 32 pixels."""

    def split(n):
        pixels = torch.arange(n * 3 * 32 * 32).reshape(n, 3, 32, 32).mul(37).to(torch.uint8)
        return Split(pixels, torch.arange(n) % 3)

    clients = tuple(
        ClientData.of(f"silo-{i}", LabeledData(split(n), split(3), split(3))) for i, n in enumerate(sizes)
    )
    return Federation(
        "labeled", clients, ("a", "b", "c"), (3, 32, 32), (0.5,) * 3, (0.3,) * 3, digest="small"
    )


@pytest.mark.parametrize(
    "encoder",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16_bn", "resnet18")), "resnet18_nopool"],
)
def test_the_large_encoders_train_on_a_last_batch_of_one(encoder):
    """Nine images in batches of eight are so small that batch norm would see one value per channel."""
    own_head = encoder == "resnet18_nopool"
    base = KEYS | {"model": {"encoder": encoder} | ({} if own_head else {"hidden": 16})}
    one, _, _ = arm(
        settings("fedavg" if own_head else "uefl", base, rounds=[1], batch_size=8, passes=2), small_images(9)
    )
    before = values(one).clone()
    one.turn()
    (record,) = one.turn()
    assert record["steps"] == 1
    assert 0 < record["train_loss"] < 10
    assert not torch.equal(values(one), before)


def test_batch_norm_refuses_a_client_of_one_image():
    clients = small_images(3, 1)
    for encoder, refused in (("resnet18", True), ("cnn", False)):
        workspace = workspace_of(settings("fedavg", encoder=encoder, width=128 if refused else 4), clients)
        with pytest.raises(UserError, match=r"client 'silo-1' .*training") if refused else nullcontext():
            workspace.algorithm.check(clients, "fedavg", workspace.net)


OURS = {name: kind for name, kind in registry().items() if kind.__module__.startswith("uefl.")}


@pytest.mark.parametrize(
    "name", [name for name, kind in OURS.items() if kind.kind == "labeled" and kind.trains_clients]
)
def test_every_algorithm_refuses_a_client_of_one_image(name):
    """After the encoder, batch norm would see one value per channel."""
    fed = federation(sizes=(48, 1), noise=(0.1, 0.1))
    workspace = workspace_of(settings(name), fed)
    net = getattr(workspace.net, "net", workspace.net)  # FedGate wraps it in another network
    net.encoder = torch.nn.Sequential(net.encoder, torch.nn.BatchNorm2d(16))
    with pytest.raises(UserError, match=r"client 'silo-1' .*training"):
        workspace.algorithm.check(fed, "arm", workspace.net)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Write random weights in the format of torchvision's files, for VGG without its large classifier."""
    from torchvision.models import resnet18
    from torchvision.models.vgg import cfgs, make_layers

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("weights")
    files = {"resnet18": folder / "resnet18-f37072fd.pth", "vgg16_bn": folder / "vgg16_bn-6c64b313.pth"}
    torch.save(resnet18().state_dict(), files["resnet18"])
    torch.save(
        {f"features.{name}": tensor for name, tensor in make_layers(cfgs["D"], True).state_dict().items()},
        files["vgg16_bn"],
    )
    return files


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["resnet18", pytest.param("vgg16_bn", marks=pytest.mark.slow)])
def test_pretrained_encoders_see_gray_as_three_channels(encoder, imagenet):
    gray = torch.randn(2, 1, 32, 32)
    one, three = (
        Net(Model(encoder=encoder, pretrained=str(imagenet[encoder])), (c, 32, 32), 10).double().eval()
        for c in (1, 3)
    )
    torch.testing.assert_close(one.tokens(gray.double()), three.tokens(gray.double().expand(-1, 3, -1, -1)))
    first = next(tensor for name, tensor in torch.load(imagenet[encoder]).items() if name.endswith("weight"))
    assert torch.equal(next(three.encoder.parameters()).float(), first)


def test_pretrained_weights_come_from_the_cache_only(imagenet, monkeypatch, tmp_path):
    cache = tmp_path / "checkpoints"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"https://download.pytorch.org/models/resnet18-f37072fd.pth .* /"):
        Net(Model(encoder="resnet18", pretrained=True), (3, 32, 32), 10)
    cache.mkdir()
    (cache / imagenet["resnet18"].name).symlink_to(imagenet["resnet18"])
    from_cache, from_file = (
        Net(Model(encoder="resnet18", pretrained=p), (3, 32, 32), 10)
        for p in (True, str(imagenet["resnet18"]))
    )
    assert all(map(torch.equal, from_cache.encoder.parameters(), from_file.encoder.parameters()))


def test_a_file_of_other_weights_is_refused(imagenet, tmp_path):
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for name, said in (
        (str(tmp_path / "absent.pth"), r"absent\.pth"),
        (str(tmp_path / "text.pth"), r"text\.pth .*weights"),
        (str(tmp_path / "list.pth"), r"list\.pth.*\blist$"),
        (str(imagenet["vgg16_bn"]), r"'conv1.weight' .*\[64, 3, 7, 7\], .*none"),
    ):
        with pytest.raises(UserError, match=said):
            Net(Model(encoder="resnet18", pretrained=name), (3, 32, 32), 10)
    with pytest.raises(UserError, match=r"^key 'model.pretrained': .*\b3 channels .*\b1, .*\b2;"):
        Net(Model(encoder="resnet18", pretrained=str(imagenet["resnet18"])), (2, 32, 32), 10)


def test_resnet18_takes_gray_images():
    net = Net(Model(encoder="resnet18"), (1, 28, 28), 10).eval()
    assert net.tokens(torch.zeros(1, 1, 28, 28)).shape == (1, 1, 1, 512)


def test_images_too_small_for_the_encoder():
    for encoder, size in (("cnn", 4), ("lenet", 12)):
        with pytest.raises(UserError, match=rf"\b1 x {size} x {size} .*encoder '{encoder}'.*image_size"):
            Net(TINY.model_copy(update={"encoder": encoder}), (1, size, size), 10)


def test_one_token_has_one_output_per_codeword():
    torch.manual_seed(0)
    net, images = Net(TINY, (1, 8, 8), 3).eval(), torch.randn(200, 1, 8, 8)
    codebook = net.tokens(images[:5]).detach().reshape(5, 16)
    quantizer = Quantizer()
    logits = net.classify(quantizer(net.tokens(images), codebook).values)
    known = net.classify(
        quantizer(net.tokens(images[:5]), codebook).values
    )  # products are computed in blocks of rows, and rounding differs between blocks
    assert (torch.cdist(logits, known, compute_mode="donot_use_mm_for_euclid_dist") < 1e-5).sum(
        1
    ).tolist() == [1] * 200
    assert float(torch.nn.functional.pdist(known).min()) > 1e-3


def test_the_small_network_equals_its_blocks():
    net, x = Net(TINY, (1, 12, 12), 10).encoder, torch.randn(6, 1, 12, 12)
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_that_a_step_frees_is_there_for_the_next_one():
    workspace_of(settings())

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [torch.ones(2**20) for _ in range(5)]
        assert len(pieces) == 5  # 20 MB
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    step()
    assert min(step() for _ in range(3)) < 500  # the tensors have 5120 pages


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


def test_gradients_are_parts_of_the_flat_one_or_their_own():
    flat = FlatModule(Net(TINY, (1, 8, 8), 3))
    images, labels, found = torch.randn(8, 1, 8, 8), torch.arange(8) % 3, []
    for share in (True, False, True):
        flat.share_gradient(share)
        flat.gradient.zero_()
        torch.manual_seed(0)
        torch.nn.functional.cross_entropy(flat.module(images), labels).backward()
        if not share:
            flat.gather_gradients()
        assert bool(flat.gradient.any()) == share
        found.append(torch.cat([p.grad.flatten() for p in flat.module.parameters()]))
        memory = {p.grad.untyped_storage().data_ptr() for p in flat.module.parameters()}
        assert (memory == {flat.gradient.untyped_storage().data_ptr()}) == share
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    flat.share_gradient(False)
    flat.values.square().sum().backward()
    flat.gather_gradients()  # the loss used the flat parameters
    assert all(torch.equal(p.grad, 2 * p.detach()) for p in flat.module.parameters())
    flat.drop_gradients()
    flat.gather_gradients()  # the loss used no parameter of the network
    assert all(not p.grad.any() for p in flat.module.parameters())


def test_private_parts_are_found_by_name_and_layer():
    flat = FlatModule(Net(TINY, (1, 8, 8), 3))
    assert flat.private(lambda name, owner: False) is None
    values, buffers = flat.private(lambda name, owner: isinstance(owner, torch.nn.BatchNorm2d))
    assert int(buffers.sum()) == len(buffers) == len(flat.buffers)
    assert int(values.sum()) == len(buffers)  # scale and shift have the size of means and variances
    values, buffers = flat.private(lambda name, owner: name.startswith("head.fc2."))
    assert (int(values.sum()), int(buffers.sum())) == (16 * 3 + 3, 0)
    named = flat.named(values.float(), buffers.float())
    assert {name for name, piece in named.items() if piece.any()} == {"head.fc2.weight", "head.fc2.bias"}


def test_flat_module_set_changes_the_module_in_place():
    net = Net(TINY, (1, 8, 8), 3)
    flat = FlatModule(net)
    pointers = [p.data_ptr() for p in net.parameters()]
    flat.set(torch.full_like(flat.values, 2.0), torch.full_like(flat.buffers, 3.0))
    assert [p.data_ptr() for p in net.parameters()] == pointers
    assert all(bool((p == 2).all()) for p in net.parameters())
    assert all(bool((b == 3).all()) for b in net.buffers() if b.is_floating_point())


def test_weights_can_be_loaded_into_a_copy():
    """This is the recipe of docs/algorithms.md for a second model."""
    flat = FlatModule(Net(TINY, (1, 8, 8), 3))
    before, other = flat.values.detach().clone(), copy.deepcopy(flat.module)
    other.load_state_dict(
        flat.named(torch.full_like(before, 2.0), torch.full_like(flat.buffers, 3.0)), strict=False
    )
    assert all(bool((p == 2).all()) for p in other.parameters())
    assert all(bool((b == 3).all()) for b in other.buffers() if b.is_floating_point())
    assert torch.equal(flat.values, before)


def fedul_net(image_shape, **keys):
    return Net(Model(**{"encoder": "cnn5x5"} | keys), image_shape, 10)


def test_fedul_networks_have_their_published_sizes():
    for image_shape in ((1, 28, 28), (3, 28, 28)):
        net = fedul_net(image_shape, width=64)
        assert sum(p.numel() for p in net.parameters()) == 14_219_210
        assert sum(b.numel() for b in net.buffers() if b.is_floating_point()) == 5_632
    assert (
        sum(p.numel() for p in fedul_net((3, 32, 32), encoder="resnet18_nopool").parameters()) == 11_181_642
    )


def test_a_gray_image_is_three_equal_channels_at_the_cost_of_one():
    net = fedul_net((1, 28, 28), width=4).double().train()
    gray = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    results = []
    for x in (gray, gray.expand(-1, 3, -1, -1)):
        net.zero_grad()
        logits = net(x)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in net.parameters())])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three, atol=1e-9, rtol=1e-9)


def test_resnet_without_pool_keeps_small_images_large():
    net = fedul_net((3, 32, 32), encoder="resnet18_nopool")
    assert net.tokens(torch.zeros(2, 3, 32, 32)).shape == (2, 2, 2, 512)


class TiedNet(torch.nn.Module):
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


def test_a_flat_module_has_state_dict_names_and_trained_parts():
    module = TiedNet()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = FlatModule(module)
    named = flat.named(flat.values.detach(), flat.buffers)
    assert set(named) == {name for name, tensor in before.items() if tensor.is_floating_point()}
    assert all(torch.equal(named[name], before[name]) for name in named)
    assert [p is not module.fixed.weight for p in module.parameters()].count(True) == len(flat.trained)
    assert all(p.requires_grad for p in flat.trained)
    assert len(flat.values) == 16 + 16 + 8 + 15
    module.norm(torch.randn(5, 4))
    assert int(module.norm.num_batches_tracked) == 1
    flat.reset()
    assert int(module.norm.num_batches_tracked) == 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adam"])
def test_unusual_network_trains_and_frozen_parts_stay(optimizer, tmp_path):
    training = {"rounds": [2], "local_epochs": 1, "weight_decay": 0.1, "optimizer": optimizer}
    sections = {"run": {"threads": 1, "passes": 2}, "training": training}
    data = {"clients": 2, "train_per_client": 40, "test_per_client": 10}
    net = OddDigits()
    fixed = net.fixed.weight.clone()
    run = uefl.train(sections | {"data": data, "arms": {"fedavg": {}}}, out=tmp_path / "run", model=net)
    trained = run.model("fedavg").members[0].net
    assert torch.equal(trained.fixed.weight, fixed)
    assert not torch.equal(trained.first.weight, net.first.weight)
    assert trained.second.weight is trained.first.weight


class OddDigits(TiedNet):
    """A ``TiedNet`` for the ten digits, whose last layer has two names."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 10)
        self.same = self.out


def test_batch_statistics_leave_batch_norm_as_it_was():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, track_running_stats=False))
    mean = net[0].running_mean
    with BatchStatistics(net):
        assert net.eval()(torch.full((2, 3), 5.0)).abs().max() < 1e-2  # normalized by the batch
    assert [norm.track_running_stats for norm in net] == [True, False]
    assert net[0].running_mean is mean
    assert torch.equal(mean, torch.zeros(3))
    freeze_batch_norm(net)
    with BatchStatistics(net):
        assert torch.allclose(net(torch.full((2, 3), 5.0)), torch.zeros(2, 3), atol=1e-2)  # by the second one
        assert torch.allclose(net[0](torch.full((2, 3), 5.0)), torch.full((2, 3), 5.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_frozen_batch_norm_is_frozen(copied):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    names = list(net.state_dict())
    freeze_batch_norm(net)
    other = copied(net).train()
    assert [module.training for module in other] == [False, True]
    assert (type(other[0]), list(other.state_dict())) == (torch.nn.BatchNorm1d, names)
    x = torch.full((2, 3), 5.0)
    assert torch.allclose(other[0](x), x)


class WithStatistics(FedAvg):
    """Begins with statistics as of a pretrained network."""

    def build_model(self, spec):
        net = super().build_model(spec)
        for norm in batch_norms(net):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
        return net


@pytest.mark.parametrize("at_once", [1, 3])
def test_frozen_statistics_stay_and_scales_are_trained(at_once):
    """The sizes are uneven, so that a weighted mean of equal statistics is rounded."""
    cfg = settings("fedavg", frozen_batch_norm=True, clients_at_once=at_once)
    one, workspace, _ = arm(cfg, federation((24, 17, 23)), algorithm=WithStatistics())
    before, _ = one.members[0].network(workspace)
    finish(one)
    after, _ = one.members[0].network(workspace)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "running" in name}


def test_frozen_batch_norm_trains_as_in_evaluation():
    net = workspace_of(
        settings("fedavg", frozen_batch_norm=True, dropout=0.0), algorithm=WithStatistics()
    ).net
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(net.train()(x), net.eval()(x))


@pytest.mark.parametrize(
    ("algorithm", "keys", "said"),
    [
        ("fedavg", {"norm_layer": "group"}, "group"),
        ("fedavg", {"encoder": "lenet", "width": 128}, "lenet"),
        ("fedbn", {}, "fedbn"),
    ],
)
def test_frozen_batch_norm_without_effect_is_refused(algorithm, keys, said):
    with pytest.raises(UserError, match=rf"^key 'model\.frozen_batch_norm': .*{said}.*got True$"):
        arm(settings(algorithm, frozen_batch_norm=True, **keys))[1].algorithm.check(federation(), "arm", None)


def test_a_given_network_without_batch_norm_cannot_freeze_it():
    with pytest.raises(UserError, match=r"^key 'model\.frozen_batch_norm'"):
        freeze_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(3, track_running_stats=False)))
