"""OpenAI's API over the model `gpt`: completions, chat completions, models.

    POST /v1/completions         {"model": "gpt", "prompt": "def ", "max_tokens": 16}
    POST /v1/chat/completions    {"model": "gpt", "messages": [{"role": "user", "content": "Hi"}]}
    GET  /v1/models

Fields that exist here do what OpenAI's reference says; any other is refused by name, never ignored.
In addition there are top_k and prompt_name, as in `generate` (extra_body in the official client).
Each choice is a separate request to `gpt`, so all of them run in one batch.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from utils.serving.gateway.refusal import Refusal

CHOICES = 16  # most choices per request
COMPLETION_TOKENS = 16  # OpenAI's default
AS_MANY_AS_FIT = -1

Text = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Sampling(BaseModel):
    """The fields of both endpoints. A Literal accepts only the value that has no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    n: Annotated[int, Field(ge=1, le=CHOICES)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prompt_name: str | None = None
    user: str | None = None
    frequency_penalty: Literal[0] | None = 0
    presence_penalty: Literal[0] | None = 0
    logit_bias: Annotated[dict, Field(max_length=0)] | None = None

    def request(self, text: str, choice: int) -> dict:
        """The body of generate for one choice; each choice of a request has a seed of its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        seed = None if self.seed is None else (self.seed + choice) % 2**63
        fields = {
            "text_input": text, "max_tokens": self.tokens(), "logprobs": self.wanted_logprobs(),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p, "top_k": self.top_k, "seed": seed, "stop": stop or None,
            "prompt_name": self.prompt_name, "exclude_input_in_output": True, "stream": self.stream,
        }
        return {name: value for name, value in fields.items() if value is not None}


class Completions(Sampling):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=CHOICES)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    kind: ClassVar = "text_completion"
    prefix: ClassVar = "cmpl"

    async def texts(self, chat: "Chat") -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def tokens(self) -> int:
        return self.max_tokens or COMPLETION_TOKENS

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def choice(self, number: int, answer: "Answer", first: bool, streamed: bool) -> dict:
        found = None
        if self.logprobs is not None:
            found = {
                "tokens": [one["token"] for one in answer.logprobs],
                "token_logprobs": [one["logprob"] for one in answer.logprobs],
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in one["top_logprobs"]}
                    for one in answer.logprobs
                ],
                "text_offset": answer.offsets(),
            }
        finish = answer.finish or None
        return {"index": number, "text": answer.text, "logprobs": found, "finish_reason": finish}


class Message(BaseModel):
    """One message: plain text, or OpenAI's list of parts, all of which must be text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[dict]
    name: str | None = None

    def plain(self) -> dict:
        if isinstance(self.content, str):
            text = self.content
        elif all(set(part) == {"type", "text"} and part["type"] == "text" for part in self.content):
            text = "".join(str(part["text"]) for part in self.content)
        else:
            raise Refusal("INVALID_ARG: a message has a part that is not text")
        return {"role": self.role, "content": text}


class ChatCompletions(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    kind: ClassVar = "chat.completion"
    prefix: ClassVar = "chatcmpl"

    async def texts(self, chat: "Chat") -> list[str]:
        return [await chat.text([message.plain() for message in self.messages])]

    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or AS_MANY_AS_FIT

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def choice(self, number: int, answer: "Answer", first: bool, streamed: bool) -> dict:
        said = {"content": answer.text}
        if first or not streamed:
            said = {"role": "assistant", **said}
        content = [{k: v for k, v in one.items() if k != "id"} for one in answer.logprobs]
        for one in content:
            one["top_logprobs"] = [
                {k: v for k, v in top.items() if k != "id"} for top in one["top_logprobs"]
            ]
        return {
            "index": number,
            "delta" if streamed else "message": said,
            "logprobs": {"content": content} if self.logprobs else None,
            "finish_reason": answer.finish or None,
        }


class Answer:
    """The output of one choice: a chunk of it, or all chunks together."""

    def __init__(self):
        self.text, self.finish, self.logprobs, self.version = "", "", [], ""
        self.prompt_tokens = self.completion_tokens = 0
        self.begin = 0  # characters before it

    def add(self, event: dict) -> None:
        """Append one response of `gpt`."""
        self.text += event["text_output"]
        self.finish = event["finish_reason"]
        self.prompt_tokens = event["prompt_tokens"]
        self.completion_tokens = event["completion_tokens"]
        self.version = event["weights_version"]
        self.logprobs += json.loads(event.get("logprobs") or "[]")

    def offsets(self) -> list[int]:
        """The offset of each token in the text of the answer."""
        found, place = [], self.begin
        for one in self.logprobs:
            found.append(place)
            place += len(one["token"])
        return found


class Chat:
    """The chat template of the newest version's own tokenizer.

    repository   the served folder; None: no chat
    """

    def __init__(self, repository: Path | None):
        self.repository, self.read = repository, {}

    async def text(self, messages: list[dict]) -> str:
        """The prompt that these messages become. Raises Refusal."""
        return await asyncio.to_thread(self._text, messages)

    def _text(self, messages):
        folder = self._folder()
        if folder not in self.read:
            from transformers import PreTrainedTokenizerFast  # slow, and only chats need it

            self.read = {folder: PreTrainedTokenizerFast.from_pretrained(folder)}
        tokenizer = self.read[folder]
        if not tokenizer.chat_template:
            raise Refusal(
                "UNSUPPORTED: this model's tokenizer has no chat template: use /v1/completions"
            )
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may raise anything
            raise Refusal(f"INVALID_ARG: the chat template refuses this: {error}") from None
        # the server's tokenizer prepends the BOS token itself
        begin, added = tokenizer.bos_token, tokenizer("").input_ids
        if begin and added[:1] == [tokenizer.bos_token_id]:
            text = text.removeprefix(begin)
        return text

    def _folder(self) -> Path:
        versions = sorted(
            (int(path.name), path)
            for path in Path(self.repository or "/nowhere", "gpt_engine").glob("[0-9]*")
            if (path / "tokenizer.json").exists()
        )
        if not versions:
            raise Refusal("UNSUPPORTED: no chat, because the gateway cannot see the repository")
        return versions[-1][1]


def parsed(kind: type[Sampling], body: dict) -> Sampling:
    """The request as an object. Raises Refusal with the first error."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if not _is_type(part))
        unknown = first["type"] == "extra_forbidden"
        said = "is not known" if unknown else f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise Refusal(f"INVALID_ARG: {place or 'the body'}: {said}") from None


def _is_type(part) -> bool:
    """Whether a part of pydantic's `loc` names a type, not a field."""
    return isinstance(part, str) and (part in ("str", "float", "int") or "[" in part)


class Reply:
    """The response to one request: its choices, whole or as events."""

    def __init__(self, request: Sampling):
        self.request = request
        self.head = {
            "id": f"{request.prefix}-{secrets.token_hex(12)}",
            "object": request.kind,
            "created": int(time.time()),
            "model": request.model,
        }
        self.usage = {}  # choice -> (tokens of its prompt, tokens generated)
        self.version = ""

    def whole(self, answers: list[Answer]) -> dict:
        """The body of a response that is not streamed."""
        choices = []
        for number, answer in enumerate(answers):
            self._count(number, answer)
            choices.append(self.request.choice(number, answer, first=True, streamed=False))
        return {**self._head(), "choices": choices, "usage": self.used()}

    def event(self, number: int, answer: Answer, first: bool) -> dict:
        """One event of a stream."""
        self._count(number, answer)
        choice = self.request.choice(number, answer, first, streamed=True)
        options = self.request.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        return {**self._head(streamed=True), "choices": [choice], **usage}

    def last_event(self) -> dict | None:
        """The event with the usage of all choices, if it was requested."""
        options = self.request.stream_options
        if not (options and options.include_usage):
            return None
        return {**self._head(streamed=True), "choices": [], "usage": self.used()}

    def used(self) -> dict:
        """The token counts; a prompt with several choices counts once."""
        n = self.request.n or 1
        prompt = sum(tokens for number, (tokens, _) in self.usage.items() if number % n == 0)
        made = sum(tokens for _, tokens in self.usage.values())
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _count(self, number, answer):
        self.usage[number] = answer.prompt_tokens, answer.completion_tokens
        self.version = answer.version

    def _head(self, streamed=False):
        head = {**self.head, "system_fingerprint": f"weights-{self.version}"}
        if streamed and self.request.kind == "chat.completion":
            head["object"] = "chat.completion.chunk"
        return head


async def merged(streams: list[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """(stream number, item) from several streams, as items arrive. The first error ends all."""
    queue: asyncio.Queue = asyncio.Queue(maxsize=64)

    async def read(number, stream):
        async for item in stream:
            await queue.put((number, item))

    async def read_all():
        try:
            async with asyncio.TaskGroup() as group:
                for number, stream in enumerate(streams):
                    group.create_task(read(number, stream))
        except BaseExceptionGroup as errors:
            await queue.put(errors.exceptions[0])
        else:
            await queue.put(None)

    reader = asyncio.create_task(read_all())
    try:
        while (found := await queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
