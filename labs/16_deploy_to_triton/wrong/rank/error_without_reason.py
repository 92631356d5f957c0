"""The client is told that something was wrong, not what.

hint: The client should be told what the piece said
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
        answer = obey(piece, json.loads(line))
        if "error" in answer:
            answer = {"error": "bad request"}
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
