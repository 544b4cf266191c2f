"""Federations of labeled images: order of dealt images, splits, mean and deviation, own clients."""

import numpy as np
import pytest
import torch

from uefl.data import Sizes, Split, build
from uefl.data.rotate import rotate
from uefl.data.settings import Data
from uefl.data.sources.digits import digits
from uefl.data.sources.mnist import mnist
from uefl.data.sources.own_folder import read as read_folder
from uefl.errors import UserError

from .common import labeled, load, pairs, same, split_of, whole

NINE = (0, 0, 0, -50, -50, -50, 120, 120, 120)


def test_demo_is_nine_clients_of_rotated_digits():
    federation = labeled(clients=9, angles=NINE, train_per_client=400, test_per_client=100)
    assert [client.name for client in federation.clients] == [f"silo-{i}" for i in range(9)]
    assert federation.shape == (1, 28, 28)
    assert federation.kind == "labeled"
    table = digits()
    for i, (client, angle) in enumerate(zip(load(federation), NINE, strict=True)):
        assert (len(client.train), len(client.holdout), len(client.test)) == (360, 40, 100)
        train, test = (
            split_of(table, table.train[500 * i + a : 500 * i + b]) for a, b in ((0, 400), (400, 500))
        )
        assert pairs(client.train, client.holdout) == pairs(Split(rotate(train.images, angle), train.labels))
        assert same(client.test, Split(rotate(test.images, angle), test.labels))


def test_sizes_are_known_before_a_pixel_is_read():
    for client in labeled(clients=3).clients:
        data = client.load()
        assert client.sizes == Sizes.of(data) == Sizes(18, 2, 10)
        assert same(client.load().train, data.train)


def test_each_angle_covers_consecutive_clients():
    named, short = labeled(clients=9, angles=NINE), labeled(clients=9, angles=[0, -50, 120])
    for a, b in zip(load(named), load(short), strict=True):
        assert same(a.train, b.train)
        assert same(a.test, b.test)


def test_imbalanced_rotations_turn_one_client_each():
    plain, turned = load(labeled(clients=5)), load(labeled(angles=[0, 0, 0, -50, 120]))
    # the paper's angles and numbers are the defaults
    named = load(labeled(partition={"scheme": "imbalanced"}))
    for i, angle in enumerate((0, 0, 0, -50, 120)):
        assert torch.equal(turned[i].train.images, rotate(plain[i].train.images, angle))
        assert torch.equal(turned[i].train.labels, plain[i].train.labels)
        assert same(named[i].train, turned[i].train)


def test_dealt_clients_share_no_image():
    images = [image for client in load(labeled(clients=6)) for image, _ in whole(client)]
    assert len(set(images)) == len(images) == 180


def test_seed_changes_the_holdout_and_not_the_silo():
    first, again, other = (labeled(clients=2, seed=seed) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    for a, b, c in zip(load(first), load(again), load(other), strict=True):
        assert same(a.train, b.train)
        assert same(a.holdout, b.holdout)
        assert pairs(a.train, a.holdout) == pairs(c.train, c.holdout)
        assert same(a.test, c.test)
    assert not all(same(a.holdout, c.holdout) for a, c in zip(load(first), load(other), strict=True))
    assert first.mean == other.mean
    assert first.std == other.std


@pytest.mark.parametrize(
    ("share", "count"), [(0.1, 2), (0.5, 10), (0.001, 1)], ids=["tenth", "half", "at-least-one"]
)
def test_holdout_share(share, count):
    client = load(labeled(clients=2, holdout=share))[0]
    assert (len(client.train), len(client.holdout)) == (20 - count, count)


def test_holdout_that_takes_everything_is_refused():
    with pytest.raises(UserError, match=r"client 'silo-0': holdout = 0.99 .*\b20 training"):
        labeled(clients=2, holdout=0.99)


def test_mean_and_deviation_over_the_training_images():
    federation = labeled(angles=[0, 120])
    parts = [split.images for client in load(federation) for split in (client.train, client.holdout)]
    images = torch.cat(parts).double() / 255
    assert federation.mean == pytest.approx([images.mean().item()], rel=1e-12)
    assert federation.std == pytest.approx([images.std(correction=0).item()], rel=1e-12)


def test_mean_and_deviation_per_channel_and_a_constant_channel(make_npz):
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 5, 3), dtype=np.uint8)
    images[..., 1] = 51
    federation = labeled(make_npz(images=images, test=np.arange(40) % 5 == 0))
    chosen = images[np.arange(40) % 5 != 0] / 255
    assert federation.mean == pytest.approx(chosen.mean((0, 1, 2)), rel=1e-12)
    deviation = chosen.std((0, 1, 2))
    assert federation.std == pytest.approx([deviation[0], 1 / 255, deviation[2]], rel=1e-12)


def test_names_of_ten_clients_sort_as_numbers():
    names = [client.name for client in labeled(clients=11).clients]
    assert names == sorted(names)
    assert names[0] == "silo-00"
    assert names[-1] == "silo-10"


