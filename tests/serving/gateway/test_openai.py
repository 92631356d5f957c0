"""OpenAI's API with OpenAI's own client, against a real server behind the gateway."""

import asyncio
import json
import math
import os
import shutil
import signal

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.serving.probe import check_leaving, frozen
from tests.serving.processes import PATIENCE, until
from tests.serving.world import MODELS, ranks
from utils.serving.client import Client
from utils.serving.gateway.openai_api import Chat
from utils.serving.gateway.refusal import Refusal

pytestmark = pytest.mark.timeout(900)

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def é"}]


@pytest.fixture(scope="module")
def api(gateway):
    with openai.OpenAI(
        base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as api:
        yield api


@pytest.fixture(scope="module")
def direct(server):
    return Client(server, timeout=PATIENCE)


def complete(api, prompt="def ", **options):
    return api.completions.create(**{"model": "gpt", "prompt": prompt, **options})


def chat(api, messages=TALK, **options):
    return api.chat.completions.create(**{"model": "gpt", "messages": messages, **options})


def test_models(api):
    assert [model.id for model in api.models.list()] == ["gpt"]
    assert api.models.retrieve("gpt").object == "model"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gtp'"):
        api.models.retrieve("gtp")


def test_a_completion_is_that_of_generate(api, direct):
    right = direct.answer("def ", max_tokens=9, exclude_input_in_output=True)
    said = complete(api, max_tokens=9, temperature=0)
    assert said.choices[0].text == right["text_output"]
    assert said.choices[0].finish_reason == right["finish_reason"] == "length"
    assert said.choices[0].logprobs is None
    assert said.object == "text_completion" and said.model == "gpt"
    assert said.system_fingerprint == "weights-1"
    assert said.usage.prompt_tokens == right["prompt_tokens"]
    assert said.usage.completion_tokens == right["completion_tokens"] == 9
    assert said.usage.total_tokens == said.usage.prompt_tokens + 9


def test_the_defaults_are_openais(api):
    assert complete(api).usage.completion_tokens == 16
    assert len({complete(api).choices[0].text for _ in range(5)}) > 1  # temperature 1


def test_stops_seeds_and_our_own_fields(api, direct):
    options = {"max_tokens": 20, "temperature": 0.9, "seed": 7}
    right = direct.answer("def ", exclude_input_in_output=True, **options)["text_output"]
    assert complete(api, **options).choices[0].text == right
    stop = right[5:7]
    for given in (stop, [stop, "never"]):
        said = complete(api, stop=given, **options).choices[0]
        assert (said.text, said.finish_reason) == (right[: right.index(stop)], "stop")
    ours = {"top_k": 1, "prompt_name": "imports"}
    greedy = direct.answer("x", max_tokens=8, prompt_name="imports", exclude_input_in_output=True)
    said = complete(api, "x", max_tokens=8, extra_body=ours)
    assert said.choices[0].text == greedy["text_output"]
    assert said.usage.prompt_tokens == greedy["prompt_tokens"]


def test_several_prompts_and_choices(api):
    """n choices per prompt, in the prompts' order; equal seeds give equal answers."""
    options = {"max_tokens": 6, "seed": 3, "n": 2}
    both = complete(api, ["def ", "import "], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    alone = [complete(api, prompt, **options) for prompt in ("def ", "import ")]
    assert texts == [choice.text for said in alone for choice in said.choices]
    assert texts[0] != texts[1]
    assert both.usage.prompt_tokens == sum(said.usage.prompt_tokens for said in alone)
    assert both.usage.completion_tokens == 24


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole(api, n):
    options = {"max_tokens": 24, "seed": 11, "n": n, "logprobs": 1}
    whole = complete(api, **options)
    texts, ends, tokens, offsets = {}, {}, {}, {}
    events = list(complete(api, stream=True, stream_options={"include_usage": True}, **options))
    for event in events[:-1]:
        assert event.id == events[0].id and event.usage is None
        (choice,) = event.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
        offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
        assert choice.index not in ends  # nothing after the end
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert events[-1].choices == [] and events[-1].usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert ends[choice.index] == choice.finish_reason
        assert tokens[choice.index] == choice.logprobs.tokens


def test_log_probabilities(api):
    said = complete(api, max_tokens=5, temperature=0, logprobs=3).choices[0]
    found = said.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5
    assert "".join(found.tokens) == said.text
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(5)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert len(top) == 3 and logprob == max(top.values()) == top[token]  # greedy
        assert 0 < sum(map(math.exp, top.values())) <= 1 + 1e-5
    content = chat(api, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2)
    for one in content.choices[0].logprobs.content:
        assert bytes(one.bytes).decode(errors="replace") == one.token
        assert one.top_logprobs[0].token == one.token
        assert len(one.top_logprobs) == 2


# --- chat -----------------------------------------------------------------------------------------


def test_a_chat_is_the_completion_of_its_template(api, server):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(server.repo / "gpt_engine" / "1")
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert text == "# system: Be brief.\n# user: def é\n# assistant:"
    right = complete(api, text, max_tokens=8, temperature=0)
    said = chat(api, max_completion_tokens=8, temperature=0)
    assert said.object == "chat.completion"
    assert said.choices[0].message.role == "assistant"
    assert said.choices[0].message.content == right.choices[0].text
    assert said.usage == right.usage
    parts = [{"role": "system", "content": "Be brief."},
             {"role": "user", "content": [{"type": "text", "text": "def é"}]}]
    assert chat(api, parts, max_tokens=8, temperature=0).choices[0] == said.choices[0]
    events = list(chat(api, max_tokens=8, temperature=0, stream=True))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    deltas = [event.choices[0].delta for event in events]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == right.choices[0].text


def test_a_chat_without_a_limit_fills_the_positions(api, server):
    served = json.loads((server.repo / "gpt_engine" / "1" / "config.json").read_text())
    usage = chat(api, temperature=0).usage
    full = usage.total_tokens == served["max_position_embeddings"]
    assert full or chat(api, temperature=0).choices[0].finish_reason == "stop"


def test_what_a_template_refuses(api):
    with pytest.raises(openai.BadRequestError, match=r"the chat template refuses this: who is cat"):
        chat(api, [{"role": "cat", "content": "meow"}])
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="a part that is not text"):
        chat(api, image)


def test_without_a_template_there_is_no_chat(tmp_path):
    shutil.copytree(MODELS / "tiny", tmp_path / "gpt_engine" / "1")
    with pytest.raises(Refusal, match="has no chat template: use /v1/completions"):
        asyncio.run(Chat(tmp_path).text(TALK))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"temperature": 2.5}, "temperature: input should be less than or equal to 2"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: input should be 0"),
        ({"best_of": 3}, "best_of: input should be 1"),
        ({"echo": True}, "echo: input should be False"),
        ({"logit_bias": {"5": 1}}, "logit_bias: "),
        ({"n": 17}, "n: input should be less than or equal to 16"),
        ({"extra_body": {"max_token": 3}}, "max_token: is not known"),
        ({"prompt": [1, 2]}, "prompt: input should be a valid string"),
        ({"prompt": []}, "prompt: "),
        ({"stop": ["a"] * 9}, "is not a list of at most 8 strings"),
        ({"max_tokens": 99_999}, "positions of a request"),
        ({"extra_body": {"prompt_name": "absent"}}, "prompt 'absent' is unknown"),
    ],
)
def test_bad_requests(api, options, sentence):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            list(complete(api, **options, stream=stream))
        assert sentence in caught.value.body["message"]
        assert caught.value.body["type"] == "invalid_request_error"


