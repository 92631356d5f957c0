"""One command, and the loop is over.

hint: rank 0 has ended
"""

# ruff: noqa: F821


def obey(piece, command):
    try:
        if command["do"] == "prefill":
            return {"tokens": [piece.prefill(command["slot"], command["tokens"])]}
        return {"tokens": piece.decode(command["slots"], command["tokens"])}
    except ValueError as error:
        return {"error": str(error)}


def loop(piece, commands, answers, rank):
    answer = obey(piece, json.loads(commands.readline()))
    if rank == 0:
        print(json.dumps(answer), file=answers, flush=True)
