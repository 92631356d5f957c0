"""Every rank believes that part 0 is its own.

hint: differ from one rank's
"""


class Zero1(Zero1):  # noqa: F821
    def own_part(self, unit):
        return unit.parts()[0]