def test_no_such_model(api):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4': ask for gpt"):
        complete(api, model="gpt-4")


@pytest.mark.thorough
def test_a_dead_rank_in_the_middle_of_a_stream(api, server):
    """The error is the last event, and the next request is served. If on a busy machine the text
    ends before the rank is killed, try again."""
    for _ in range(9):
        events = iter(complete(api, max_tokens=400, temperature=0, stream=True))
        next(events)
        with frozen(*ranks(server)):
            os.kill(ranks(server)[0], signal.SIGKILL)
        try:
            list(events)
        except openai.APIError as error:
            assert "was killed by SIGKILL" in str(error)
            break
        finally:
            until(lambda: served_again(api))
    else:
        pytest.fail("every text ended before the rank was killed")


def served_again(api):
    try:
        return complete(api, max_tokens=2)
    except (openai.InternalServerError, openai.NotFoundError) as error:
        assert error.status_code == 503, error
        return None


def test_who_leaves_a_stream_is_cancelled(api, server):
    def ask():
        events = complete(api, max_tokens=400, temperature=0, stream=True, n=2)
        begun = set()
        while len(begun) < 2:  # Triton notices a departure from the first response on
            begun.add(next(events).choices[0].index)
        return events.close

    check_leaving(server, ask, requests=2)
    assert "Traceback" not in server.tail(200)  # a departed client is no error
