"""The settings of the suites of reproduction/ at ``--scale paper``, from the papers and their code."""

from __future__ import annotations

from typing import Any

from uefl.config.load import merged

Sections = dict[str, Any]
NINE = [0, 0, 0, -50, -50, -50, 120, 120, 120]
CNN: Sections = {"encoder": "cnn", "width": 128, "dropout": 0.1}
VGG: Sections = {"encoder": "vgg16_bn", "pretrained": True, "dropout": 0.1}
ADAM: Sections = {"optimizer": "adam", "lr": 1e-4, "batch_size": 1024, "max_iterations": 5}
SGD: Sections = {"optimizer": "sgd", "lr": 1e-2, "momentum": 0.9, "local_epochs": 1}
IMAGENET = {"normalize": "imagenet"}
# table 1: data, network, training images of a client, of which a quarter is the number of test images,
# codewords, segments, gamma, and rounds of an iteration. On GTSRB the paper has one segment: see the suite
SETS: dict[str, tuple[Sections, Sections, int, int, int, float, list[int]]] = {
    "mnist": ({"source": "mnist"}, CNN, 2000, 32, 1, 0.3, [20]),
    "fashion": ({"source": "fashion_mnist"}, CNN, 2000, 64, 1, 0.1, [30, 10]),
    "gtsrb": ({"source": "gtsrb", "image_size": 32, **IMAGENET}, VGG, 2000, 64, 2, 0.1, [40, 20]),
    "cifar10": ({"source": "cifar10", **IMAGENET}, VGG, 2000, 64, 1, 0.2, [40, 20]),
    # 32 codewords in each of four segments: appendix L
    "cifar100": ({"source": "cifar100", **IMAGENET}, VGG, 4000, 32, 4, 0.1, [40, 20]),
}
# UEFL in tables 2, 3, 4 and 12, for which the paper has no codebook
FOUR_SEGMENTS: Sections = {"codewords": 64, "segments": 4, "gamma": 0.2, "stop_when_certain": False}


def uefl(name: str, **keys: Any) -> Sections:
    """Return the keys of UEFL on a data set of table 1."""
    _, _, _, codewords, segments, gamma, _ = SETS[name]
    keys = {"codewords": codewords, "segments": segments, "gamma": gamma, **keys}
    return {"stop_when_certain": False, "commitment": 0.25, **keys}


