"""The program that answers for a client: what the server asks of it opens no file that the server names."""

import torch

from tests.federated import tiny
from uefl.deploy.setting import Setting, task
from uefl.deploy.silo import SiloProgram
from uefl.engines.base import Message, expected_like
from uefl.engines.codec import packed_message, reply_of


class Given:
    """A source in memory."""

    name = "silo-0"

    def data(self, client, cfg, classes, channels):
        return tiny.federation().silos[0].load()


def test_pretrained_weights_are_the_server_s_to_read(tmp_path):
    weights, fed = tmp_path / "weights.pth", tiny.federation()
    asked = {"encoder": "resnet18", "hidden": 16}
    plain = tiny.settings("fedavg", base=tiny.KEYS | {"model": asked})
    room = tiny.workspace(plain, fed)
    cfg = tiny.settings("fedavg", base=tiny.KEYS | {"model": asked | {"pretrained": str(weights)}})
    assert not weights.exists()
    tensors = room.initial(5)[0]
    message = Message(tensors, {"seed": 0, "round": 0, "evaluate": True, "train": False, "last": False}, expected_like(tensors))
    program = SiloProgram(Given(), torch.device("cpu"))
    replies = [
        reply_of(program(packed_message(message, task(Setting.of(one, fed, 1), "arm") | {"client": "silo-0"}))) for one in (cfg, plain)
    ]
    assert [reply.error for reply in replies] == [None, None]
    assert replies[0].metrics == replies[1].metrics
