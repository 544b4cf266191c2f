"""A federation small enough to train in a test: class-dependent blobs, one silo turned into noise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from uefl import config
from uefl.algorithms.base import Algorithm, Context, State, find, registry
from uefl.client.client import Clients
from uefl.client.together import together
from uefl.client.work import Work
from uefl.client.workspace import Workspace
from uefl.config import Config
from uefl.data.federation import ClientData, Federation, LabeledData, ServerData, Split
from uefl.engines.base import Engine, Message
from uefl.engines.in_process import LocalEngine
from uefl.privacy import Privacy
from uefl.seeds import derive
from uefl.server.rounds import ServerLoop
from uefl.server.teacher import Teacher
from uefl.server.turn import Turn

KEYS: dict[str, Any] = {
    "run": {"precision": "fp32", "passes": 3},
    "data": {"clients": 3},
    "model": {"width": 4, "hidden": 16},
    "training": {"rounds": [2, 1], "local_epochs": 1, "batch_size": 16, "lr": 1e-2},
}
_FOLDER = TemporaryDirectory()
"""folder of the private states of all arms: files are named after their contents, and no file is removed"""
CODEBOOK = {"codewords": 4, "segments": 4, "gamma": 0.0, "stop_when_certain": False}


def settings(algorithm: str = "uefl", base: dict[str, Any] = KEYS, **keys: Any) -> Config:
    """Return a configuration of the arm ``arm``, with keys in their sections as with ``--set``."""
    fields = registry()[algorithm].Parameters.model_fields
    own = {key: value for key, value in CODEBOOK.items() if key in fields}
    if keys.get("uncertainty") == "ensemble" or not registry()[algorithm].draws:
        base = base | {"run": {k: v for k, v in base["run"].items() if k != "passes"}}
    return config.load({**base, "arms": {"arm": {"algorithm": algorithm, **own}}}, **keys)


def split(n: int, seed: int, noise: float) -> Split:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    clean = torch.zeros(n, 1, 8, 8)
    for i, label in enumerate(labels.tolist()):
        clean[i, :, :, 2 * label : 2 * label + 3] = 200
    noisy = (1 - noise) * clean + noise * 255 * torch.rand(n, 1, 8, 8, generator=generator)
    return Split(noisy.clamp(0, 255).to(torch.uint8), labels)


def federation(
    sizes: tuple[int, ...] = (24, 24, 24),
    noise: tuple[float, ...] = (0.1, 0.1, 0.9),
    *,
    test_is_holdout: bool = False,
    unseen: int = 0,
    server: ServerData | None = None,
) -> Federation:
    clients = []
    for i in range(len(sizes)):
        train, test = split(sizes[i], 3 * i, noise[i]), split(12, 3 * i + 1, noise[i])
        data = LabeledData(train, test if test_is_holdout else split(12, 3 * i + 2, noise[i]), test)
        clients.append(ClientData.of(f"silo-{i}", data))
    nothing = split(0, 0, 0.1)
    others = [
        ClientData.of(f"unseen-{i}", LabeledData(nothing, nothing, split(12, 90 + i, 0.2)))
        for i in range(unseen)
    ]
    return Federation(
        "labeled",
        tuple(clients),
        ("a", "b", "c"),
        (1, 8, 8),
        (0.3,),
        (0.4,),
        tuple(others),
        server,
        digest="tiny",
    )


def context(cfg: Config, fed: Federation, clients_keep_states: bool = False) -> Context:
    names = tuple(sorted(client.name for client in fed.clients))
    examples = {client.name: client.sizes.train for client in fed.clients}
    return Context(
        cfg.run.seed,
        cfg.run,
        cfg.model,
        cfg.training,
        fed.classes,
        fed.shape,
        names,
        None,
        examples,
        clients_keep_states,
    )


def workspace_of(
    cfg: Config,
    fed: Federation | None = None,
    algorithm: Algorithm | None = None,
    device: str = "cpu",
    clients_keep_states: bool = False,
) -> Workspace:
    fed = fed or federation()
    (arm,) = cfg.arms.values()
    algorithm = algorithm or find(arm.algorithm)(arm.parameters)
    return Workspace(
        algorithm.bound(context(cfg, fed, clients_keep_states)), cfg.data, fed, torch.device(device)
    )


def arm(
    cfg: Config,
    fed: Federation | None = None,
    wrap: Callable[[Engine], Engine] = lambda e: e,
    algorithm: Algorithm | None = None,
    privacy: Privacy | None = None,
    device: str = "cpu",
    clients_keep_states: bool = False,
) -> tuple[ServerLoop, Workspace, list[str]]:
    """Return the arm, its workspace, and the list that collects its notices."""
    published = next(iter(cfg.arms.values())).algorithm == "uefl-published"
    fed = fed or federation(test_is_holdout=published)
    workspace, notices = workspace_of(cfg, fed, algorithm, device, clients_keep_states), []
    clients = dict(Clients((*fed.clients, *fed.unseen), workspace.device).handlers(workspace))
    size = workspace.context.run.clients_at_once
    engine = wrap(LocalEngine(clients, group=together(clients, workspace), size=size))
    count = cfg.run.members if cfg.run.uncertainty == "ensemble" else 1
    seeds = [derive(cfg.run.seed, "member", i) if i else cfg.run.seed for i in range(count)]
    teacher = Teacher.of(workspace.algorithm.server_data(fed), workspace)
    return (
        ServerLoop(
            "arm",
            workspace,
            seeds,
            engine,
            Path(_FOLDER.name) / "private",
            teacher,
            notices.append,
            privacy,
            clients_keep_states,
        ),
        workspace,
        notices,
    )


def finish(arm: ServerLoop, limit: int = 50) -> list[dict[str, Any]]:
    """Run to the end and return every record."""
    records = []
    for _ in range(limit):
        if arm.finished:
            return records
        records += arm.turn()
    raise AssertionError("the run did not end")


def turns(arm: ServerLoop, count: int) -> list[list[dict[str, Any]]]:
    """Return the records of some turns."""
    return [arm.turn() for _ in range(count)]


def state(arm: ServerLoop) -> State:
    """Return the state of the first member."""
    return arm.members[0].state


def values(arm: ServerLoop) -> torch.Tensor:
    """Return the parameters of the first member."""
    return arm.members[0].state.tensors["values"]


def visible(arm: ServerLoop, client: str, member: int = 0) -> torch.Tensor:
    """Return the codebook that a client sees."""
    return arm.members[member].algorithm.client_tensors(arm.members[member].state, client)["codebook"]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Check that two dictionaries have the same tensors in the same order, bit for bit."""
    assert list(a) == list(b)
    for one, other in zip(a.values(), b.values(), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def without(records: list[dict[str, Any]], *starts: str) -> list[dict[str, Any]]:
    """Return records without the keys that begin with one of ``starts``, such as the counts of bytes."""
    return [{key: value for key, value in r.items() if not key.startswith(starts)} for r in records]


def updates(n: int, scale: float = 1.0, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Draw the tensors of n clients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (7,)}
    return [
        {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(n)
    ]


def turn_of(arm: ServerLoop, participants: tuple[str, ...] = (), *, measure: bool = False) -> Turn:
    """Return the next turn of an arm, which trains if there are participants, and set it in a member."""
    turn = arm._turn(arm.members[0], measure, bool(participants), participants)
    arm.members[0].turn = turn
    return turn


def message_to(arm: ServerLoop, client: str, *, train: bool) -> Message:
    """Return the next message to a client, which trains or measures."""
    turn_of(arm, (client,) if train else (), measure=not train)
    one = frozenset([client])
    return arm.members[0].messages(frozenset() if train else one, one if train else frozenset())[client]


def first_turn(cfg: Config, fed: Federation | None = None) -> Work:
    """Return the turn of the first client in the first round, before its first step."""
    one, workspace, _ = arm(cfg, fed)
    clients = one.context.clients
    one.members[0].prepare(turn_of(one, clients))
    message = one.members[0].messages(frozenset(), frozenset(clients))[clients[0]]
    workspace.load(message)
    work: Work = one.engine._clients[clients[0]]._work(message)
    work.epochs = workspace.context.training.local_epochs
    workspace.algorithm.before_round(work)
    workspace.net.train()
    return work


def smallest(cfg: Config) -> Iterator[Config]:
    """Yield each arm of a configuration separately and as small as possible.

    Each configuration has two iterations with one round each, or, for unlabeled sets, one iteration with one
    round.
    """
    sets = getattr(cfg.data.partition, "sets", 0)
    keys: dict[str, Any] = {
        "data": {"test_per_client": 10},
        "training": {"rounds": [1], "batch_size": 16, "local_epochs": 1},
    }
    if cfg.data.clients is not None:
        # two for each of five domains
        keys["data"]["clients"] = 10 if getattr(cfg.data.partition, "of_groups", False) else 2
    if getattr(cfg.data.partition, "angles", ()):
        keys["data"]["partition"] = {"angles": [0, 120]}
    if cfg.kind == "labeled":
        keys["data"]["train_per_client"] = 32  # enough for the means of fedbr and a holdout
        keys["model"] = {"hidden": 8}
        keys["training"] |= {"max_iterations": 2, "local_steps": 2}
    else:
        server = {key: 40 for key in ("labeled", "validation") if getattr(cfg.data, key)}
        keys["data"] |= {"clients": 2, "train_per_client": max(60, 10 * sets), **server}
        keys["model"] = {}
    if "cnn" in cfg.model.encoder:
        keys["model"]["width"] = 2
    ensemble = cfg.run.uncertainty == "ensemble"
    for name, of_arm in cfg.table()["arms"].items():
        draws = cfg.kind == "labeled" and find(of_arm["algorithm"]).draws and not ensemble
        keys["run"] = (
            {"precision": "fp32", "evaluation": 1.0}
            | ({"passes": 2} if draws else {})
            | ({"members": 2} if ensemble else {})
        )
        smaller = {
            "codewords": 4,
            "codebook_after": min(1, of_arm.get("codebook_after", 0)),
            "samples": 2,
            "head_epochs": 1,
        }
        if isinstance(of_arm.get("personal"), (list, tuple)):
            smaller |= {"personal": [["silo-0"], ["silo-1"]]}  # one list for each of the two clients
        table = cfg.table() | {
            "arms": {name: of_arm | {key: value for key, value in smaller.items() if key in of_arm}}
        }
        yield config.load(table, **keys)


def again(cfg: Config, fed: Federation | None = None, make: Callable[..., Any] = arm) -> list[dict[str, Any]]:
    """Return all records of a run that continues in a new arm, as after a restart, after every turn."""
    records: list[dict[str, Any]] = []
    one = make(cfg, fed)[0]
    while not one.finished:
        tensors, plain = one.state()
        tensors = {k: v.clone() for k, v in tensors.items()}
        one = make(cfg, fed)[0]
        one.restore(tensors, plain)
        records += one.turn()
    return records


def in_threads(work: Callable[[Any], object], values: Iterable[Any]) -> None:
    """Call a function for each value in a thread of its own."""
    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_errors(replies, *words):
    """Check that the error of each reply has its word, or that a reply without a word has no error."""
    for reply, word in zip(replies, words, strict=True):
        assert reply.error is None if word is None else word in str(reply.error), (reply.error, word)