def test_legacy_holdout_and_center_equal_the_published_ones():
    published = load(labeled(angles=[0, 120], legacy_center=True, legacy_holdout=True))
    plain = load(labeled(clients=2))
    for client, upright in zip(published, plain, strict=True):
        assert len(client.train) == 20
        assert same(client.holdout, client.test)
        assert torch.equal(client.test.labels, upright.test.labels)
    assert torch.equal(published[0].test.images, plain[0].test.images)
    assert torch.equal(published[1].test.images, rotate(plain[1].test.images, 120, legacy_center=True))
    assert not torch.equal(published[1].test.images, rotate(plain[1].test.images, 120))


def test_mnist_keeps_its_own_splits_in_file_order(idx_root, monkeypatch):
    table = mnist(idx_root)
    given = load(labeled("mnist", clients=2, data_root=idx_root))
    monkeypatch.setenv("UEFL_DATA", str(idx_root))
    for client, named in zip(load(labeled("mnist", clients=2)), given, strict=True):
        assert whole(client) == whole(named)
    assert pairs(given[1].train, given[1].holdout) == pairs(split_of(table, np.arange(20, 40)))
    assert same(given[1].test, split_of(table, np.arange(50, 60)))


def test_first_classes_leave_the_others_out():
    federation = labeled(clients=2, first_classes=3)
    assert federation.classes == ("0", "1", "2")
    for client in load(federation):
        assert client.train.labels.unique().tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"key 'first_classes': .*\b10, .*digits; got 11"):
        labeled(clients=2, first_classes=11)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clients": 200}, r"\b200 clients.*train_per_client = 20 .*test_per_client = 10 .*\b6000 .*\b5000"),
        ({"source": "mnist", "clients": 3}, r"\b60 training .*mnist.*\b40"),
        ({"source": "mnist", "test_per_client": 11, "clients": 2}, r"\b22 test .*mnist.*\b20"),
        ({"source": "minst"}, "'minst'.*digits, emnist_letters, .*'mnist'.*file"),
        ({"source": " "}, "key 'source': .*empty"),
        ({}, "key 'clients': .*digits"),
        (
            {"clients": 3, "angles": [0, 90]},
            r"key 'data.partition.angles': .*\b3 angles .*client.* 2: \[0.0, 90.0\].*\b2 clients",
        ),
        (
            {"partition": {"scheme": "imbalanced"}, "clients": 4},
            r"key 'clients': .*\b5, .*clients_per_angle, .*\b4$",
        ),
    ],
    ids=["digits", "train", "test", "no-such-data", "blank", "no-clients", "angles", "imbalanced"],
)
def test_too_little_or_unknown_data_is_refused(idx_root, keys, message):
    with pytest.raises(UserError, match=message) as error:
        labeled(**keys, data_root=idx_root)
    assert "\n" not in str(error.value)


def test_error_without_mnist_names_the_fetch_command(monkeypatch):
    monkeypatch.delenv("UEFL_DATA", raising=False)
    with pytest.raises(UserError, match=r"--data-root.*UEFL_DATA"):
        labeled("mnist", clients=2)


def test_own_clients_keep_their_number_size_and_angle(make_images):
    for client, count in (("a", 6), ("b", 12), ("c", 30)):
        root = make_images(f"{client}/cat", f"{client}/dog", count=count, size=(8, 8))
    clients = load(labeled(root))
    assert [len(s.train) + len(s.holdout) + len(s.test) for s in clients] == [12, 24, 60]
    # a third of the images, because 10 is a third of 20 + 10
    assert [len(s.test) for s in clients] == [4, 8, 20]
    table = read_folder(root)
    assert [whole(client) for client in clients] == [
        pairs(split_of(table, table.of_group(name)[0])) for name in "abc"
    ]


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "npz"])
def test_keys_of_clients_that_are_dealt_are_refused(make_images, make_npz, folder):
    path = make_images("a/cat", "a/dog", "b/cat", "b/dog") if folder else make_npz()
    with pytest.raises(UserError, match=r"key 'clients': .*\b2 clients.*\b5$"):
        labeled(path, clients=5)
    assert len(labeled(path, clients=2).clients) == 2
    with pytest.raises(UserError, match=r"partition 'rotations'.*clients.*partition"):
        labeled(path, angles=[90.0, 0.0])


def test_a_data_set_has_no_clients_of_its_own():
    with pytest.raises(UserError, match=r"partition 'natural'.*digits"):
        labeled(clients=2, partition={"scheme": "natural"})


@pytest.mark.parametrize("seed", range(5))
def test_own_split_takes_its_share_of_every_class(make_npz, seed):
    labels = np.array([0] * 19 + [1] * 12 + [2] * 8 + [3])
    client = load(labeled(make_npz(labels=labels, silo=np.zeros(40, int)), seed=seed))[0]
    assert len(client.test) == round(40 / 3)
    share = np.bincount(labels) / 3
    assert (np.abs(client.test.labels.bincount(minlength=4).numpy() - share) < 1).all()


