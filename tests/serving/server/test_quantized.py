"""A model in fp32 and in 8 bits side by side: asked by version, compared under load, promoted."""

import json
import re

import pytest

from tests.serving.processes import PATIENCE, until
from tests.serving.world import MODELS, configure, error_of, post, repo_of, serving
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.serving.client import Client
from utils.serving.engine.version import Version

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

TEXTS = ("import json\n", "def ", "class Reader:\n    def __init__(self", "The name of the ")
NEW = 12


def answer(server, text, **fields):
    status, said = post(server, text_input=text, max_tokens=NEW, **fields)
    assert status == 200, said
    return json.loads(said)


def compared(server):
    """The table in which docs/serving.md compares both versions under load."""
    page = (ROOT / "docs" / "serving.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "load.run" in code]
    changes = {"models/base": MODELS / "tiny", "requests=32": "requests=8", "print(": "frame = ("}
    changes |= {"localhost:8000": server.http, "localhost:8001": server.grpc}
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, str(new))
    exec(code, names := {})
    return names["frame"]


def test_two_versions_side_by_side_and_the_second_promoted(tmp_path):
    repo = repo_of("tiny", 1, tmp_path / "repo")
    repo_of("tiny", 1, repo, version=2, dtype="int8")
    config = repo / "gpt_engine" / "config.pbtxt"
    config.write_text(config.read_text().replace("num_versions: 1", "num_versions: 2"))
    configure(repo, "gpt", weights_version=1)
    assert [Version.read(config.parent / number).compute for number in "12"] == ["auto", "int8"]
    prompts = [Tokenizer.load(MODELS / "tiny").encode(text) for text in TEXTS]
    with serving(repo) as server:
        client = Client(server, timeout=PATIENCE)
        assert server.versions("gpt_engine") == [1, 2]
        said = {  # by version number; text requests stay on version 1
            version: [
                [
                    token
                    for piece in client.tokens(ids, version=version, max_tokens=NEW)
                    for token in piece
                ]
                for ids in prompts
            ]
            for version in ("1", "2")
        }
        frame = compared(server)
        assert list(frame["errors"]) == [0, 0] and (frame["tokens_per_second"] > 0).all()
        pairs = [pair for both in zip(*said.values()) for pair in zip(*both)]
        assert len(pairs) == NEW * len(TEXTS) and sum(one == two for one, two in pairs) > 24

        assert {answer(server, text)["weights_version"] for text in TEXTS} == {"1"}
        configure(repo, "gpt", weights_version=2)  # promoted
        server.load("gpt")
        until(lambda: answer(server, "def ")["weights_version"] == "2")
        decoded = [Tokenizer.load(MODELS / "tiny").decode(tokens) for tokens in said["2"]]
        texts = [answer(server, text, exclude_input_in_output=True) for text in TEXTS]
        assert [text["text_output"] for text in texts] == decoded
        configure(repo, "gpt", weights_version=1)  # and back: it is still loaded
        server.load("gpt")
        until(lambda: answer(server, "def ")["weights_version"] == "1")
        configure(repo, "gpt", weights_version=3)
        server.load("gpt")
        said = "UNAVAILABLE: gpt_engine 3 has died or is not loaded, try again later"
        until(lambda: post(server, text_input="def ")[0] != 200)
        assert error_of(server, text_input="def ")[1] == said
