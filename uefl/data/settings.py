"""The section ``[data]`` of a configuration: where images come from, and how they become clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, model_validator

from ..fields import Section, check_unused
from ..paths import expanded
from .partitions.base import Scheme, from_table
from .sources.base import SOURCES

OF_KIND = {"labeled": "clients with labeled images", "sets": "clients with unlabeled sets"}
_OF_SETS: dict[str, JsonValue] = {"kind": "sets"}
_OF_LABELED: dict[str, JsonValue] = {"kind": "labeled"}


class Data(Section):
    """Data of a run.

    The description of a key names its kind of data; with other kinds, the key keeps its default.
    """

    source: str = Field(default="digits", min_length=1)
    """name of a data set, or the path of your own folder, .npz, .csv or .parquet"""
    label: str = Field(default="label", min_length=1)
    """for a table: the column with the classes"""
    vocabulary: int = Field(default=0, ge=0, le=1_000_000)
    """number of different tokens if the inputs are sequences; token 0 is padding. 0: no tokens, or for arrays
    of integers the highest token plus 1"""
    clients: int | None = Field(default=None, ge=1, le=100_000)
    """number of clients that a data set is dealt to; your own clients have their own number"""
    train_per_client: int = Field(default=400, ge=1)
    """training images of each client, holdout included"""
    test_per_client: int = Field(default=100, ge=1)
    """test images of each client; your own clients without a test split use the share test / (train + test)
    of their images"""
    partition: Annotated[SerializeAsAny[Scheme], BeforeValidator(from_table)] | None = None
    """how images are dealt to clients. Without this section, your own clients keep their images, and a data
    set is dealt in equal parts"""
    first_classes: int = Field(default=0, ge=0)
    """use only images of the first classes, of this number; 0: all classes"""
    holdout: float = Field(default=0.1, gt=0, lt=1, json_schema_extra=_OF_LABELED)
    """share of the training images in the holdout; the test split never decides anything"""
    legacy_holdout: bool = Field(default=False, json_schema_extra=_OF_LABELED)
    """the test split is also the holdout, as in the published code"""
    image_size: int = Field(default=0, ge=0, le=1024)
    """resize every image to this square; 0: keep the images, which must then have one size"""
    normalize: Literal["standard", "imagenet", "centered", "raw"] = "standard"
    """scale of the inputs: by the mean and deviation of the training data (`standard`) or of ImageNet, from
    -1 to 1 (`centered`), or unchanged (`raw`)"""
    augment: Literal["none", "rotate", "flip", "photo"] = "none"
    """random change of training images, on the device: a rotation by up to 20 degrees in both directions, a
    flip from left to right, or for photos a crop, a flip and a change of colors"""
    labeled: int = Field(default=0, ge=0, json_schema_extra=_OF_SETS)
    """labeled images of the server"""
    validation: int = Field(default=0, ge=0, json_schema_extra=_OF_SETS)
    """labeled images of the server that measure the model of every round"""
    priors: Literal["given", "estimated"] = Field(default="given", json_schema_extra=_OF_SETS)
    """class shares of each set: the real ones (`given`), or estimates from the images of the set and the
    labeled images of the server"""
    prior_noise: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=_OF_SETS)
    """multiply every class share by a random factor in [1 - x, 1 + x]"""
    prior_smoothing: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=_OF_SETS)
    """mix every row of class shares with this share of the uniform distribution"""
    strict: bool = Field(default=False, json_schema_extra=_OF_SETS)
    """raise an error instead of a note if the sets may not determine a classifier (rank, condition or absent
    classes of their priors)"""

    @model_validator(mode="after")
    def _one_holdout(self) -> Self:
        if self.legacy_holdout and self.holdout != Data.model_fields["holdout"].default:
            raise ValueError(
                "holdout: omit this key with legacy_holdout = true, which uses the test split as the holdout"
            )
        return self

    def check_kind(self, kind: str, section: str = "") -> None:
        """Refuse keys for the other kind of data, by :func:`uefl.fields.check_unused`."""
        for key, field in Data.model_fields.items():
            extra = field.json_schema_extra
            of = extra.get("kind") if isinstance(extra, dict) else None
            if of not in (None, kind):
                check_unused(self, key, f"it is for {OF_KIND[str(of)]}", section)

    @property
    def path(self) -> Path | None:
        """Return the path of the user's own data, or None for a data set, also if a file has its name."""
        return None if self.source in SOURCES else expanded(self.source)

    def table(self) -> dict[str, Any]:
        """Return plain values for TOML or JSON, without keys that are not set."""
        return self.model_dump(mode="json", exclude_none=True)
