"""The least privacy that a silo requires of any run.

The silo requires noise on each of its updates, and counts the sent updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import privacy
from ..checkpoint import write_json
from ..errors import UserError
from ..folder import lock
from ..json_text import parse_json
from ..paths import read_text
from .silo_folder import Refusal

if TYPE_CHECKING:
    from ..client.workspace import Workspace
    from ..config import Config
    from ..config.sections import RunSection
    from ..engines.base import Message

_SCHEMA = 1


class PrivacyFloor:
    """The least privacy that a silo works with, and the file that counts its updates over all runs.

    The guarantee of an update depends on the noise as a multiple of the clipping norm, and not on that norm,
    so the silo requires the multiple. An update is counted before it leaves, so the count is never too small.

    Args:
        noise_multiplier: the least value that the silo accepts, with ``run.privacy = "local"``.
        delta: the delta of the stated epsilon.
        max_epsilon: no update is sent that exceeds it; 0: no limit.
        path: path of the file; if the file is moved or removed, the count starts again.

    Raises:
        UserError: the accountant is missing, a number is out of its range, or the file is damaged.
    """

    def __init__(self, noise_multiplier: float, delta: float, max_epsilon: float, path: Path) -> None:
        if not 0.01 <= noise_multiplier <= 1000:
            raise UserError(
                f"--noise-multiplier: expected a number from 0.01 to 1000; got {noise_multiplier:g}"
            )
        if not 0 < delta < 1:
            raise UserError(f"--delta: expected a number between 0 and 1; got {delta:g}")
        if not 0 <= max_epsilon < float("inf"):
            raise UserError(f"--max-epsilon: expected a number of 0 or more; got {max_epsilon:g}")
        privacy.check_accountant("--noise-multiplier")
        self.noise_multiplier, self.delta = noise_multiplier, delta
        self.max_epsilon, self.path = max_epsilon, path
        self._updates = _read(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from counting in the same file, for as long as the context lasts.

        Raises:
            UserError: another process uses the file, or the file cannot be written.
        """
        try:
            with lock(self.path.parent, f"{self.path.name}.lock", "name another file with --spent"):
                self._updates = _read(self.path)  # another process may have counted since
                yield
        except OSError as error:
            raise UserError(
                f"--spent: {self.path} cannot be written ({error.strerror}); name a file in another folder"
            ) from None

    def describe(self) -> str:
        """Return a line for the log."""
        bound = f" of {self.max_epsilon:g}" if self.max_epsilon else ""
        next_one = self._epsilon(self.noise_multiplier)
        if 0 < self.max_epsilon < next_one:
            bound += (
                f" (the next one, with the least noise, would make it {next_one:.3g}: only a run with more"
                " noise gets it)"
            )
        count = sum(self._updates.values())
        return (
            f"{count} update{'' if count == 1 else 's'} sent, epsilon {self._epsilon():.3g}{bound} spent at"
            f" delta {self.delta:g}"
        )

    def check_run(self, run: RunSection) -> None:
        """Raise Refusal for a run with too little privacy."""
        wanted = (
            f"this silo requires privacy = 'local' with a noise_multiplier of {self.noise_multiplier:g} or"
            " more"
        )
        if run.privacy != "local":
            raise Refusal("privacy", f"{wanted}; the run has privacy = {run.privacy!r}")
        if run.noise_multiplier < self.noise_multiplier:
            raise Refusal("privacy", f"{wanted}; the run has {run.noise_multiplier:g}")

    def check_arm(self, cfg: Config, arm: str, workspace: Workspace) -> None:
        """Raise Refusal for an arm that needs tensors without noise."""
        try:
            privacy.check(cfg, arm, workspace)
        except UserError as error:
            raise Refusal("privacy", f"the server asks for tensors without noise: {error}") from None

    def check_message(self, run: RunSection, message: Message) -> None:
        """Raise Refusal for a message that breaks the rules of the silo.

        Such a message asks for a reply without noise, for several replies at once, or for more replies than
        the budget allows.
        """
        self.check_run(run)
        for option in ("ask", "members"):
            if option in message.options:
                raise Refusal(
                    "privacy", f"the server asks for a reply without noise: a message with {option!r}"
                )
        after = self._epsilon(run.noise_multiplier)
        # a message that only measures asks for no update
        if self.max_epsilon and after > self.max_epsilon and message.options.get("train", True):
            raise Refusal(
                "budget",
                f"one more update would spend epsilon {after:.3g}, more than --max-epsilon"
                f" {self.max_epsilon:g}: {self.describe()}",
            )

    def count(self, run: RunSection) -> None:
        """Count an update that is about to leave.

        Raises:
            OSError: the update cannot be counted, so it must not leave.
        """
        noise = run.noise_multiplier
        self._updates[noise] += 1
        updates = {str(noise): count for noise, count in self._updates.items()}
        write_json(self.path, {"schema": _SCHEMA, "updates": updates})

    def _epsilon(self, *more: float) -> float:
        """Return the privacy spent, including updates with these noise multipliers."""
        return privacy.spent_by(self._updates + Counter(more), self.delta)


def _read(path: Path) -> Counter[float]:
    """Return the number of sent updates by noise multiplier, or nothing if there is no file."""
    try:
        found = parse_json(read_text(path))
        updates = Counter({float(noise): count for noise, count in found["updates"].items()})
        if found["schema"] != _SCHEMA or not all(
            noise > 0 and type(count) is int and count >= 0 for noise, count in updates.items()
        ):
            raise ValueError
    except FileNotFoundError:
        return Counter()
    except OSError as error:
        raise UserError(f"--spent: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"--spent: {path} is not a count of updates, or damaged; restore it, or name another file"
        ) from None
    return updates
