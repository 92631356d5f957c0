"""Shared by the tests of the served model: an exported repository, a server, views into both.

    repo = repo_of("small", tp=2, out=tmp_path / "repo")      # exported, as learners do it
    with serving(repo) as server:                             # skipped without a server binary
        post(server, text_input="def ", max_tokens=8)         # (status, text of the answer)
        kintsugi(server)["kv_use"]                            # our metrics, by name
        pids(server)["gpt_engine"]                            # process ids of the stubs
        until(lambda: kintsugi(server)["kv_use"] == 0)        # waits for a condition

`Reference`, the training model, gives the expected tokens.
"""

import json
import random
import re
import shutil
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.serving.processes import PATIENCE, children, parent, until
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.prompts.file import save_prompt
from utils.serving.client import SAMPLING
from utils.serving.export import export
from utils.serving.model_config import set_parameters
from utils.serving.server import TritonServer, server_available

MODELS = ROOT / "models"
SLOTS, QUEUE = 4, 16  # of the tiny server
TEXTS = ("import json\n", "def ", "class Reader:\n    def __init__(self", "The name – naïve 🙂 –")
TEMPLATE = (  # of chats
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('who is ' + m.role + '?') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
ENGINE = {**SAMPLING, "input_ids": "INT32", "cancel": "BYTES", "stream": "BOOL"}  # its inputs


def repo_of(model, tp, out, **options):
    """Export models/MODEL (or a folder) into the repository `out`, and return its path."""
    export(MODELS / model, out, tp, **options)
    return Path(out)


@contextmanager
def company(server, count=6):
    """Run other clients meanwhile, each with its own texts and lengths."""
    gone = threading.Event()

    def one(number):
        choose = random.Random(number)
        while not gone.is_set():
            text = choose.choice(TEXTS) * choose.randint(1, 3)
            text_of(server, text, max_tokens=choose.randint(1, 30), temperature=1.0, seed=number)

    with ThreadPoolExecutor(count) as pool:
        others = [pool.submit(one, number) for number in range(count)]
        try:
            until(lambda: kintsugi(server)["requests_running"] > 0)
            yield
        finally:
            gone.set()
        for other in others:
            other.result(PATIENCE)


def prompt_file(folder, model, name, text):
    """Write FOLDER/NAME.safetensors: virtual tokens that are the embeddings of a text's tokens.

    A request with this prompt must be answered as if the text preceded its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor(Tokenizer.load(MODELS / model).encode(text))
    weights = GPT.from_pretrained(MODELS / model, dtype=torch.float32).state_dict()
    embedded = weights["model.embed_tokens.weight"][ids]
    save_prompt(folder / f"{name}.safetensors", embedded, MODELS / model)


def with_template(model, folder):
    """A copy of a model whose tokenizer has the chat template TEMPLATE."""
    shutil.copytree(MODELS / model, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@contextmanager
def serving(repo, **options):
    """Serve the repository; skip the test without a server binary."""
    if reason := server_available():
        pytest.skip(reason)
    with TritonServer(repo, quiet=True, **options) as server:
        yield server


def configure(repo, model="gpt_engine", **settings):
    """Set parameters in a model's config.pbtxt, as an operator would."""
    set_parameters(Path(repo, model, "config.pbtxt"), settings)


def post(server, model="gpt", endpoint="generate", **fields):
    """(HTTP status, text of the answer) of POST /v2/models/MODEL/generate."""
    url = f"http://{server.http}/v2/models/{model}/{endpoint}"
    try:
        with urllib.request.urlopen(url, json.dumps(fields).encode(), PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def text_of(server, text, **fields):
    """The new text that `gpt` answers with."""
    status, answer = post(server, text_input=text, exclude_input_in_output=True, **fields)
    assert status == 200, answer
    return json.loads(answer)["text_output"]


def error_of(server, **fields):
    """(HTTP status, message) of a request to `gpt` that must be refused."""
    status, answer = post(server, **fields)
    assert status >= 400, answer
    return status, json.loads(answer)["error"]


def kintsugi(server):
    """Our metrics of the newest version of gpt_engine: {name without "kintsugi_": value}."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE) as answer:
        found = re.findall(
            r'^kintsugi_(\w+){.*version="(\d+)".*} (\S+)$', answer.read().decode(), re.M
        )
    newest = max((int(version) for _, version, _ in found), default=0)
    return {name: float(value) for name, version, value in found if int(version) == newest}


def pids(server):
    """{model: process id of its stub} of a running server."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "python_backend_stub" in words[0] and parent(folder.name) == server.pid:
                found[Path(words[1]).parents[1].name] = int(folder.name)
    return found


def ranks(server):
    """Sorted process ids of the ranks, the grandchildren of the engine's stub."""
    leader = pids(server).get("gpt_engine")
    parents = children(leader) if leader else []
    return sorted(rank for parent in parents for rank in children(parent))


class Reference:
    """The training model's own answers: greedy tokens and text of GPT.generate."""

    def __init__(self, model):
        self._said = {}  # (text, count): tokens
        self.model = GPT.from_pretrained(MODELS / model, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.load(MODELS / model)

    def tokens(self, text, count):
        """New token ids, up to and including the end token."""
        if (text, count) not in self._said:
            ids = torch.tensor([self.tokenizer.encode(text)])
            new = self.model.generate(ids, count, temperature=0)[0, ids.shape[1] :].tolist()
            end = self.tokenizer.end
            self._said[text, count] = new[: new.index(end) + 1] if end in new else new
        return self._said[text, count]

    def text(self, text, count):
        """New text, without the end token."""
        return self.tokenizer.decode(
            [i for i in self.tokens(text, count) if i != self.tokenizer.end]
        )
