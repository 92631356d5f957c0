"""The optimizer gets all parameters: nothing is shared out.

hint: own_part has the shape
"""


class Zero1(Zero1):  # noqa: F821
    def own_part(self, unit):
        return unit.flat
