"""A whole configuration: four sections, the arms, and the conditions between them.

An algorithm checks the parameters of its arms. Algorithms are imported only when arms are checked, so a
mistake in another section is found without importing torch.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import BaseModel

from ..errors import UserError, nearest
from ..fields import S, check_unused, parse, shown, unknown
from ..paths import check_name, expanded
from .keys import fields, sections_with
from .sections import Model, RunSection, Training

if TYPE_CHECKING:
    from ..data.settings import Data

SECTIONS = ("run", "data", "model", "training")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""pattern of the names of files and folders"""
_GIVEN_IGNORES = ("width", "hidden", "dropout", "logit_dropout", "pooled")
"""keys of ``[model]`` without effect on a network that is given in Python"""


@dataclass(frozen=True)
class Arm:
    """A named instance of an algorithm."""

    algorithm: str
    parameters: BaseModel


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run, without the device and the location of the data."""

    run: RunSection
    data: Data
    model: Model
    training: Training
    arms: dict[str, Arm]

    @property
    def kind(self) -> str:
        """Return the kind of data of the arms: ``labeled`` or ``sets``."""
        from ..algorithms.base import find

        return find(next(iter(self.arms.values())).algorithm).kind

    def table(self) -> dict[str, Any]:
        """Return plain values for TOML and JSON, with all defaults, and without keys that have no value."""
        sections = {name: getattr(self, name).model_dump(mode="json", exclude_none=True) for name in SECTIONS}
        arms = {
            name: {"algorithm": arm.algorithm, **arm.parameters.model_dump(mode="json")}
            for name, arm in self.arms.items()
        }
        return sections | {"arms": arms}

    def to_toml(self) -> str:
        """Return the configuration as TOML text."""
        return tomli_w.dumps(self.table())

    def digest(self) -> str:
        """Return the digest for checkpoints, which does not depend on the number of threads."""
        return hashlib.sha256(self.with_run(threads=0).to_toml().encode()).hexdigest()

    def with_run(self, **keys: Any) -> Config:
        """Return the same configuration with other values in the section ``[run]``, which are not checked."""
        return replace(self, run=self.run.model_copy(update=keys))

    def absolute(self) -> Config:
        """Return the same configuration with absolute paths to the user's own data and weights, if any."""
        data, weights, changed = self.data.path, self.model.pretrained, self
        if data is not None:
            check_name(data, "key 'source':")
        if data is not None and data.exists():
            changed = replace(changed, data=self.data.model_copy(update={"source": str(data.resolve())}))
        if isinstance(weights, str) and expanded(weights).is_file():
            whole = {"pretrained": str(expanded(weights).resolve())}
            changed = replace(changed, model=self.model.model_copy(update=whole))
        return changed


def from_toml(text: str) -> Config:
    """Parse a configuration from the text that :meth:`Config.to_toml` writes.

    Raises:
        UserError: the text is not TOML, or is not a configuration.
    """
    try:
        return from_table(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"its configuration is not valid TOML: {error}") from None


def from_table(table: dict[str, Any]) -> Config:
    """Build and check a configuration from plain values.

    Raises:
        UserError: the first key that is unknown, of a wrong type, out of its range, or does not go with the
            others.
    """
    for key in table:
        if key not in (*SECTIONS, "arms"):
            raise _misplaced(key)
    run, model = _section(RunSection, "run", table), _section(Model, "model", table)
    training = _section(Training, "training", table)
    from ..data.settings import Data  # imports numpy, which `uefl --help` does not need

    data = _section(Data, "data", table, fields(table))
    config = Config(run, data, model, training, arms(table.get("arms", {})))
    _check(config)
    return config


def arms(table: Any) -> dict[str, Arm]:
    """Return the arms of a table ``{name: {"algorithm": ..., parameter: ...}}``.

    Raises:
        UserError: a name is not a file name, an algorithm or a parameter is unknown, or a value is out of
            range; there is no arm, or arms need different kinds of data.
    """
    from ..algorithms.base import find, registry

    if not isinstance(table, dict) or not table:
        names = ", ".join(sorted(registry()))
        raise UserError(f"key 'arms': expected at least one table [arms.NAME]; the algorithms are {names}")
    made: dict[str, Arm] = {}
    for name, keys in table.items():
        if not NAME.fullmatch(name):
            raise UserError(
                f"key 'arms': {shown(name)} is the name of files of the run; expected at most 40 letters,"
                " digits, '.', '_' and '-'"
            )
        if not isinstance(keys, dict):
            raise UserError(f"key 'arms.{name}': expected a table of parameters, got {shown(keys)}")
        known = registry()
        if "algorithm" not in keys and name not in known:
            raise UserError(
                f"key 'arms.{name}': no algorithm {name!r}{nearest(name, known)}; an arm of another name"
                f' has a key algorithm = "..."; there are {", ".join(known)}'
            )
        algorithm: Any = keys.get("algorithm", name)
        kind = find(algorithm, f"key 'arms.{name}': ")
        rest = {key: value for key, value in keys.items() if key != "algorithm"}
        made[name] = Arm(algorithm, parse(kind.Parameters, f"arms.{name}", rest, sections_with))
    kinds = {name: find(arm.algorithm).kind for name, arm in made.items()}
    if len(set(kinds.values())) > 1:
        listed = "; ".join(
            f"{what}: {', '.join(name for name, kind in kinds.items() if kind == of)}"
            for of, what in (("labeled", "on labeled data"), ("sets", "on unlabeled sets"))
        )
        raise UserError(
            f"key 'arms': one run cannot have arms on labeled data and arms on unlabeled sets ({listed})"
        )
    return made


