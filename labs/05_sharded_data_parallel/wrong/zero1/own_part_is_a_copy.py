"""The optimizer changes a copy, and the model keeps the old values.

hint: own_part is a copy
"""


class Zero1(Zero1):  # noqa: F821
    def own_part(self, unit):
        return unit.parts()[self.rank].clone()
