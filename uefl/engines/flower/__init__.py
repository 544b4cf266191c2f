"""Flower as the transport of messages.

Messages go over the Grid of Flower to clients in other processes, on this machine or on others.

Needs the extra ``flower``. Only documented commands and modules of Flower are used. The commands run as
processes. Their app (:mod:`uefl.deploy.app`) passes messages to the processes of ``uefl train`` and ``uefl
silo``, and these do not import Flower. Flower must contact only the given addresses: no telemetry, no
check for updates, no installation of packages.
"""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""environment of every process with Flower in it"""
RUN, SILO = "UEFL_RUN", "UEFL_SILO"
"""names of the socket of a run, and of a silo, in the environment of the app"""
MESSAGE = 2**32
"""bytes of a message that a silo accepts: every network here, with the state of the optimizer and private
state, has less than a quarter"""
GONE = "it is gone"
LARGE = "its reply is too large"
TORN = "its reply did not arrive completely"
BARRED = "its last replies could not be read, so the server sends it no more messages"
"""why there is no reply"""