def test_own_split_is_seeded(make_npz):
    path = make_npz()
    first, again, other = (load(labeled(path, seed=seed))[0] for seed in (0, 0, 1))
    assert same(first.test, again.test)
    assert same(first.train, again.train)
    assert pairs(first.test) != pairs(other.test)
    assert whole(first) == whole(other)


def test_given_test_split_does_not_depend_on_the_seed(make_npz):
    mask = np.arange(40) % 5 == 0
    path = make_npz(test=mask)
    labels = (np.arange(40) % 4)[mask].tolist()
    for seed in (0, 1):
        north, south = load(labeled(path, seed=seed))
        assert south.test.labels.tolist() + north.test.labels.tolist() == labels


def test_image_size_resizes_every_source(make_npz):
    assert labeled(make_npz(), image_size=12).shape == (1, 12, 12)
    federation = labeled(clients=2, image_size=14)
    assert federation.shape == (1, 14, 14)
    assert load(federation)[0].test.images.shape == (10, 1, 14, 14)


def test_images_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 2**16 if name == "SC_PAGE_SIZE" else 2**10)
    with pytest.raises(UserError, match=r"^900 images.*\b1 x 1000 x 1000 .*\b1 GB, .*\b0 GB; .*image_size$"):
        labeled(clients=30, image_size=1000)


def test_npz_pool_is_dealt_and_turned(make_npz):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        # sorted by class: without a shuffle, each client would have images of one class
        "y_train": np.arange(40) // 20,
        "x_test": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_test": np.arange(20) // 10,
    }
    path = make_npz(images=None, labels=None, silo=None, **arrays)
    plain, turned = load(labeled(path, clients=2)), load(labeled(path, angles=[0, 90]))
    assert [len(client.test) for client in plain] == [10, 10]
    assert torch.equal(turned[1].test.images, torch.rot90(plain[1].test.images, 1, (-2, -1)))
    dealt = [pair for client in plain for pair in pairs(client.train, client.holdout)]
    assert sorted(dealt) == sorted(
        (image.tobytes(), int(y)) for image, y in zip(arrays["x_train"], arrays["y_train"], strict=True)
    )


def test_client_of_one_class_is_refused(make_images):
    with pytest.raises(UserError, match=r"client 'a': .*\b3 training.*class 'cat'"):
        labeled(make_images("a/cat", "b/cat", "b/dog"))


@pytest.mark.parametrize("everything_is_test", [True, False], ids=["no-train", "no-test"])
def test_client_with_an_empty_split_is_refused(make_npz, everything_is_test):
    mask = np.full(40, everything_is_test)
    with pytest.raises(UserError, match=r"client 'north': (0 training .*20 test|20 training .*0 test)"):
        labeled(make_npz(test=mask))


def test_a_client_is_read_without_the_others(make_images):
    root = make_images("a/cat", "a/dog", "b/cat", "b/dog")
    federation = labeled(root)
    for path in (root / "b").rglob("*.png"):
        path.unlink()
    assert len(federation.clients[0].load().train) == 6
    with pytest.raises(UserError, match=r": .*silos/b/"):
        federation.clients[1].load()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"labeled": 5}, r"key 'labeled': .*default 0, .*unlabeled.*\b5"),
        ({"strict": True}, "key 'strict': .*default False"),
        ({"partition": {"scheme": "unlabeled"}}, "partition 'unlabeled'.*arms.* lab"),
    ],
)
def test_keys_of_unlabeled_sets_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        labeled(clients=2, **keys)


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "name", "classes"), [("gtsrb32_subset.npz", "gtsrb", 43), ("cifar10_subset.npz", "cifar10", 10)]
)
def test_real_npz_is_dealt(data_root, file, name, classes):
    federation = labeled(data_root / file, angles=[0, 0, 15], train_per_client=800, test_per_client=200)
    by_name = labeled(name, angles=[0, 0, 15], data_root=data_root)
    assert federation.shape == by_name.shape == (3, 32, 32)
    assert len(federation.classes) == classes
    assert any(file in note for note in by_name.notes)
    assert all(len(client.train.labels.unique()) > classes * 0.8 for client in load(federation))


@pytest.mark.data
def test_real_folder_of_clients(data_root, tmp_path):
    import tarfile

    with tarfile.open(data_root / "pacs64.tar") as archive:
        members = [m for m in archive.getmembers() if m.isfile()][::40]
        archive.extractall(tmp_path, members, filter="data")
    federation = labeled(tmp_path / "pacs64")
    assert [client.name for client in federation.clients] == ["art_painting", "cartoon", "photo", "sketch"]
    assert federation.shape == (3, 64, 64)
    assert sum(s.sizes.train + s.sizes.holdout + s.sizes.test for s in federation.clients) == len(members)


def test_the_default_needs_only_clients():
    assert len(build(Data(clients=2), kind="labeled", seed=0).clients) == 2
