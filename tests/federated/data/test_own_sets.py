"""The user's own unlabeled sets: folders and .npz files, tables in CSV and JSON, and their faults."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from uefl.errors import UserError

from .common import load
from .common import sets as build_sets

ROWS = {"berlin": {"a": (0.75, 0.25), "b": (0.25, 0.75)}, "madrid": {"9": (0.5, 0.5), "10": (0.75, 0.25)}}


def write(root, rows=ROWS, table="csv", npz=True, server=("test", "labeled", "validation")):
    """Write two clients, a folder and an .npz, with bright cats and dark dogs, and a table of the shares."""
    rng = np.random.default_rng(0)

    def pictures(cats, dogs):
        return np.concatenate(
            [rng.integers(150, 256, (cats, 12, 12)), rng.integers(0, 100, (dogs, 12, 12))]
        ).astype(np.uint8)

    for name, (cat, dog) in ROWS["berlin"].items():
        folder = root / "clients" / "berlin" / name
        folder.mkdir(parents=True)
        for i, image in enumerate(pictures(int(16 * cat), int(16 * dog))):
            Image.fromarray(image).save(folder / f"{i}.png")
    images = np.concatenate([pictures(int(16 * cat), int(16 * dog)) for cat, dog in ROWS["madrid"].values()])
    np.savez(root / "clients" / "madrid.npz", images=images, set=np.repeat([9, 10], 16))
    if table == "csv":
        lines = [f"{c},{s},{','.join(map(str, row))}" for c, sets in rows.items() for s, row in sets.items()]
        (root / "priors.csv").write_text("\n".join(["client,set,cat,dog", *lines]))
    elif table == "json":
        named = {
            c: {s: dict(zip(("cat", "dog"), row, strict=True)) for s, row in sets.items()}
            for c, sets in rows.items()
        }
        (root / "priors.json").write_text(json.dumps(named))
    for part in server:
        if npz and part == "test":
            np.savez(root / "test.npz", images=pictures(10, 10), labels=np.repeat([0, 1], 10))
            continue
        for name, image in zip(["cat"] * 10 + ["dog"] * 10, pictures(10, 10), strict=True):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{len(list(folder.iterdir()))}.png")
    return root


@pytest.mark.parametrize("table", ["csv", "json"])
@pytest.mark.parametrize("npz", [True, False])
def test_own_sets_are_read(tmp_path, table, npz):
    fed = build_sets(write(tmp_path, table=table, npz=npz))
    assert [client.name for client in load(fed)] == ["berlin", "madrid"]
    assert fed.classes == ("cat", "dog")
    assert [client.sizes.tolist() for client in load(fed)] == [[16, 16], [16, 16]]
    assert load(fed)[0].priors.tolist() == [[0.75, 0.25], [0.25, 0.75]]
    # sets are sorted by number: 9 comes before 10
    assert load(fed)[1].priors.tolist() == [[0.5, 0.5], [0.75, 0.25]]
    assert all(client.labels is None for client in load(fed))
    assert [len(client.test) for client in load(fed)] == [10, 10]
    bright = load(fed)[1].images[load(fed)[1].sets == 1].float().mean((1, 2, 3)) > 125
    assert int(bright.sum()) == 12
    assert (len(fed.server.labeled), len(fed.server.validation)) == (20, 20)
    assert fed.shape == (1, 12, 12)
    assert build_sets(tmp_path, image_size=8).shape == (1, 8, 8)


def test_sets_keep_their_names_and_are_ordered_by_number(tmp_path):
    root = write(tmp_path)
    for old, new in (("a", "09"), ("b", "010")):
        (root / "clients" / "berlin" / old).rename(root / "clients" / "berlin" / new)
    pixels = np.load(root / "clients" / "madrid.npz")["images"]
    np.savez(root / "clients" / "madrid.npz", images=pixels, set=np.repeat([b"09", b"010"], 16))
    lines = ["\ufeffclient, set, cat, dog", "berlin,09, 0.75,0.25", "berlin,010,0.25,0.75", ""]
    lines += ["madrid,09,0.5,0.5", "madrid,010,0.75,0.25", ",,,"]
    (root / "priors.csv").write_text("\r\n".join(lines), encoding="utf-8")  # in the encoding of a spreadsheet
    fed = build_sets(root)
    assert fed.classes == ("cat", "dog")
    assert load(fed)[0].priors.tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert load(fed)[1].priors.tolist() == [[0.5, 0.5], [0.75, 0.25]]
    assert load(fed)[1].sets.tolist() == [0] * 16 + [1] * 16


def test_a_name_is_a_data_set_and_a_path_is_a_folder(tmp_path, monkeypatch):
    write(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(build_sets("digits", clients=2, train_per_client=100, test_per_client=10).classes) == 10
    for path in ("./digits", "~/digits"):
        assert build_sets(path).classes == ("cat", "dog")


@pytest.mark.parametrize("npz", [True, False])
def test_a_missing_table_is_estimated(tmp_path, npz):
    root = write(tmp_path, table="none", npz=npz)
    fed = build_sets(root, priors="estimated")
    assert fed.classes == ("cat", "dog")
    np.testing.assert_allclose(load(fed)[0].priors, [[0.75, 0.25], [0.25, 0.75]], atol=0.02)
    with pytest.raises(UserError, match=r"priors.csv .*priors.json, .*priors = 'estimated'"):
        build_sets(root)


NUMBERS = ("clients", "train_per_client", "test_per_client", "labeled", "validation", "first_classes")


@pytest.mark.parametrize("keys", [*({key: 5} for key in NUMBERS), {"partition": {"scheme": "unlabeled"}}])
def test_keys_of_sets_that_are_dealt_are_refused(tmp_path, keys):
    with pytest.raises(UserError, match=rf"key '{next(iter(keys))}': .*\b(5|unlabeled)$"):
        build_sets(write(tmp_path), **keys)


def test_negative_numbers_of_sets_are_in_their_order(tmp_path):
    root = write(tmp_path, table="none")
    images = np.load(root / "clients" / "madrid.npz")["images"]
    np.savez(root / "clients" / "madrid.npz", images=images, set=np.repeat([10, -1, 3, 2], 8))
    assert (
        load(build_sets(root, priors="estimated"))[1].sets.tolist() == [3] * 8 + [0] * 8 + [2] * 8 + [1] * 8
    )


def edited(**sets):
    return {client: dict(rows) for client, rows in ROWS.items()} | sets


def madrid(nine, ten):
    return edited(madrid={"9": nine, "10": ten})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (edited(berlin={"a": (0.75, 0.25)}), r"client 'berlin', set 1 \('b'\): .*priors.csv"),
        (edited(berlin=ROWS["berlin"] | {"c": (1, 0)}), r"client 'berlin': .*set 'c' \(priors.csv, line 4\)"),
        (edited(paris={"a": (1, 0)}), r"client 'paris' \(priors.csv, line 6\) .*clients, .*berlin, madrid"),
        (
            madrid((0.5, 0.4), (1, 0)),
            r"client 'madrid', set 0 \('9', priors.csv, line 4\): .*\b1 within 0.0001",
        ),
        (madrid((1, 0), (1.5, -0.5)), r"client 'madrid', set 1 \('10', priors.csv, line 5\): .*negative"),
        (madrid(("x", 0.4), (1, 0)), "priors.csv, line 4: 'x'"),
        (madrid((0.5,), (1, 0)), "priors.csv, line 4: 3 cells, expected 4"),
        (madrid(("1" * 140_000, 0), (1, 0)), "priors.csv, line 4: .*limit"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        build_sets(write(tmp_path, rows=rows))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "client,set,CLASS,CLASS,...; .*nothing"),
        ("a,b,c,d\n", "client,set,CLASS,CLASS,...; .*a,b,c,d"),
        ("client,set,cat,dog\nberlin,a,1,0\nberlin,a,1,0\n", "line 3: client 'berlin', set 'a' .*twice"),
        ('client,set,cat,dog\nberlin,"a\nb",1,0\n\nberlin,c,x,0\n', "line 5: 'x' .*number"),
        ('client,set,"cat\n",dog\nberlin,"a\n\nb",1\n', "line 5: 3 cells, expected 4"),
        ("client,set,cat,cat\nberlin,a,1,0\n", "header .*twice: cat,cat"),
        ("client;set;cat;dog\nberlin;a;1;0\n", "client;set;cat;dog; .*commas"),
        ("client,set,cat,\nberlin,a,1,0\n", r"column 4\b"),
    ],
)
def test_csv_that_is_no_table(tmp_path, content, message):
    (write(tmp_path) / "priors.csv").write_text(content)
    with pytest.raises(UserError, match=message):
        build_sets(tmp_path)


A = '"a": {"cat": 1, "dog": 0}'


def a(**shares):
    return json.dumps({"berlin": {"a": shares}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", " .*JSON"),
        ("[" * 100_000, " .*JSON"),
        ("[]", ': .*{"CLIENT": {"SET": {"CLASS": share}}}; .*nothing$'),
        ("{}", ': .*{"CLIENT": .*; .*nothing$'),
        ('{"berlin": 1}', r": .*; .*\b1 .*client 'berlin'$"),
        ('{"berlin": {"a": [["cat", 1], ["dog", 0]]}}', ": .*; .*client 'berlin', set 'a'$"),
        ('{"berlin": {"a": {"cat": 1}, "b": {"dog": 1}}}', ": client 'berlin', set 'b': .*dog, cat"),
        (f'{{"berlin": {{{A}}}, "berlin": {{{A}}}}}', ": client 'berlin' .*twice"),
        (f'{{"berlin": {{{A}, {A}}}}}', ": set 'a' .*twice.*client 'berlin'$"),
        (
            '{"berlin": {"a": {"cat": 1, "dog": 0, "cat": 0}}}',
            ": class 'cat' .*twice.*client 'berlin', set 'a'$",
        ),
        (a(cat=1, dog=int("1" * 400)), r", client 'berlin', set 'a': 1+...1+ .*number.*\[0, 1\]$"),
        (a(cat=None, dog=1), r", client 'berlin', set 'a': None .*number.*\[0, 1\]$"),
    ],
)
def test_json_that_is_no_table(tmp_path, content, message):
    (write(tmp_path, table="none") / "priors.json").write_text(content)
    with pytest.raises(UserError, match="priors.json" + message):
        build_sets(tmp_path)


FOUR = np.zeros((4, 12, 12), np.uint8)
ONE_SET = np.zeros(4, int)


@pytest.mark.parametrize(
    ("images", "ids", "message"),
    [
        (FOUR, None, r"madrid.npz .*images; .*images .*set\b"),
        (FOUR, np.zeros(4), "client 'madrid': .*set .*integer"),
        (FOUR, ONE_SET[:3], r"client 'madrid': 3 entries .*set .*\b4 images"),
        (FOUR.astype(int), ONE_SET, "madrid.npz: images: .*uint8, uint16"),
        (np.uint8(0), ONE_SET, r"madrid.npz: images: .*\[N, H, W\], .*\[\]"),
        (FOUR[:2], np.array([b"a", b"K\xf6ln"]), r"client 'madrid': .*set .*UTF-8 .*str\b"),
        (FOUR[:, :9, :9], np.array([9, 9, 10, 10]), "image_size"),
    ],
)
def test_files_of_a_client_that_are_refused(tmp_path, images, ids, message):
    write(tmp_path)
    np.savez(tmp_path / "clients" / "madrid.npz", images=images, **({} if ids is None else {"set": ids}))
    with pytest.raises(UserError, match=message):
        build_sets(tmp_path)


def test_a_table_that_is_no_text(tmp_path):
    (write(tmp_path) / "priors.csv").write_bytes("client,set,Bär,Fuchs\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"priors.csv .*UTF-8 .*CSV UTF-8"):
        build_sets(tmp_path)


def test_a_client_that_is_there_twice(tmp_path):
    folder = write(tmp_path) / "clients" / "madrid"
    folder.mkdir()
    with pytest.raises(UserError, match=r"madrid .*clients/NAME/SET/\*.png"):
        build_sets(tmp_path)
    (tmp_path / "clients" / "berlin" / "a").rename(folder / "a")
    with pytest.raises(UserError, match=r"client 'madrid' .*twice"):
        build_sets(tmp_path)


def test_parts_that_are_missing_or_strange(tmp_path):
    with pytest.raises(UserError, match="clients/NAME/SET"):
        build_sets(tmp_path)
    write(tmp_path, server=())
    np.savez(tmp_path / "test.npz", images=FOUR, labels=np.array([0, 1, 2, 0]))
    with pytest.raises(UserError, match=r"labels: label 2 .*above 1\b"):
        build_sets(tmp_path)
    np.savez(tmp_path / "test.npz", images=FOUR[:1], labels=ONE_SET[:1])
    with pytest.raises(UserError, match=r"\b1 test .*\b2 clients"):
        build_sets(tmp_path)
    (tmp_path / "test.npz").unlink()
    (tmp_path / "test" / "bird").mkdir(parents=True)
    Image.fromarray(np.zeros((12, 12), np.uint8)).save(tmp_path / "test" / "bird" / "1.png")
    with pytest.raises(UserError, match=r"class 'bird' .*test .*priors.csv .*cat, dog"):
        build_sets(tmp_path)


def test_classes_that_differ_where_there_is_no_table(tmp_path):
    root = write(tmp_path, table="none", npz=False)
    (root / "test" / "cat").rename(root / "test" / "cats")
    with pytest.raises(UserError, match=r"class 'cats' .*test .*labeled .*cat, dog"):
        build_sets(root, priors="estimated")


def test_without_test_images_nothing_is_dealt(tmp_path):
    fed = build_sets(write(tmp_path, server=()))
    assert [client.test for client in load(fed)] == [None, None]
    assert not [line for line in fed.describe().splitlines() if re.search(r"\d+ test", line)]


def test_notes_and_table_use_the_same_set_names(tmp_path):
    notes = build_sets(write(tmp_path, rows=edited(madrid={"9": (0.5, 0.5), "10": (0.5, 0.5)}))).notes
    assert any(
        re.search(r"set 0 \('9', priors\.csv, line 4\) .*set 1 \('10', .* line 5\)", note) for note in notes
    )


def test_a_path_that_is_not_there():
    with pytest.raises(UserError, match=r"'sets'.*digits.*presets .*own-sets`"):
        build_sets("sets")


def test_a_client_is_read_without_the_others(tmp_path):
    fed = build_sets(write(tmp_path))
    (tmp_path / "clients" / "berlin" / "a" / "0.png").unlink()
    assert len(fed.clients[1].load().images) == 32
    with pytest.raises(UserError, match=r"clients/berlin/a/0.png"):
        fed.clients[0].load()


def test_a_part_without_an_image(tmp_path):
    (write(tmp_path, server=()) / "test" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"test .*image.*clients/NAME/SET"):
        build_sets(tmp_path)


def test_unread_files_are_noted(tmp_path):
    root = write(tmp_path, npz=False)
    assert not [note for note in build_sets(root).notes if str(root) in note]
    for name in ("priors.json", "clients/notes.txt", "clients/berlin/labels.csv", "test/readme.md"):
        (root / name).write_text("x")
    # next to the folder test
    np.savez(root / "test.npz", images=np.zeros((1, 12, 12), np.uint8), labels=np.array([0]))
    (root / "labeled" / "emu").mkdir()
    notes = build_sets(root).notes
    assert re.search(rf": {root / 'priors.json'} .*4 more", notes[0])
    assert notes[1].endswith(f": {root / 'labeled' / 'emu'}")


def test_parts_that_are_misspelled_are_noted(tmp_path):
    root = write(tmp_path, npz=False)
    (root / "test").rename(root / "Test")
    (root / "validation").rename(root / "val")
    (root / "test.old").mkdir()
    np.savez(root / "train.npz", images=np.zeros((1, 12, 12), np.uint8), labels=np.array([0]))
    fed = build_sets(root)
    assert load(fed)[0].test is None
    assert fed.server.validation is None
    paths = ", ".join(str(root / name) for name in ("Test", "test.old", "train.npz", "val"))
    (note,) = (note for note in fed.notes if str(root) in note)
    assert re.search(f": {paths}; .*test, labeled .*validation", note)


def test_one_class_is_no_task(tmp_path):
    write(tmp_path, table="none", server=())
    np.savez(tmp_path / "labeled.npz", images=np.zeros((6, 12, 12), np.uint8), labels=np.zeros(6, int))
    with pytest.raises(UserError, match="class, '0'"):
        build_sets(tmp_path, priors="estimated")


def test_classes_that_differ_in_case_only_are_noted(tmp_path):
    root = write(tmp_path, table="none", npz=False)
    for part in ("labeled", "validation", "test"):
        (root / part / "dog").rename(root / part / "Cat")
    notes = build_sets(root, priors="estimated").notes
    assert any("'Cat' and 'cat'" in note for note in notes)
