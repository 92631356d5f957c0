"""The others have nothing to answer, so they do nothing.

hint: Every rank obeys every command
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
    for line in commands:
        if rank == 0:
            answer = obey(piece, json.loads(line))
            print(json.dumps(answer), file=answers, flush=True)
