import numpy as np
import pytest
import torch

from uefl import config
from uefl.data.build import build_silos
from uefl.data.rotate import rotate
from uefl.data.silo import Split
from uefl.data.old.sources import digits, idx_files
from uefl.errors import UserError


def settings(data="digits", **keys):
    rotations = keys.get("rotations", [])
    small = {"rotations": rotations, "clients": len(rotations) or 2, "train_per_client": 20, "test_per_client": 10}
    return config.from_table({"data": str(data), **small, **keys})


def own(data, **keys):
    """Silos of the user's own: a folder, or an .npz that names them."""
    return settings(data, clients=9, **keys)


def pairs(*splits):
    """Images with their labels, sorted: what the splits hold, whatever the order."""
    return sorted(
        (image.numpy().tobytes(), int(label)) for split in splits for image, label in zip(split.images, split.labels, strict=True)
    )


def whole(silo):
    return pairs(silo.train, silo.holdout, silo.test)


def same(a, b):
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def test_demo_is_nine_silos_of_rotated_digits():
    demo = config.load("demo")
    federation = build_silos(demo)
    assert [silo.name for silo in federation.silos] == [f"silo-{i}" for i in range(9)]
    assert federation.image_shape == (1, 28, 28)
    pool = digits().train
    for i, (silo, angle) in enumerate(zip(federation.silos, demo.rotations, strict=True)):
        assert (len(silo.train), len(silo.holdout), len(silo.test)) == (360, 40, 100)
        part = slice(500 * i, 500 * i + 400)
        assert pairs(silo.train, silo.holdout) == pairs(Split(rotate(pool.images[part], angle), pool.labels[part]))
        part = slice(500 * i + 400, 500 * i + 500)
        assert same(silo.test, Split(rotate(pool.images[part], angle), pool.labels[part]))


def test_imbalanced_rotations_turn_one_silo_each():
    plain = build_silos(settings(rotations=[0, 0, 0, 0, 0]))
    turned = build_silos(settings(rotations=[0, 0, 0, -50, 120]))
    for i, angle in enumerate((0, 0, 0, -50, 120)):
        assert torch.equal(turned.silos[i].train.images, rotate(plain.silos[i].train.images, angle))
        assert torch.equal(turned.silos[i].train.labels, plain.silos[i].train.labels)


def test_dealt_silos_share_no_image():
    federation = build_silos(settings(clients=6))
    images = [image for silo in federation.silos for image, _ in whole(silo)]
    assert len(set(images)) == len(images) == 180


def test_seed_changes_the_holdout_and_not_the_silo():
    first, again, other = (build_silos(settings(seed=seed)) for seed in (0, 0, 1))
    for a, b, c in zip(first.silos, again.silos, other.silos, strict=True):
        assert same(a.train, b.train)
        assert same(a.holdout, b.holdout)
        assert pairs(a.train, a.holdout) == pairs(c.train, c.holdout)
        assert same(a.test, c.test)
    assert not all(same(a.holdout, c.holdout) for a, c in zip(first.silos, other.silos, strict=True))
    assert first.mean == other.mean
    assert first.std == other.std


@pytest.mark.parametrize(("share", "count"), [(0.1, 2), (0.5, 10), (0.001, 1)], ids=["tenth", "half", "at-least-one"])
def test_holdout_share(share, count):
    silo = build_silos(settings(holdout=share)).silos[0]
    assert (len(silo.train), len(silo.holdout)) == (20 - count, count)


def test_holdout_that_takes_everything_is_refused():
    with pytest.raises(UserError, match=r"silo 'silo-0': holdout = 0.99 leaves fewer than two classes of 20 training images"):
        build_silos(settings(holdout=0.99))


def test_mean_and_deviation_over_the_training_images():
    federation = build_silos(settings(rotations=[0, 120]))
    images = torch.cat([split.images for silo in federation.silos for split in (silo.train, silo.holdout)]).double() / 255
    assert federation.mean == pytest.approx([images.mean().item()], rel=1e-12)
    assert federation.std == pytest.approx([images.std(correction=0).item()], rel=1e-12)


def test_mean_and_deviation_per_channel_and_a_constant_channel(make_npz):
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 5, 3), dtype=np.uint8)
    images[..., 1] = 51
    federation = build_silos(own(make_npz(images=images, test=np.arange(40) % 5 == 0)))
    chosen = images[np.arange(40) % 5 != 0] / 255
    assert federation.mean == pytest.approx(chosen.mean((0, 1, 2)), rel=1e-12)
    deviation = chosen.std((0, 1, 2))
    assert federation.std == pytest.approx([deviation[0], 1 / 255, deviation[2]], rel=1e-12)


