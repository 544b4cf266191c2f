"""The section [data]: names, ranges and descriptions."""

import pytest
from pydantic import ValidationError

from uefl.data import Data


def test_every_key_has_a_description_of_one_line():
    for name, field in Data.model_fields.items():
        assert field.description, name
        assert "\n" not in field.description


def test_a_table_goes_there_and_back():
    table = {
        "source": "mnist",
        "clients": 5,
        "partition": {"scheme": "imbalanced", "clients_per_angle": [3, 1, 1]},
        "image_size": 32,
    }
    data = Data.model_validate(table)
    assert Data.model_validate(data.table()) == data
    assert data.table()["partition"] == {
        "scheme": "imbalanced",
        "angles": [0.0, -50.0, 120.0],
        "clients_per_angle": [3, 1, 1],
        "legacy_center": False,
    }
    assert "clients" not in Data().table()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"image_size": 100_000}, "less than or equal to 1024"),
        ({"image_size": -1}, "greater than or equal to 0"),
        ({"clients": 0}, "greater than or equal to 1"),
        ({"holdout": 1.0}, "less than 1"),
        ({"holdout": float("nan")}, "finite number|greater than 0"),
        ({"source": ""}, "at least 1 character"),
        ({"sauce": "mnist"}, "Extra inputs are not permitted"),
        ({"normalize": "standart"}, "'standard', 'imagenet', 'centered' or 'raw'"),
        (
            {"partition": {"scheme": "rotation"}},
            r"'rotation' is no partition \(did you mean 'rotations'\?\); there are classes, dirichlet",
        ),
        (
            {"partition": {"angles": [1]}},
            "give the name of a partition as scheme; there are classes, dirichlet",
        ),
        ({"partition": {"scheme": "rotations", "angels": [1]}}, "angels"),
        ({"partition": {"scheme": "rotations", "angles": [float("inf")]}}, "finite number"),
        ({"partition": {"scheme": "dirichlet"}}, "convention"),
        (
            {"partition": {"scheme": "imbalanced", "angles": [0.0]}},
            "expected one number of clients per angle: 1 angles, 3 numbers",
        ),
        ({"legacy_holdout": True, "holdout": 0.2}, "holdout: leave it out with legacy_holdout = true"),
    ],
)
def test_tables_that_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        Data.model_validate(table)


def test_a_name_goes_before_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert Data(source="digits").path is None
    assert Data(source="./digits").path is not None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Data(source="~/digits").path == tmp_path / "digits"
