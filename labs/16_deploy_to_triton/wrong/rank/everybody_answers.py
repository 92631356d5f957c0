"""All ranks answer.

hint: rank 1 answers too
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
        print(json.dumps(obey(piece, json.loads(line))), file=answers, flush=True)