def test_names_of_ten_silos_sort_as_numbers():
    names = [silo.name for silo in build_silos(settings(clients=11)).silos]
    assert names == sorted(names)
    assert names[0] == "silo-00"
    assert names[-1] == "silo-10"


def test_legacy_measures_on_the_test_split_and_turns_about_the_published_centre():
    legacy = build_silos(settings(mode="legacy", arms=["uefl"], rotations=[0, 120])).silos
    plain = build_silos(settings(rotations=[0, 0])).silos
    for silo, upright in zip(legacy, plain, strict=True):
        assert len(silo.train) == 20
        assert same(silo.holdout, silo.test)
        assert torch.equal(silo.test.labels, upright.test.labels)
    assert torch.equal(legacy[0].test.images, plain[0].test.images)
    assert torch.equal(legacy[1].test.images, rotate(plain[1].test.images, 120, legacy_center=True))
    assert not torch.equal(legacy[1].test.images, rotate(plain[1].test.images, 120))


def test_mnist_keeps_its_own_splits_in_file_order(idx_root, monkeypatch):
    pool = idx_files("MNIST", idx_root)
    given = build_silos(settings("mnist"), data_root=idx_root)
    monkeypatch.setenv("UEFL_DATA", str(idx_root))
    for silo, named in zip(build_silos(settings("mnist")).silos, given.silos, strict=True):
        assert whole(silo) == whole(named)
    second = given.silos[1]
    assert pairs(second.train, second.holdout) == pairs(Split(pool.train.images[20:], pool.train.labels[20:]))
    assert same(second.test, Split(pool.test.images[10:], pool.test.labels[10:]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clients": 200}, "200 clients with train_per_client = 20 and test_per_client = 10 need 6000 images, digits has 5000"),
        ({"data": "mnist", "clients": 3}, "need 60 training images, mnist has 40"),
        ({"data": "mnist", "test_per_client": 11}, "need 22 test images, mnist has 20"),
        ({"data": "minst"}, "'minst' is none of digits, mnist, fashion_mnist, cifar10, and no folder or .npz of that name is there"),
    ],
    ids=["digits", "train", "test", "no-such-data"],
)
def test_too_little_or_unknown_data_is_refused(idx_root, keys, message):
    with pytest.raises(UserError, match=message):
        build_silos(settings(**keys), data_root=idx_root)


def test_mnist_without_a_data_root_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv("UEFL_DATA", raising=False)
    with pytest.raises(UserError, match="--data-root or in UEFL_DATA"):
        build_silos(settings("mnist"))


def test_own_silos_are_as_many_and_as_large_as_they_are_and_not_turned(make_images, tmp_path):
    for silo, count in (("a", 6), ("b", 12), ("c", 30)):
        for label in ("cat", "dog"):
            make_images(f"silos/{silo}/{label}", count=count, size=(8, 8))
    federation = build_silos(own(tmp_path / "silos", rotations=config.Config.rotations))
    assert [len(s.train) + len(s.holdout) + len(s.test) for s in federation.silos] == [12, 24, 60]
    assert [len(s.test) for s in federation.silos] == [4, 8, 20]  # a third, as 10 of 20 + 10
    from uefl.data.old.folder import image_folder

    source = image_folder(tmp_path / "silos").silos
    assert [whole(silo) for silo in federation.silos] == [pairs(source[name][0]) for name in "abc"]


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "npz"])
def test_keys_of_silos_that_are_dealt_are_refused(make_images, make_npz, tmp_path, folder):
    for silo in ("a/cat", "a/dog"):
        make_images(f"silos/{silo}")
    path = tmp_path / "silos" if folder else make_npz()
    with pytest.raises(
        UserError, match=r"key 'clients': expected its default 9, so leave it out: your own silos are as many as .*; got 5$"
    ):
        build_silos(config.from_table({"data": str(path), "clients": 5}))
    with pytest.raises(UserError, match=r"key 'rotations': expected an empty list: your own silos are not turned; got \(90.0, 0.0\)"):
        build_silos(own(path, rotations=[90.0, 0.0]))


