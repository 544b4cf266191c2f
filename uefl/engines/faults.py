"""Error codes of a client.

The text of an error stays in the client's log, because it may contain data.
"""

NOT_READ = "its reply cannot be read"
"""why there is no reply, in place of the code"""

LINE = "cannot reply: "
"""prefix of expected errors in a client's log; other errors have a traceback"""

_WORDS = {
    "memory": "it ran out of memory",
    "computation": "its computation failed",
    "data": "its data cannot be used as the run asks",
    "unreadable": "it could not read the message",
    "misdirected": "the message was for another client",
    "version": "it runs another version of uefl",
    "program": "its program failed",
    "privacy": "it requires more privacy than the run gives",
    "budget": "one more update would exceed its own limit on epsilon",
    "state": "it does not have its private state of that round",
    "algorithm": "it does not accept this algorithm",
}


def describe(code: str) -> str:
    """Return the description of an error code.

    It contains no text of the client.
    """
    return (
        f"{_WORDS.get(code, 'it reports an unknown fault')} (fault {code if code in _WORDS else 'unknown'};"
        " see its own log)"
    )
