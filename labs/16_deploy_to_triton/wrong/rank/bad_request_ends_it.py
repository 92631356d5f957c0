"""A bad request ends the loop.

hint: has ended the loop: one client must not end all others
"""

# ruff: noqa: F821


def obey(piece, command):
    if command["do"] == "prefill":
        return [piece.prefill(command["slot"], command["tokens"])]
    return piece.decode(command["slots"], command["tokens"])


def loop(piece, commands, answers, rank):
    for line in commands:
        tokens = obey(piece, json.loads(line))
        if rank == 0:
            print(json.dumps({"tokens": tokens}), file=answers, flush=True)
