"""Every rank updates its own part, and nobody tells the others.

hint: does every rank get every other rank's part
"""


class Zero1(Zero1):  # noqa: F821
    def gather(self, unit):
        pass
