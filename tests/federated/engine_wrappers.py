"""Engines around another engine: they record its messages or change its replies.

The functions return what ``wrap`` of :func:`tests.federated.tiny.arm` takes.
"""


class RecordingEngine:
    """An engine that calls ``record`` with the messages of each exchange."""

    def __init__(self, inner, record):
        self.inner, self.record = inner, record

    def clients(self):
        return self.inner.clients()

    def round(self, messages, deadline=None):
        self.record(messages)
        return self.inner.round(messages, deadline)


class TamperingEngine:
    """An engine that lets ``change`` alter or replace each reply on its way."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def clients(self):
        return self.inner.clients()

    def round(self, messages, deadline=None):
        for reply in self.inner.round(messages, deadline):
            yield self.change(reply) or reply


def recorded(record):
    return lambda engine: RecordingEngine(engine, record)


def tampered(change):
    return lambda engine: TamperingEngine(engine, change)


def lies(change, client="silo-1"):
    """Let ``change`` alter the valid replies of one client."""

    def meddle(reply):
        if reply.client == client and reply.error is None:
            change(reply)

    return tampered(meddle)
