"""What a site may want otherwise: python -m utils.hub --config my_config.py. It is JupyterHub's own
file (jupyterhub.readthedocs.io), read after the settings of `utils/hub/__main__.py`. Take over what
you need; as it stands, it changes nothing."""

c = get_config()  # noqa: F821

# Who may come. Without these lines everybody who reaches the hub (with --class-password: who knows
# it), and the first one who uses a name chooses its password. These are the accounts of the machine
# instead; the hub's user, who is not root, must then be in the group shadow (not tried by us):
#
# c.JupyterHub.authenticator_class = "pam"
# c.PAMAuthenticator.open_sessions = False
#
# Or only these names:
#
# c.Authenticator.allow_all = False
# c.Authenticator.allowed_users = {"ada", "bob"}
#
# Or your institution's accounts: pip install oauthenticator; its documentation has the lines.

# Who may stop seats and see who is there: http://…/hub/admin (or --admin NAME).
#
# c.Authenticator.admin_users = {"ada"}

# GPUs: all seats share all of them. Ranks(n) takes one for each rank where there are enough.
#
# c.Seat.devices = ["/dev/nvidia*"]

# A seat of another size for one learner.
#
# c.Spawner.pre_spawn_hook = lambda seat: setattr(
#     seat, "mem_limit", 12 << 30 if seat.user.name == "ada" else seat.mem_limit
# )