def nine(name: str, arms: Sections, **sections: Sections) -> Sections:
    """Return the federation of table 1 on a data set, with other arms and with changes."""
    source, encoder, images, _, _, _, rounds = SETS[name]
    rotated = {"scheme": "rotations", "angles": NINE}
    sizes = {"clients": 9, "train_per_client": images, "test_per_client": images // 4}
    training = {"rounds": rounds, "local_epochs": 20, **ADAM}
    whole = {"data": {**source, **sizes, "partition": rotated}, "model": encoder, "training": training}
    return merged(whole, {**sections, "arms": arms})


def five(arms: Sections, angles: list[float] | None = None, **sections: Sections) -> Sections:
    """Return the federation of tables 6 and 7, with changes."""
    rotated = {"scheme": "rotations", **({"angles": angles} if angles else {})}
    sizes = {"clients": 5, "train_per_client": 10000, "test_per_client": 2000}
    training = {"rounds": [40, 20], "local_epochs": 5, **ADAM}
    whole = {"data": {"source": "cifar100", **IMAGENET, **sizes, "partition": rotated}, "model": VGG}
    return merged({**whole, "training": training}, {**sections, "arms": arms})


def unseen(domain: str, invariance: float = 1e-2, **sections: Sections) -> Sections:
    """Return a case of tables 2 and 3: FedIIR's federation."""
    arms = {"fedavg": {}, "fedsr": {"dim": 512, "norm_weight": 1e-2, "divergence_weight": 1e-3}}
    arms |= {"fediir": {"invariance": invariance, "decay": 0.95}, "uefl": FOUR_SEGMENTS}
    data = {"source": "rotated_mnist", "partition": {"scheme": "leave_one_out", "domain": domain}}
    training = {**SGD, "rounds": [40, 20, 20, 20], "batch_size": 64}
    network = {"encoder": "resnet18", "pretrained": True, "frozen_batch_norm": True}
    whole = {"run": {"select": "holdout"}, "data": data, "model": network, "training": training}
    return merged({**whole, "arms": arms}, sections)


def hundred(source: Sections, encoder: str, images: int, epochs: int = 5) -> Sections:
    """Return a case of table 4: FedCR's federation and networks."""
    dirichlet = {"scheme": "dirichlet", "convention": "over_classes", "alpha": 0.3}
    sizes = {"clients": 100, "train_per_client": images * 7 // 10, "test_per_client": images * 3 // 10}
    training = {"optimizer": "sgd", "lr": 1e-2, "batch_size": 48, "rounds": [200, 100, 100, 100]}
    fedsr = {"hidden_layer": True, "dim": 256, "norm_weight": 1e-3, "divergence_weight": 1e-3}
    fedcr = {"hidden_layer": True, "dim": 512, "beta": 1e-4, "rate": 1.0, "samples": 18, "head_epochs": 10}
    return {
        "run": {"participation": 0.1, "personalized": True},
        "data": {**source, **sizes, "partition": dirichlet},
        "model": {"encoder": encoder, "hidden": 1024},
        "training": {**training, "local_epochs": epochs},
        "arms": {"fedavg": {}, "fedsr": fedsr, "fedcr": fedcr, "uefl": FOUR_SEGMENTS},
    }


def skewed(
    train: int, source: str, partition: Sections, training: Sections, **sections: Sections
) -> Sections:
    """Return a case of table 12: the federation of VHL or of FedBR."""
    sizes = {"clients": 10, "train_per_client": train, "test_per_client": 1000}
    vhl = {"virtual_batch": 128, "virtual_per_class": 200, "temperature": 0.07, "pull": 1.0}
    fedbr = {"contrast": 0.5, "uniform": 1.0, "pseudo": 32, "pull": 2.0, "push": 2.0}
    return {
        "data": {"source": source, **sizes, "partition": {"scheme": "dirichlet", "alpha": 0.1, **partition}},
        "training": {**SGD, "rounds": [400, 200, 200, 200], **training},
        "arms": {"fedavg": {}, "vhl": vhl, "fedbr": fedbr, "uefl": FOUR_SEGMENTS},
        **sections,
    }


def sets(source: str, split: str, number: int, penalty: float, pool: int, **sections: Sections) -> Sections:
    """Return a case of FedUL's tables."""
    cifar = source == "cifar10"
    vat = {"vat_weight": 0.05, "vat_epsilon": 6} if cifar else {"vat_weight": 5e-4, "vat_epsilon": 1e-2}
    arms = {
        name: {"penalty": penalty} for name in ("fedul", "fedpl", "fedllp", "fedllp-vat", "fedavg-labeled")
    }
    arms["fedllp-vat"] |= vat
    if number == 10:
        arms["fedavg-labeled-10"] = {"algorithm": "fedavg-labeled", "share": 0.1, "penalty": penalty}
    return {
        "data": {
            "source": source,
            "clients": 5,
            "train_per_client": pool // 5,
            "test_per_client": 2000,
            "validation": 10000 if cifar else 12000,
            "augment": "flip" if cifar else "rotate",
            "partition": {"scheme": "unlabeled", "split": split, "sets": number},
        },
        "model": {"encoder": "resnet18_nopool", "pretrained": True}
        if cifar
        else {"encoder": "cnn5x5", "width": 64},
        "training": {"rounds": [100], "local_epochs": 1, "lr": 1e-4, "batch_size": 128, "optimizer": "adam"},
        "arms": arms,
    }


def article(split: str) -> Sections:
    """Return a case of the article on FedUL with M1 and M2."""
    pool = {"train_per_client": 7200, "labeled": 12000, "validation": 12000}
    whole = sets("mnist", split, 10, 0.0, 48000)
    arms = {"fedul": {}, "fedul-m1": {"algorithm": "fedul", "server": "finetune"}}
    arms |= {"fedul-m2": {"algorithm": "fedul", "server": "blend", "h": 0.5}, "supervised": {}}
    more = {"run": {"select": "validation"}, "data": pool, "training": {"batch_size": 100}}
    return {**merged(whole, more), "arms": {**arms, "fedavg-labeled": {}}}


def published(name: str) -> Sections:
    """Return the arms of table 1."""
    ours = uefl(name)
    return {
        "fedavg": {},
        "distrans": {"alpha": 0.2, "offset_lr": 1e-3, "offsets": "local"},
        "uefl": ours,
        "uefl-published": {**ours, "reference": "mean"},
        "fedper": {},
    }


STATIC = {"algorithm": "uefl", "extend": "none"}
TOGETHER = {"clients": 1, "train_per_client": 50000, "test_per_client": 10000, "partition": {"angles": [0]}}
TURNED = [-30, -15, 0, 15, 30]
FIFTY = [-50, -25, 0, 25, 50]
MORE: dict[int, Sections] = {  # further arms than in table 7, by the largest angle
    0: {"centralized": {}},
    30: {"centralized": {}},
    50: {
        "two-segments": {"algorithm": "uefl", **uefl("cifar100", segments=2)},
        "one-segment": {"algorithm": "uefl", **uefl("cifar100", segments=1)},
    },
}
ANGLES = ("00", "15", "30", "45", "60", "75")
PACS = ("art_painting", "cartoon", "photo", "sketch")
# settings of every case at --scale paper, from the papers, and from the code of the methods whose protocol
# UEFL's paper follows
SETTINGS: dict[str, dict[str, Sections]] = {
    "table1": {name: nine(name, published(name)) for name in SETS},
    "table2": {f"rotated-{angle}": unseen(f"rotated-{angle}") for angle in ANGLES}
    | {
        f"pacs-{domain.partition('_')[0]}": unseen(
            domain,
            1e-3,
            data={"source": "pacs", "image_size": 224, "augment": "photo", **IMAGENET},
            training={"lr": 2.5e-3, "batch_size": 32},
        )
        for domain in PACS
    },
    "table3": {
        f"rotated-{angle}": unseen(f"rotated-{angle}", run={"participation": 0.1}, data={"clients": 50})
        for angle in ANGLES
    },
    "table4": {
        "emnist-letters": hundred({"source": "emnist_letters", "first_classes": 10}, "pixel_mlp", 560),
        "fashion": hundred({"source": "fashion_mnist"}, "lenet", 700),
        "cifar10": hundred({"source": "cifar10"}, "lenet", 600),
        "cifar100": hundred({"source": "cifar100"}, "lenet", 600, epochs=10),
    },
    "table6": {
        f"{weights}-{turn}": five(
            {"centralized": {}, "fedavg": {}, "uefl": uefl("cifar100")},
            TURNED if turn == "turned" else None,
            model={"pretrained": weights == "pretrained"},
        )
        for weights in ("scratch", "pretrained")
        for turn in ("upright", "turned")
    },
    "table7": {
        str(a): five({"fedavg": {}, "uefl": uefl("cifar100")}, [-a, -a / 2, 0, a / 2, a])
        for a in (10, 20, 30, 40, 50, 60, 70)
    },
    "table8": {
        f"{name}{end}": nine(name, arms, training={"max_iterations": iterations})
        for name in SETS
        for end, arms, iterations in (("", {"fedavg": {}}, 1), ("-uefl", {"uefl": uefl(name)}, 5))
    },
    "table9": {
        f"{name}-{end}": nine(name, {"fedavg": {}, "uefl": uefl(name)}, run=run)
        for name in SETS
        for end, run in (("dropout", {"passes": 20}), ("ensemble", {"uncertainty": "ensemble", "members": 5}))
    },
    "table10": {
        "mnist": nine(
            "mnist",
            {"fedavg": {}, "tpt": {}},
            training={"rounds": [1], "max_iterations": 200, "local_epochs": 5},
        ),
        "mnist-uefl": nine("mnist", {"fedavg": {}, "uefl": uefl("mnist")}),
        # the phase begins after 38 epochs, or after 44 rounds; it is as long as the training before it
        "cifar100-together": five(
            {"fedavg": {}, "tpt": {}},
            data=TOGETHER,
            training={"rounds": [1], "max_iterations": 76, "local_epochs": 1},
        ),
        "cifar100": five({"fedavg": {}, "tpt": {}}, FIFTY, training={"rounds": [1], "max_iterations": 88}),
        "cifar100-uefl": five({"fedavg": {}, "uefl": uefl("cifar100")}, FIFTY),
    },
    "table11": {  # the network and the codebook are the paper's; the data only have to train a round
        "cifar10": {
            "data": {"source": "cifar10", "clients": 2, "train_per_client": 400, "test_per_client": 16},
            "model": VGG,
            "training": {"rounds": [1], "local_epochs": 1, "batch_size": 32},
            "arms": {"fedavg": {}, "uefl": {"codewords": 256}},
        }
    },
    "table12": {
        "fashion": skewed(
            6000,
            "fashion_mnist",
            {"convention": "over_clients", "test": "even"},
            {"batch_size": 128, "weight_decay": 1e-4},
            run={"participation": 0.5},
            model={"encoder": "resnet18_3x3", "pooled": True},
        ),
        "cifar10": skewed(
            4000,
            "cifar10",
            {"convention": "over_classes_by_frequency", "angles": list(range(0, 136, 15))},
            {"batch_size": 32, "momentum": 0.0, "local_steps": 50},
            model={"encoder": "vgg16_bn"},
        ),
    },
    "table13": {
        "mnist": nine(
            "mnist",
            {
                "fedavg": {},
                "uefl": uefl("mnist"),
                "per-domain": {
                    **STATIC,
                    "personal": [["silo-0", "silo-1", "silo-2"], ["silo-3"], ["silo-4"]],
                },
            },
            data={"clients": 5, "partition": {"angles": [0, 0, 0, -50, 120]}},
        )
    },
    "table14": {
        str(v): nine("gtsrb", {"fedavg": {}, "uefl": uefl("gtsrb", codewords=v, segments=1)})
        for v in (8, 16, 32, 64, 128, 256)
    },
    "table15": {
        "mnist": nine(
            "mnist",
            {
                "static-32": {**STATIC, "codewords": 32},
                "static-96": {**STATIC, "codewords": 96},
                "extend-all-normal": {"algorithm": "uefl", "extend": "all", "new_codewords": "normal"},
                "extend-all": {"algorithm": "uefl", "extend": "all", "new_codewords": "kmeans"},
                "uefl-normal": {"algorithm": "uefl", **uefl("mnist"), "new_codewords": "normal"},
                "uefl": {**uefl("mnist"), "new_codewords": "kmeans"},
            },
        )
    },
    "table16": {
        name: nine(
            name,
            {
                "static-512": {**STATIC, "codewords": 512},
                "static-512-kmeans": {**STATIC, "codewords": 512, "codebook_after": 1},
                "uefl-128": {
                    "algorithm": "uefl",
                    **uefl("cifar100", codewords=128, segments=1),
                    "growth": "double",
                },
                "extend-all-128": {
                    "algorithm": "uefl",
                    "extend": "all",
                    "codewords": 128,
                    "growth": "double",
                },
            },
            training={"rounds": [40, 20, 20], "max_iterations": 3},
        )
        for name in ("cifar100", "cifar10")
    },
    **{
        f"fedul-{name}": {
            f"{split}-{number}": sets(source, split, number, penalty, pool)
            for split in ("iid", "noniid")
            for number, penalty in zip((10, 20, 40), penalties, strict=True)
        }
        for name, source, pool, penalties in (
            ("mnist", "mnist", 48000, (1e-5, 5e-6, 2e-6)),
            ("fashion", "fashion_mnist", 48000, (1e-5, 5e-6, 2e-6)),
            ("cifar10", "cifar10", 40000, (2e-5, 1e-5, 4e-6)),
        )
    },
    "fedul-article": {split: article(split) for split in ("iid", "noniid")},
    "fedul-h": {
        f"h-{name}": {
            **article("noniid"),
            "arms": {"fedul-m2": {"algorithm": "fedul", "server": "blend", "h": h}},
        }
        for name, h in (("0", 0.0), ("025", 0.25), ("05", 0.5), ("075", 0.75), ("1", 1.0))
    },
    "segments": {
        str(s): nine("gtsrb", {"fedavg": {}, "uefl": uefl("gtsrb", codewords=16, segments=s)})
        for s in (1, 2, 4)
    },
    "segments-cifar100": {
        str(s): five({"fedavg": {}, "uefl": uefl("cifar100", segments=s)}, FIFTY) for s in (1, 2, 4)
    },
    "five-clients-cifar10": {
        str(a or "upright"): five(
            {"fedavg": {}, "uefl": uefl("cifar100"), **MORE.get(a, {})},
            [-a, -a / 2, 0, a / 2, a] if a else None,
            data={"source": "cifar10"},
        )
        for a in range(0, 80, 10)
    },
    "threshold": {
        str(gamma).replace("0.", "0").replace("00", "0"): nine(
            "mnist", {"fedavg": {}, "uefl": uefl("mnist", gamma=gamma)}, run={"target_accuracy": 0.8}
        )
        for gamma in (0.0, 0.1, 0.2, 0.3, 0.5)
    },
    "figure1": {"mnist": nine("mnist", {"fedavg": {}, "uefl": uefl("mnist")}, run={"personalized": True})},
}
