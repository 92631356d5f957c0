"""placeholder until the engine's own"""

import re
import secrets
from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    trace_id: str
    span_id: str
    flags: str

    def child(self):
        return Context(self.trace_id, secrets.token_hex(8), self.flags)

    def header(self):
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def parse(h):
    m = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", h or "")
    return Context(*m.groups()) if m else None


def write(name, context, begin, end, **attributes):
    pass
