"""The manifest: its records, the same for the same data in any folder, and no image in two places."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from uefl.data.manifest import check_disjoint, digest
from uefl.data.sources.digits import digits
from uefl.errors import UserError

from .common import labeled, load, sets
from .test_own_sets import write


def test_manifest_has_the_file_position_of_every_image():
    federation = labeled(angles=[0, 120])
    table, entry = digits(), federation.manifest["silos"]["silo-1"]
    rows = np.array(entry["train"]["indices"])
    client = load(labeled(clients=2))[1]
    np.testing.assert_array_equal(table.images.read(rows, 0).numpy(), client.train.images.numpy())
    np.testing.assert_array_equal(table.labels[rows], client.train.labels.numpy())
    assert entry["angle"] == 120.0
    assert entry["train"]["images_of_class"] == client.train.labels.bincount(minlength=10).tolist()
    partition = {"scheme": "rotations", "angles": [0.0, 120.0], "legacy_center": False}
    assert federation.manifest["partition"] == partition
    assert federation.manifest["source"] == {"name": "digits", "path": "digits", "images": {"train": 5000}}
    assert json.loads(json.dumps(federation.manifest)) == federation.manifest


def test_hash_covers_images_and_labels():
    manifest = labeled(angles=[0, 120]).manifest
    table, entry = digits(), manifest["silos"]["silo-1"]["test"]
    total = hashlib.sha256()
    for row in entry["indices"]:
        total.update(hashlib.sha256(table.images.read(np.array([row]), 0).numpy().tobytes()).digest())
    total.update(table.labels[entry["indices"]].astype("<i8").tobytes())
    assert entry["sha256"] == total.hexdigest()


def test_file_names_do_not_depend_on_the_place_of_the_source(make_images, tmp_path):
    root = make_images("a/cat", "a/dog", "b/train/cat", "b/train/dog", "b/test/cat")
    here = labeled(root)
    shutil.copytree(root, tmp_path / "elsewhere")
    there = labeled(tmp_path / "elsewhere")
    files = here.manifest["silos"]["b"]["test"]["files"]
    assert files == [f"b/test/cat/{i}.png" for i in range(5)]
    assert here.manifest["source"] != there.manifest["source"]
    path = tmp_path / "elsewhere" / files[0]
    Image.fromarray(255 - np.array(Image.open(path))).save(path)
    changed = labeled(tmp_path / "elsewhere")
    assert here.digest == there.digest != changed.digest


@pytest.mark.parametrize(
    "keys", [{"holdout": 0.2}, {"image_size": 14}, {"seed": 1}, {"angles": [0, 90]}, {"train_per_client": 21}]
)
def test_digests_of_different_federations_differ(keys):
    plain = {"clients": 2} if "angles" not in keys else {}
    assert labeled(**plain, **keys).digest != labeled(clients=2).digest == labeled(clients=2).digest


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("silo-1", "test"), "partition 'rotations': image {i} .*digits.* silo-0/train .* silo-1/test"),
        (("silo-0", "holdout"), "image {i} .*digits.* silo-0/train .* silo-0/holdout"),
        (("silo-0", "train"), "image {i} .*digits.* silo-0/train .*twice"),
    ],
)
def test_an_image_in_two_places_is_found(place, message):
    manifest = labeled(clients=2).manifest
    check_disjoint(manifest)
    image = manifest["silos"]["silo-0"]["train"]["indices"][3]
    manifest["silos"][place[0]][place[1]]["indices"].append(image)
    with pytest.raises(UserError, match=message.format(i=image)):
        check_disjoint(manifest)


def test_a_partition_that_shares_images_is_refused(monkeypatch):
    from uefl.data.partitions import rotations

    def slices(table, data, clients):
        return [(table.train[:30], table.train[20 + c : 40]) for c in range(clients)]

    monkeypatch.setattr(rotations, "slices", slices)
    places = "silo-0/(train|holdout) .*silo-0/test"
    with pytest.raises(UserError, match=rf"partition 'rotations': image \d+ .*digits.* {places}"):
        labeled(clients=2)


def test_published_holdout_is_the_test_split_and_is_noted():
    manifest = labeled(clients=2, legacy_holdout=True).manifest
    assert manifest["legacy_holdout"]
    assert manifest["silos"]["silo-0"]["holdout"]["indices"] == manifest["silos"]["silo-0"]["test"]["indices"]


def test_sets_name_the_set_of_every_image_and_their_priors():
    federation = sets(clients=2, train_per_client=300, test_per_client=20, labeled=30, validation=20)
    client, entry = load(federation)[1], federation.manifest["silos"]["client-1"]
    assert entry["train"]["sets"] == client.sets.tolist()
    assert entry["train"]["priors"] == client.priors.tolist()
    np.testing.assert_array_equal(
        digits().images.read(np.array(entry["train"]["indices"]), 0).numpy(), client.images.numpy()
    )
    assert set(federation.manifest["server"]) == {"labeled", "validation"}
    stolen = federation.manifest["server"]["labeled"]["indices"]
    stolen.append(entry["test"]["indices"][0])
    with pytest.raises(UserError, match=r"client-1/test .*server/labeled"):
        check_disjoint(federation.manifest)


def test_overlapping_sets_repeat_images_of_one_client_only():
    federation = sets(clients=2, train_per_client=300, test_per_client=20, overlap=True)
    indices = federation.manifest["silos"]["client-0"]["train"]["indices"]
    assert len(set(indices)) < len(indices)
    federation.manifest["silos"]["client-1"]["train"]["indices"].append(indices[0])
    with pytest.raises(UserError, match=r"client-0/train .*client-1/train"):
        check_disjoint(federation.manifest)


def test_own_sets_are_named_by_file_or_archive(tmp_path):
    federation = sets(write(tmp_path / "here"))
    clients = federation.manifest["silos"]
    assert clients["berlin"]["train"]["files"][0] == "clients/berlin/a/0.png"
    assert clients["madrid"]["train"]["in"] == "clients/madrid.npz"
    assert clients["madrid"]["train"]["indices"] == list(range(32))
    assert clients["madrid"]["test"]["in"] == "test.npz"
    assert federation.digest == sets(write(tmp_path / "there")).digest
    manifest = dict(federation.manifest)
    assert digest(manifest) == federation.digest


@pytest.mark.parametrize(("kind", "make"), [("labeled", labeled), ("sets", sets)])
def test_the_manifest_names_its_kind(kind, make):
    manifest = make(clients=2, train_per_client=200, test_per_client=20).manifest
    assert manifest["kind"] == kind
    assert manifest["schema"] == 1


# --- the same bits ----------------------------------------------------------------------------------------

# SHA-256 of the manifest's hashes and, for sets, of the set of every image, as the first version of this
# package dealt them
KNOWN = {
    "dealt": "306ba44a86e6bee6ddd70df1b18c8cdb33e51e7ec96588f2df36a27c1826698b",
    "own-silos": "b07521ed173d902dcacdeddd6e9c9fdbe2cdc2400080c43b95609df5dca24171",
    "sets-iid": "e6e4c67c91fe7069b5496062c867f141cad56057de5ead2d46870303568da882",
    "sets-noniid": "076356a9f407c0951247ebee755436fd74e608b782412950ca3711903e8c1dfe",
    "sets-overlap": "2c13b2007d4a4912ed9c0455fda5a210615b3cf29b12e2dbf750a9088112cc22",
    "sets-column-norm": "8ccfc482cdeebef3eb8ab3a6c401a065ac16dce05a0abcce2f729a3f080a29be",
}


def fingerprint(federation):
    clients = federation.manifest["silos"]
    return {
        name: {part: (e["sha256"], e.get("sets")) for part, e in client.items() if isinstance(e, dict)}
        for name, client in clients.items()
    }


@pytest.mark.parametrize("name", KNOWN)
def test_images_of_the_clients_have_not_changed(name, tmp_path):
    images = (np.arange(90 * 30, dtype=np.int64).reshape(90, 5, 6) % 251).astype(np.uint8)
    labels, silo = np.arange(90) % 4, np.arange(90) * 7 % 3
    np.savez(tmp_path / "own.npz", images=images, labels=labels, silo=silo)
    small = {"clients": 3, "train_per_client": 300, "test_per_client": 50}
    make = {
        "dealt": lambda seed: labeled(clients=9, train_per_client=400, test_per_client=100, seed=seed),
        "own-silos": lambda seed: labeled(tmp_path / "own.npz", seed=seed),
        "sets-iid": lambda seed: sets(**small, labeled=100, validation=50, seed=seed),
        "sets-noniid": lambda seed: sets(**small, split="noniid", sets=13, seed=seed),
        "sets-overlap": lambda seed: sets(**small, overlap=True, seed=seed),
        "sets-column-norm": lambda seed: sets(**small, overlap=True, legacy_column_norm=True, seed=seed),
    }[name]
    everything = json.dumps([fingerprint(make(seed)) for seed in range(4)], sort_keys=True)
    assert hashlib.sha256(everything.encode()).hexdigest() == KNOWN[name]
