"""Names and passwords of learners: the first password given with a name becomes that name's."""

import dbm
import hmac
from typing import Any

from firstuseauthenticator import FirstUseAuthenticator
from traitlets import Unicode

from utils.classroom.board import WRONG, Guard


class Accounts(FirstUseAuthenticator):
    """JupyterHub's FirstUseAuthenticator with reasons for refusals and a limit on attempts."""

    # templates/login.html says it, too
    rule = "1 to 31 of the letters a to z, digits and hyphens, and begins with a letter or a digit"
    class_password = Unicode(help="Password that a new name needs; '': none.").tag(config=True)

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.guard = Guard()

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        """The name, or None, with a reason on the page if there is one to give."""
        name = self.normalize_username(data["username"])
        given = data.get("class_password", "").strip() if self.class_password else ""
        with dbm.open(self.dbm_path, "c", 0o600) as passwords:
            known = name in passwords
        if not self.validate_username(name):
            handler.custom_login_error = f"This name is not valid: a name has {self.rule}."
        elif self.guard.seconds(name):
            handler.custom_login_error = f"{WRONG} wrong passwords for this name: wait a minute."
        elif not known and not hmac.compare_digest(given.encode(), self.class_password.encode()):
            handler.custom_login_error = "A new name needs the class password; ask your instructor."
        elif len(data["password"].encode()) > 72:  # bcrypt's limit
            handler.custom_login_error = "A password has at most 72 bytes."
        elif found := await super().authenticate(handler, data):
            return found
        elif known:
            self.guard.note(name)
        return None