def _section(
    kind: type[S],
    name: str,
    table: dict[str, Any],
    inside: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> S:
    keys = table.get(name, {})
    if not isinstance(keys, dict):
        raise UserError(f"key {name!r}: expected a table [{name}], got {shown(keys)}")
    return parse(kind, name, keys, sections_with, inside)


def _misplaced(key: str) -> UserError:
    """Return the error for a key outside of a section, with the section or the nearest key."""
    found = sections_with(key)
    if found:
        return UserError(f"key {key!r} is not in a section; it is a key of {', '.join(found)}")
    return unknown(key, "", (*SECTIONS, "arms", "base"), sections_with)


def _check(config: Config) -> None:
    """Check the keys against each other.

    A key without effect must have its default, which run folders write out.
    """
    from ..algorithms.base import find

    run, model, training, kind = config.run, config.model, config.training, config.kind
    if run.metrics:
        from ..client.work import RESERVED
        from ..metrics import check

        own = {key for arm in config.arms.values() for key in find(arm.algorithm).columns}
        check(run.metrics, RESERVED | own)
    if run.aggregation in ("mean", "median"):
        check_unused(run, "attackers", "it is for aggregation = 'trimmed_mean' or 'krum'", "run.")
    if run.privacy == "none":
        for key in ("clip_norm", "noise_multiplier", "delta", "max_epsilon"):
            check_unused(run, key, "it is for privacy = 'central' or 'local'", "run.")
    else:
        _check_private(config)
    if run.uncertainty == "ensemble":
        check_unused(run, "passes", "an ensemble has members, not passes", "run.")
    else:
        check_unused(run, "members", "it is for uncertainty = 'ensemble'", "run.")
        if not any(find(arm.algorithm).draws for arm in config.arms.values()):
            check_unused(run, "passes", "its arms measure one pass with dropout off", "run.")
    _check_model(model)
    if training.batch_size < 2:
        raise UserError("key 'training.batch_size': expected 2 or more, for batch norm; got 1")
    if training.optimizer != "sgd":
        check_unused(training, "momentum", "it is for optimizer = 'sgd'", "training.")
    if kind == "sets":
        for key in ("uncertainty", "passes", "members"):
            check_unused(run, key, "arms on unlabeled sets measure one pass without dropout", "run.")
        if len(training.rounds) > 1 or training.max_iterations > 1:
            raise UserError(
                "key 'training.rounds': expected one number, because arms on unlabeled sets have one"
                f" iteration; got {list(training.rounds)}"
            )
        if run.select == "holdout":
            check_unused(run, "select", "clients with unlabeled sets have no holdout", "run.")
    elif run.select == "validation":
        check_unused(run, "select", "'validation' is for arms on unlabeled sets", "run.")
    elif run.select == "holdout" and config.data.legacy_holdout:
        why = "with data.legacy_holdout the holdout is the test split, which must not choose the model"
        check_unused(run, "select", why, "run.")
    config.data.check_kind(kind, "data.")


def _check_model(model: Model) -> None:
    """Refuse a network that does not exist, and keys that have no effect on the network."""
    from ..models.networks import Network, find

    given = model.encoder == "given"
    kind: type[Network] | None = None if given else find(model.encoder)
    ignored, pretrained = (_GIVEN_IGNORES, False) if kind is None else (kind.ignores, kind.pretrained)
    network = "a network that is given" if given else model.encoder
    if model.pretrained and not pretrained:
        raise UserError(
            f"key 'model.pretrained': {network} has no pretrained weights; set false, or another encoder"
        )
    for key in ignored:
        check_unused(model, key, f"{network} does not use it", "model.")
    if model.norm_layer == "group":
        check_unused(model, "frozen_batch_norm", "group norm has no running statistics", "model.")
    if model.pretrained:
        check_unused(model, "norm_layer", "pretrained weights are for batch norm", "model.")
    if given:
        check_unused(model, "norm_layer", f"{network} has its own", "model.")


def _check_private(config: Config) -> None:
    """Refuse settings that would reveal more about the clients than the accountant counts."""
    run = config.run
    if run.uncertainty == "ensemble":
        raise UserError(
            "key 'run.privacy': expected 'none' with an ensemble, because every member trains on all"
            f" clients and spends epsilon again; got {run.privacy!r}"
        )
    if config.data.normalize == "standard":
        raise UserError(
            f"key 'data.normalize': with privacy = {run.privacy!r} expected 'centered', 'imagenet' or 'raw':"
            " 'standard' needs the mean and the deviation of all clients' images, without noise"
        )
    if run.select == "holdout":
        why = "epsilon does not count what the chosen round reveals about the holdout images"
        check_unused(run, "select", why, "run.")
    if run.privacy == "central":
        why = "with privacy = 'central' the participants of a round are drawn from all clients"
        check_unused(run, "joins", why, "run.")
        check_unused(run, "aggregation", "with privacy = 'central' the noise is added to a sum", "run.")
    else:
        check_unused(run, "max_update_norm", "with privacy = 'local' an update is mostly noise", "run.")
