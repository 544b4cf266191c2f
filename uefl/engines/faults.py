"""Error codes of a client.

The text of an error stays in the client's log, because it may contain data.
"""

MEMORY = "memory"
COMPUTATION = "computation"
DATA = "data"
UNREADABLE = "unreadable"
MISDIRECTED = "misdirected"
VERSION = "version"
PROGRAM = "program"
PRIVACY = "privacy"
BUDGET = "budget"
ALGORITHM = "algorithm"
STATE = "state"

NOT_READ = "its reply cannot be read"
"""why there is no reply, in place of the code"""

LINE = "cannot reply: "
"""prefix of expected errors in a client's log; other errors have a traceback"""

_WORDS = {
    MEMORY: "it ran out of memory",
    COMPUTATION: "its computation failed",
    DATA: "its data cannot be used as the run asks",
    UNREADABLE: "it could not read the message",
    MISDIRECTED: "the message was for another client",
    VERSION: "it runs another version of uefl",
    PROGRAM: "its program failed",
    PRIVACY: "it requires more privacy than the run gives",
    BUDGET: "one more update would exceed its own limit on epsilon",
    STATE: "it does not have its private state of that round",
    ALGORITHM: "it does not accept this algorithm",
}


def describe(code: str) -> str:
    """Return the description of an error code.

    It contains no text of the client.
    """
    return (
        f"{_WORDS.get(code, 'it reports an unknown fault')} (fault {code if code in _WORDS else 'unknown'};"
        " see its own log)"
    )
