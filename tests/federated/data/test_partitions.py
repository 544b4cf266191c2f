"""Partitions: label skew in its conventions, classes per client, domains as clients and left out."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from uefl.data import PARTITIONS, Data, Sizes
from uefl.data.dataset import DataSet, numbers
from uefl.data.images import ImageList
from uefl.data.partitions import Scheme, base, dirichlet, partition
from uefl.data.partitions.base import Deal, Share, checked
from uefl.errors import UserError

from .common import labeled, load


def table(train=2000, test=500, classes=10, groups=0):
    """Return a source of random labels without images."""
    count = train + test
    labels = np.random.default_rng(7).integers(0, classes, count)
    labels[:classes] = range(classes)
    images = ImageList(count, 1, np.array([[1, 1]]), SimpleNamespace, SimpleNamespace)
    rows = np.arange(count)
    names = tuple(f"domain-{i}" for i in range(groups))
    of = {"groups": names, "group_of": rows % groups, "undivided": frozenset(names)} if groups else {}
    return DataSet(
        "made", images, labels, numbers(classes), rows[:train], rows[train:] if test else None, **of
    )


def dealt(made, scheme, seed=0, **keys):
    data = Data.model_validate({"train_per_client": 160, "test_per_client": 40, **keys, "partition": scheme})
    return data.partition.deal(made, data, seed)


def matrix(made, deal):
    """Return the number of images of each client and class, ``[clients, classes]``, over all splits."""
    rows = [
        share.train if share.test is None else np.concatenate([share.train, share.test])
        for share in deal.clients
    ]
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))  # no two clients share an image
    return np.array([np.bincount(made.labels[part], minlength=len(made.classes)) for part in rows])


def counted(made, scheme, seed=0, **keys):
    return matrix(made, dealt(made, scheme, seed, **keys))


def skewed(convention, alpha=0.1, **keys):
    return {"scheme": "dirichlet", "convention": convention, "alpha": alpha, **keys}


def without(domain, **keys):
    return {"scheme": "leave_one_out", "domain": f"domain-{domain}", **keys}


def test_every_scheme_describes_its_parameters():
    folder = Path(__file__).parents[3] / "uefl" / "data" / "partitions"
    modules = {path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "base")}
    assert {PARTITIONS[name].__module__.rsplit(".", 1)[1] for name in PARTITIONS} == modules
    for name in PARTITIONS:
        assert PARTITIONS[name].name == name
        assert all(field.description for field in PARTITIONS[name].model_fields.values())


def test_a_scheme_of_your_own(monkeypatch):
    monkeypatch.setattr(PARTITIONS, "_entries", dict(PARTITIONS._all()))

    @partition("every-second")
    class EverySecond(Scheme):
        def deal(self, table, data, seed):
            return base.Deal(tuple(base.Share(f"half-{i}", table.train[i:100:2], None) for i in range(2)))

    federation = labeled(partition={"scheme": "every-second"})
    assert [client.name for client in federation.clients] == ["half-0", "half-1"]
    assert federation.manifest["partition"] == {"scheme": "every-second"}
    assert labeled(clients=2, partition={"scheme": "every-second"}).digest == federation.digest
    with pytest.raises(UserError, match=r"^key 'clients': partition 'every-second' .*\b2; .*\b5$"):
        labeled(clients=5, partition={"scheme": "every-second"})


# --- Dirichlet --------------------------------------------------------------------------------------------

CONVENTIONS = ("over_clients", "over_classes", "over_classes_by_frequency")


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("test", ["own", "even"])
def test_dirichlet_deals_everything_once_and_repeats_itself(convention, test):
    made = table()
    scheme = skewed(convention, 0.5, test=test)
    deal = dealt(made, scheme, clients=10)
    assert matrix(made, deal).sum() == 2000

    assert len(deal.clients) == 10
    again, other = dealt(made, scheme, clients=10), dealt(made, scheme, seed=1, clients=10)
    for a, b in zip(deal.clients, again.clients, strict=True):
        np.testing.assert_array_equal(a.train, b.train)
    assert any(not np.array_equal(a.train, b.train) for a, b in zip(deal.clients, other.clients, strict=True))
    if test == "own":
        assert all(share.test is None for share in deal.clients)
    else:  # test images come from the test part, in equal random parts
        assert [len(share.test) for share in deal.clients] == [40] * 10
        assert min(share.test.min() for share in deal.clients) == 2000
        assert max(share.train.max() for share in deal.clients) < 2000


def test_over_clients_gives_unequal_sizes_with_a_minimum():
    sizes = counted(table(), skewed("over_clients", 0.5), clients=10).sum(1)
    assert sizes.min() >= 10
    assert sizes.max() > 1.3 * sizes.min()


def test_over_clients_stops_at_the_share_of_a_client():
    """A client has at most its share of the images, and then the rest of one class."""
    made = table(2500, 0)
    for seed in range(5):
        counts = counted(made, skewed("over_clients", 0.05), seed, clients=10)
        assert counts.sum(1).max() < 200 + counts.sum(0).max()


@pytest.mark.parametrize("convention", CONVENTIONS[1:])
def test_over_classes_gives_equal_sizes(convention):
    counts = counted(table(), skewed(convention, 0.3), clients=10)
    assert counts.sum(1).tolist() == [200] * 10


def effective(counts):
    """Return the number of classes in effect of a client: exp of the entropy of its shares."""
    shares = counts / counts.sum(1, keepdims=True)
    return np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum(1)).mean()


def test_frequency_makes_one_alpha_far_more_skewed():
    made = table(40_000, 0)

    def skew(convention, alpha):
        small = {"clients": 60, "train_per_client": 80, "test_per_client": 20}
        return effective(counted(made, skewed(convention, alpha), **small))

    assert skew("over_classes", 100.0) > 9.0
    assert skew("over_classes", 0.1) < 0.6 * skew("over_classes", 1.0)
    for alpha in (0.1, 1.0):
        assert skew("over_classes_by_frequency", alpha) < 0.75 * skew("over_classes", alpha)
    # for ten classes of one size, alpha by frequency has the effect of a tenth of alpha by class
    assert skew("over_classes_by_frequency", 1.0) == pytest.approx(skew("over_classes", 0.1), rel=0.1)


def test_drawn_shares_are_exact_if_no_class_runs_short():
    made = table(100_000, 0)
    counts = counted(made, skewed("over_classes", 5.0), clients=4, train_per_client=2000)
    rng = base.generator(0)
    rng.permutation(made.train)
    np.testing.assert_allclose(
        counts / counts.sum(1, keepdims=True), rng.dirichlet(np.full(10, 5.0), 4), atol=0.04
    )


def test_a_class_that_runs_short_is_replaced():
    made = table(1000, 0)
    counts = counted(made, skewed("over_classes", 0.01), clients=5)
    assert counts.sum(1).tolist() == [200] * 5
    np.testing.assert_array_equal(counts.sum(0), np.bincount(made.labels))


@pytest.mark.parametrize(
    ("scheme", "sizes", "message"),
    [
        (skewed("over_clients", 0.001), (50, 30, 10), r"key 'alpha': 20 .*alpha = 0.001 .*\d+ .*\b50\b"),
        (skewed("over_clients"), (10, 4, 1), r"\b50 images .*\b10 clients .*\b10 .*each"),
        (skewed("over_classes"), (15, 160, 40), r"\b3000 images, .*\b2500"),
        ({"scheme": "classes", "per_client": 11}, (2, 160, 40), r"key 'per_client': .*\b10, .*\b11"),
        (
            {"scheme": "classes", "per_client": 1},
            (1, 390, 10),
            r"\b1 clients .*\b1 classes .*\b400 images .*class '0', .*\d+",
        ),
    ],
)
def test_impossible_partitions_by_class_are_refused(monkeypatch, scheme, sizes, message):
    monkeypatch.setattr(dirichlet, "_ATTEMPTS", 20)
    clients, train, test = sizes
    with pytest.raises(UserError, match=message):
        dealt(table(), scheme, clients=clients, train_per_client=train, test_per_client=test)


def test_an_impossible_partition_is_refused_without_a_draw():
    no_generator = None
    with pytest.raises(UserError, match=r"\b3200 images .*\b400 clients .*\b10 images"):
        dirichlet._over_clients(np.arange(3200) % 10, 400, 0.5, 10, no_generator)


def test_an_unlikely_partition_is_refused_after_100_draws():
    with pytest.raises(UserError, match=r"key 'alpha': 100 draws .*\b30 clients .*\b10"):
        dealt(table(360, 0), skewed("over_clients"), clients=30, train_per_client=10, test_per_client=2)
    with pytest.raises(UserError, match=r"key 'alpha': 100 draws .*\b400 clients .*\b10"):
        dealt(table(4000, 0), skewed("over_clients", 0.5), clients=400, train_per_client=8, test_per_client=2)


def test_dirichlet_is_turned_and_may_have_clients_of_one_class():
    scheme = skewed("over_classes_by_frequency", angles=[0, 15, 30])
    federation = labeled(partition=scheme, train_per_client=100, test_per_client=50)
    entries = federation.manifest["silos"]
    assert [entry.get("angle", 0.0) for entry in entries.values()] == [0.0, 15.0, 30.0]
    # realized, for the reader
    counts = np.array([entry["train"]["images_of_class"] for entry in entries.values()])
    labels = [client.train.labels.bincount(minlength=10).tolist() for client in load(federation)]
    assert counts.tolist() == labels
    assert any(re.search(r"client '\S+' .*training .*class '", note) for note in federation.notes)
    assert (counts > 0).sum(1).min() < 5


# --- classes per client -----------------------------------------------------------------------------------


def test_classes_per_client_are_consecutive_and_in_equal_numbers():
    made = table(4000, 1000)
    scheme = {"scheme": "classes", "per_client": 2}
    counts = counted(made, scheme, clients=5, train_per_client=150, test_per_client=51)
    for c, row in enumerate(counts):
        assert np.flatnonzero(row).tolist() == [2 * c, 2 * c + 1]
        assert sorted(row[row > 0]) == [100, 101]
    scheme = {"scheme": "classes", "per_client": 5}
    wide = counted(made, scheme, clients=20, train_per_client=80, test_per_client=20)
    assert ((wide > 0).sum(1) == 5).all()
    assert ((wide > 0).sum(0) == 10).all()  # every class has the same number of clients


def test_one_class_per_client_trains():
    federation = labeled(clients=10, partition={"scheme": "classes", "per_client": 1})
    for k, client in enumerate(load(federation)):
        assert client.train.labels.unique().tolist() == [k]
        assert client.test.labels.unique().tolist() == [k]


# --- domains ----------------------------------------------------------------------------------------------


def test_the_domain_left_out_is_measured_only():
    made = table(groups=6, test=0)
    deal = dealt(made, without(2))
    assert [share.name for share in deal.clients] == [f"domain-{i}" for i in (0, 1, 3, 4, 5)]
    (unseen,) = deal.unseen
    assert unseen.name == "domain-2"
    assert len(unseen.train) == 0
    np.testing.assert_array_equal(np.sort(unseen.test), np.arange(2, 2000, 6))


def test_every_domain_is_turned_by_its_angle():
    made = replace(table(groups=3, test=0), angles={f"domain-{i}": 15.0 * i for i in range(3)})
    deal = dealt(made, without(1), clients=4)
    assert [share.angle for share in deal.clients] == [0.0, 0.0, 30.0, 30.0]
    assert [share.angle for share in deal.unseen] == [15.0]


def test_domains_are_spread_over_several_clients():
    made = table(6000, 0, groups=6)
    deal = dealt(made, without(0), clients=50)
    assert matrix(made, deal).sum() == 5000
    assert [share.name for share in deal.clients][:2] == ["domain-1-0", "domain-1-1"]
    assert {len(share.train) for share in deal.clients} == {100}
    assert all((made.group_of[share.train] == int(share.name.split("-")[1])).all() for share in deal.clients)


def test_number_of_images_per_domain():
    made = replace(table(6000, 600, groups=6), undivided=frozenset())
    deal = dealt(made, without(0, per_domain=200))
    (unseen,) = deal.unseen
    assert {len(share.train) + len(share.test) for share in deal.clients} == {len(unseen.test)} == {200}
    assert all(len(share.train) > len(share.test) > 0 for share in deal.clients)
    rows = np.concatenate(
        [unseen.test, *(part for share in deal.clients for part in (share.train, share.test))]
    )
    assert len(set(rows)) == 1200
    assert all((made.group_of[share.train] == int(share.name[-1])).all() for share in deal.clients)
    assert all(
        set(share.train) <= set(made.train) and set(share.test) <= set(made.test) for share in deal.clients
    )
    spread = dealt(made, without(0, per_domain=200), clients=10)
    assert {len(share.train) + len(share.test) for share in spread.clients} <= set(range(98, 103))
    whole = dealt(table(6000, 0, groups=6), without(0, per_domain=200))
    assert [(len(share.train), share.test) for share in whole.clients] == 5 * [(200, None)]
    everything = dealt(made, without(0, per_domain=9999))
    assert len(everything.unseen[0].test) == 1100


@pytest.mark.parametrize(
    ("groups", "domain", "keys", "message"),
    [
        (6, 9, {}, r"'domain-9' .*'domain-\d'.*domain-0, domain-1"),
        (6, 1, {"clients": 7}, r"key 'clients': .*\b5 domains.*\b7"),
        (1, 0, {}, "domain, 'domain-0'"),
    ],
)
def test_domains_that_are_refused(groups, domain, keys, message):
    with pytest.raises(UserError, match=message):
        dealt(table(groups=groups, test=0), without(domain), **keys)


def test_an_own_client_is_left_out_with_its_own_test_split(make_npz):
    path = make_npz(test=np.arange(40) % 5 == 0)
    federation = labeled(path, partition={"scheme": "leave_one_out", "domain": "north"})
    assert [client.name for client in federation.clients] == ["south"]
    (north,) = federation.unseen
    data = north.load()
    assert north.sizes == Sizes.of(data) == Sizes(0, 0, 20)
    assert data.train.images.shape == (0, 1, 6, 6)
    assert list(federation.manifest["unseen"]) == ["north"]
    assert list(federation.manifest["unseen"]["north"]) == ["test"]
    assert ": north" in federation.describe()
    assert federation.mean != labeled(path).mean  # the domain that is left out is not looked at


@pytest.mark.slow
@pytest.mark.data
def test_rotated_mnist_with_one_domain_left_out_on_fifty_clients(data_root):
    scheme = {"scheme": "leave_one_out", "domain": "rotated-75"}
    keys = {"clients": 50, "train_per_client": 9, "test_per_client": 1}
    federation = labeled("rotated_mnist", partition=scheme, data_root=data_root, **keys)
    assert len(federation.clients) == 50
    assert federation.unseen[0].sizes.test == 11666
    # as in the published protocol
    assert all(abs(client.sizes.train + client.sizes.holdout - 1050) <= 1 for client in federation.clients)


# --- the result of a partition ------------------------------------------------------------------------


ROWS = np.arange(60)


def of_one(train, test, *unseen):
    return Deal((Share("a", train, test),), unseen)


@pytest.mark.parametrize(
    ("deal", "error", "message"),
    [
        (None, TypeError, "partition 'made': .*Deal, got NoneType"),
        (Deal(()), ValueError, "partition 'made': .*client"),
        (of_one(ROWS[:20], ROWS[20:30] - 60), ValueError, r"test .*'a': .*-40 to -31; .*\b0 to 59"),
        (of_one(ROWS[:20] + 50, ROWS[20:30]), ValueError, r"training .*'a': .*\b50 to 69; .*\b0 to 59"),
        (of_one([0, 1], ROWS[20:30]), TypeError, r"NumPy .*\[n\] .*int64; .*list"),
        (of_one(ROWS < 20, ROWS[20:30]), TypeError, r"int64; .*bool \[60\]"),
        (of_one(ROWS[:20], ROWS[20:30], Share("b", ROWS[40:], ROWS[30:40])), ValueError, "'b' .*measured"),
    ],
)
def test_a_deal_that_cannot_be_read_is_refused(deal, error, message):
    with pytest.raises(error, match=message):
        checked(deal, "made", 60)
