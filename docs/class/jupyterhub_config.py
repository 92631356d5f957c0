"""Settings that a site may want to change: python -m utils.hub --config my_config.py. It is
JupyterHub's own kind of file (jupyterhub.readthedocs.io), read after the settings of
`utils/hub/__main__.py`. Copy what you need; as it is, it changes nothing."""

c = get_config()  # noqa: F821

# Who may log in. Without these lines, anyone who reaches the hub (with --class-password: who knows
# it), and the first user of a name chooses its password. These lines use the machine's accounts
# instead; the hub's user, who is not root, must then be in the group shadow (untested):
#
# c.JupyterHub.authenticator_class = "pam"
# c.PAMAuthenticator.open_sessions = False
#
# Or allow only these names:
#
# c.Authenticator.allow_all = False
# c.Authenticator.allowed_users = {"ada", "bob"}
#
# Or use your institution's accounts: pip install oauthenticator; see its documentation.

# Who may see and stop seats: http://…/hub/admin (or --admin NAME).
#
# c.Authenticator.admin_users = {"ada"}

# GPUs: all seats share all of them. Ranks(n) uses one per rank if there are enough.
#
# c.Seat.devices = ["/dev/nvidia*"]

# A seat of a different size for one learner.
#
# c.Spawner.pre_spawn_hook = lambda seat: setattr(
#     seat, "mem_limit", 12 << 30 if seat.user.name == "ada" else seat.mem_limit
# )
