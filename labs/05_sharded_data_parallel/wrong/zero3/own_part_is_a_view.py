"""The shard lies in the memory that is released.

hint: It needs memory of its own
"""


class Zero3(Zero3):  # noqa: F821
    def own_part(self, unit):
        return unit.parts()[self.rank]
