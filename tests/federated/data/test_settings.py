"""The section [data]: names and ranges."""

import pytest
from pydantic import ValidationError

from uefl.data import Data


def test_table_round_trip():
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
        ({"image_size": 100_000}, r"image_size\s.*\b1024\b"),
        ({"image_size": -1}, r"image_size\s.*\b0\b"),
        ({"clients": 0}, r"clients\s.*\b1\b"),
        ({"holdout": 1.0}, r"holdout\s.*\b1\b"),
        ({"holdout": float("nan")}, r"holdout\s.*(finite|\b0\b)"),
        ({"source": ""}, r"source\s.*\b1\b"),
        ({"sauce": "mnist"}, r"sauce\s.*extra"),
        ({"normalize": "standart"}, "'standard', 'imagenet', 'centered' or 'raw'"),
        ({"partition": {"scheme": "rotation"}}, "'rotation'.*'rotations'.*classes, dirichlet"),
        ({"partition": {"angles": [1]}}, "scheme; .*classes, dirichlet"),
        ({"partition": {"scheme": "rotations", "angels": [1]}}, "angels"),
        ({"partition": {"scheme": "rotations", "angles": [float("inf")]}}, r"angles.0\s.*finite"),
        ({"partition": {"scheme": "dirichlet"}}, "convention"),
        ({"partition": {"scheme": "imbalanced", "angles": [0.0]}}, r"1 angles, 3\b"),
        ({"image_size": True}, r"image_size\s.*integer"),
        ({"clients": "3"}, r"clients\s.*integer"),
        ({"partition": {"scheme": "rotations", "legacy_center": 1}}, r"legacy_center\s.*boolean"),
        ({"legacy_holdout": True, "holdout": 0.2}, "holdout: .*legacy_holdout = true"),
        ({"prior_noise": 1.0}, "prior_noise"),
        ({"prior_smoothing": -0.1}, "prior_smoothing"),
        ({"partition": {"scheme": "unlabeled", "sets": 1}}, r"sets\s.*\b2\b"),
        ({"partition": {"scheme": "unlabeled", "split": "iidd"}}, "'iid', 'noniid' or 'legacy_noniid'"),
        (
            {"partition": {"scheme": "unlabeled", "legacy_column_norm": True}},
            "legacy_column_norm: .*overlap = true .*split = 'iid'",
        ),
    ],
)
def test_tables_that_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        Data.model_validate(table)
