"""Names and passwords of learners: the first password that comes with a name is that name's."""

import dbm
import hmac
from typing import Any

from firstuseauthenticator import FirstUseAuthenticator
from traitlets import Unicode

from utils.classroom.board import WRONG, Guard


class Accounts(FirstUseAuthenticator):
    """JupyterHub's authenticator of that name, which says why it refuses, and not for ever."""

    # templates/login.html says it, too
    rule = "1 to 31 of the letters a to z, digits and hyphens, and begins with a letter or a digit"
    class_password = Unicode(help="What a new name needs; '': nothing.").tag(config=True)

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.guard = Guard()

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        """The name, or None, and then the page says why where there is more to say."""
        name = self.normalize_username(data["username"])
        given = data.get("class_password", "").strip() if self.class_password else ""
        with dbm.open(self.dbm_path, "c", 0o600) as passwords:
            known = name in passwords
        if not self.validate_username(name):
            handler.custom_login_error = f"This is no name here: a name has {self.rule}."
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