def test_rotations_of_an_npz_that_is_dealt_are_one_per_client(make_npz):
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
    path = make_npz(images=None, labels=None, silo=None, x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(UserError, match=r"key 'rotations': expected one angle per client \(3\), or an empty list; got \(90.0,\)"):
        build_silos(settings(path, rotations=[90.0], clients=3))


@pytest.mark.parametrize("seed", range(5))
def test_own_split_takes_its_share_of_every_class(make_npz, seed):
    labels = np.array([0] * 19 + [1] * 12 + [2] * 8 + [3])
    silo = build_silos(own(make_npz(labels=labels, silo=np.zeros(40, int)), seed=seed)).silos[0]
    assert len(silo.test) == round(40 / 3)
    share = np.bincount(labels) / 3
    assert (np.abs(silo.test.labels.bincount(minlength=4).numpy() - share) < 1).all()


def test_own_split_is_seeded(make_npz):
    path = make_npz()
    first, again, other = (build_silos(own(path, seed=seed)).silos[0] for seed in (0, 0, 1))
    assert same(first.test, again.test)
    assert same(first.train, again.train)
    assert pairs(first.test) != pairs(other.test)
    assert whole(first) == whole(other)


def test_given_test_split_is_kept_whatever_the_seed(make_npz):
    mask = np.arange(40) % 5 == 0
    path = make_npz(test=mask)
    labels = (np.arange(40) % 4)[mask].tolist()
    for seed in (0, 1):
        north, south = build_silos(own(path, seed=seed)).silos
        assert south.test.labels.tolist() + north.test.labels.tolist() == labels


def test_image_size_resizes_every_source(make_npz):
    assert build_silos(own(make_npz(), image_size=12)).image_shape == (1, 12, 12)
    assert build_silos(settings(image_size=14)).image_shape == (1, 14, 14)


def test_npz_pool_is_dealt_and_turned(make_npz):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "y_train": np.arange(40) // 20,  # sorted by class: dealt without a shuffle, each silo would have one
        "x_test": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_test": np.arange(20) // 10,
    }
    path = make_npz(images=None, labels=None, silo=None, **arrays)
    plain, turned = build_silos(settings(path)), build_silos(settings(path, rotations=[0, 90]))
    assert [len(silo.test) for silo in plain.silos] == [10, 10]
    assert torch.equal(turned.silos[1].test.images, torch.rot90(plain.silos[1].test.images, 1, (-2, -1)))
    dealt = [pair for silo in plain.silos for pair in pairs(silo.train, silo.holdout)]
    assert sorted(dealt) == sorted((image.tobytes(), int(y)) for image, y in zip(arrays["x_train"], arrays["y_train"], strict=True))


def test_silo_of_one_class_is_refused(make_images, tmp_path):
    make_images("silos/a/cat")
    make_images("silos/b/cat")
    make_images("silos/b/dog")
    with pytest.raises(UserError, match="silo 'a': all 3 training images are of class 'cat'; a silo needs two classes or more"):
        build_silos(own(tmp_path / "silos"))


@pytest.mark.parametrize("everything_is_test", [True, False], ids=["no-train", "no-test"])
def test_silo_with_an_empty_split_is_refused(make_npz, everything_is_test):
    mask = np.full(40, everything_is_test)
    with pytest.raises(UserError, match=r"silo 'north': (0 training and 20 test|20 training and 0 test) images; it needs some of both"):
        build_silos(own(make_npz(test=mask)))


@pytest.mark.data
@pytest.mark.parametrize(("name", "shape"), [("gtsrb32_subset", (3, 32, 32)), ("cifar10_subset", (3, 32, 32))])
def test_real_npz_is_dealt(data_root, name, shape):
    federation = build_silos(settings(data_root / f"{name}.npz", rotations=[0, 0, 15], train_per_client=800, test_per_client=200))
    assert federation.image_shape == shape
    assert len(federation.classes) == (43 if "gtsrb" in name else 10)
    assert all(len(silo.train.labels.unique()) > len(federation.classes) * 0.8 for silo in federation.silos)


@pytest.mark.data
def test_real_folder_of_silos(data_root, tmp_path):
    import tarfile

    with tarfile.open(data_root / "pacs64.tar") as archive:
        members = [m for m in archive.getmembers() if m.isfile()][::40]
        archive.extractall(tmp_path, members, filter="data")
    federation = build_silos(own(tmp_path / "pacs64"))
    assert [silo.name for silo in federation.silos] == ["art_painting", "cartoon", "photo", "sketch"]
    assert federation.image_shape == (3, 64, 64)
    assert sum(len(s.train) + len(s.holdout) + len(s.test) for s in federation.silos) == len(members)
