"""JSON body of a POST -> validated ChatRequest or CompletionRequest, or a RequestError that names field, value and range.

Each field's description is its legal range: it completes the sentence `field=value: expected ...`.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from paceline.cluster.errors import RequestError
from paceline.cluster.types import Sampling

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
MAX_STOPS = 16
"""OpenAI takes 4; evaluation suites send more."""
MAX_STOP_LEN = 256
MAX_TOKENS = 1 << 20
MAX_BIASES = 1024
MAX_LOGPROBS = 5
"""Of plain completions, as with OpenAI."""
MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
"""This and the next two as with OpenAI."""
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_DOMAIN = 64

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
BiasedToken = Annotated[str, Strict(), Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-100, le=100)]
MetadataKey = Annotated[str, Strict(), Field(min_length=1, max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Strict(), Field(max_length=MAX_METADATA_VALUE)]
_PRINTABLE = re.compile(r"[ -~]*")
_DOMAIN: dict[str, Any] = {"type": "string", "maxLength": MAX_DOMAIN, "pattern": "^[ -~]*$"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}}
_PROMPT_SHAPES: list[Any] = [
    {"type": "string"},
    {**_TOKEN_IDS, "minItems": 1},
    {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
        "minItems": 1,
        "maxItems": MAX_PROMPTS,
    },
]
Prompt = str | list[int]
"""What a client sent as one prompt: text, or token ids."""

Model = TypeVar("Model", bound="Body")


def _or_a_string(schema: dict[str, Any]) -> None:
    """A list of strings -> the schema that also takes one of them alone."""
    shape = {name: schema.pop(name) for name in ("type", "items", "maxItems")}
    schema["anyOf"] = [shape["items"], shape]


def _or_false(schema: dict[str, Any]) -> None:
    """Some clients write "none" as false."""
    schema["anyOf"].append({"const": False})


class Body(BaseModel):
    """Base of all: unknown fields are ignored (clients add new ones), and null means "not given"."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return (
            {key: value for key, value in data.items() if value is not None}
            if isinstance(data, dict)
            else data
        )


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def flat(self) -> dict[str, str]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class StreamOptions(Body):
    """What a streaming answer carries besides text."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class GenerationRequest(Body):
    """What chat and plain completions have in common."""

    model: Text = Field("", description="the id of a served model")
    n: Int = Field(1, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    seed: Int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 63,
        description="a whole number from -9223372036854775808 to 9223372036854775807",
    )
    temperature: Number = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: Number = Field(1.0, gt=0, le=1, description="a number above 0, up to 1")
    top_k: Int = Field(
        0, ge=-1, le=1 << 20, description="a whole number from 1 to 1048576, or 0 or -1 to keep all"
    )
    min_p: Number = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    max_tokens: Int | None = Field(None, ge=1, le=MAX_TOKENS, description="a whole number from 1 to 1048576")
    max_completion_tokens: Int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="a whole number from 1 to 1048576"
    )
    stop: list[Annotated[str, Strict(), Field(min_length=1, max_length=MAX_STOP_LEN)]] = Field(
        default_factory=list,
        max_length=MAX_STOPS,
        description=f"a string or up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_LEN} characters",
        json_schema_extra=_or_a_string,
    )
    include_stop_str_in_output: Flag = Field(
        False, description="true or false; whether the text ends behind the stop string instead of before it"
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=64, description="a list of up to 64 token ids"
    )
    ignore_eos: Flag = Field(False, description="true or false")
    # Above 0 is all that vLLM asks. Both ends are bounded here, so that no float32 logit overflows.
    repetition_penalty: Number = Field(1.0, ge=0.01, le=100, description="a number from 0.01 to 100")
    presence_penalty: Number = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: Number = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    logit_bias: dict[BiasedToken, Bias] = Field(
        default_factory=dict,
        max_length=MAX_BIASES,
        description=f"an object with up to {MAX_BIASES} token ids as keys and numbers from -100 to 100 as values",
        json_schema_extra={"additionalProperties": False},
    )
    min_tokens: Int = Field(
        0, ge=0, le=MAX_TOKENS, description="a whole number from 0 to the number of tokens to generate"
    )
    prompt_logprobs: Int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}",
        json_schema_extra=_or_false,
    )
    priority: Int = Field(
        0,
        ge=-(1 << 31),
        lt=1 << 31,
        description="a whole number from -2147483648 to 2147483647; the lower runs earlier",
    )
    cache_salt: Annotated[str, Strict(), Field(max_length=MAX_STOP_LEN)] = Field(
        "", description=f"a string of up to {MAX_STOP_LEN} characters"
    )
    stream: Flag = Field(False, description="true or false")
    stream_options: StreamOptions = Field(
        StreamOptions(),
        description="an object with include_usage and continuous_usage_stats, each true or false",
    )
    speculation: Flag = Field(True, description="true or false; the text does not depend on it")
    user: Text = Field("", description="a string")
    store: Flag | None = Field(
        None,
        description="true or false; whether it may be kept for training drafts, where operator and tenant agree",
    )
    return_token_ids: Flag = Field(False, description="true or false")
    parallel_tool_calls: Flag = Field(True, description="true or false; there are no tools yet")
    metadata: dict[MetadataKey, MetadataValue] = Field(
        default_factory=dict,
        max_length=MAX_METADATA,
        description=f"an object with up to {MAX_METADATA} pairs of strings, keys of 1 to {MAX_METADATA_KEY} and values of "
        f"up to {MAX_METADATA_VALUE} characters; a domain of up to {MAX_DOMAIN}, all of them printable ASCII",
        json_schema_extra={"properties": {"domain": _DOMAIN}},
    )

    best_of: Int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="the same number as n; other values are not supported"
    )

    # Fields of OpenAI's API and vLLM's that would change the answer, and are not served: a value that changes
    # nothing passes.
    unsupported: ClassVar[dict[str, Callable[[Any], bool]]] = {
        "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
        "functions": lambda value: value == [],
        "tool_choice": lambda value: value in ("none", "auto"),
        "function_call": lambda value: value in ("none", "auto"),
        "prediction": lambda value: False,
        "suffix": lambda value: value == "",
        "modalities": lambda value: value == ["text"],
        "audio": lambda value: False,
        "web_search_options": lambda value: False,
        "structured_outputs": lambda value: False,
        "guided_json": lambda value: False,
        "guided_regex": lambda value: False,
        "guided_choice": lambda value: False,
        "guided_grammar": lambda value: False,
        "use_beam_search": lambda value: value is False,
        "length_penalty": lambda value: value == 1,
        "allowed_token_ids": lambda value: False,
        "bad_words": lambda value: value == [],
        "logits_processors": lambda value: value == [],
        "prompt_embeds": lambda value: False,
        "truncate_prompt_tokens": lambda value: False,
        "skip_special_tokens": lambda value: value is True,
        "return_tokens_as_token_ids": lambda value: value is False,
    }

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        """Better a clear 400 than an answer that ignores what was asked."""
        if not isinstance(data, dict):
            return data
        for name, is_harmless in cls.unsupported.items():
            if data.get(name) is not None and not is_harmless(data[name]):
                raise _unsupported(name, data[name])
        tools = data.get("tools")
        if (
            tools is not None
            and tools != []
            and not (data.get("tool_choice") == "none" and isinstance(tools, list))
        ):
            raise _unsupported("tools", tools)
        return data

    @model_validator(mode="after")
    def _best_of_all(self) -> GenerationRequest:
        if self.best_of is not None and self.best_of != self.n:
            message = f"best_of={self.best_of}: only best_of equal to n is supported; leave it out"
            raise RequestError(message, param="best_of", code="unsupported_parameter")
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _no_prompt_in_chunks(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            message = f"prompt_logprobs={self.prompt_logprobs}: expected none with stream=true"
            raise RequestError(message, param="prompt_logprobs", code="invalid_value")
        return self

    @field_validator("metadata")
    @classmethod
    def _known_domain(cls, value: dict[str, str]) -> dict[str, str]:
        """A domain becomes a label of figures and chooses drafts."""
        domain = value.get("domain", "")
        if len(domain) > MAX_DOMAIN or not _PRINTABLE.fullmatch(domain.strip()):
            raise PydanticCustomError("domain", "not a domain")
        return value

    @property
    def domain(self) -> str:
        """What the request is about, if the client says so."""
        return self.metadata.get("domain", "").strip()

    @property
    def echoes(self) -> bool:
        """The prompt stands before the answer."""
        return False

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit bias by token id; a bias of 0 is none."""
        return tuple(sorted((int(token), bias) for token, bias in self.logit_bias.items() if bias))

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with each token; None shows no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives needed for the tokens of the prompt; None needs nothing of the prompt."""
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """Output tokens asked for; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, seed: int, prompt_index: int, choice: int) -> Sampling:
        """How one choice of one prompt is drawn; a negative seed is read as its 64 bits."""
        return Sampling(
            seed=seed % (1 << 64),
            # Below this the division overflows for large logits, and nothing but the argmax can win anyway.
            temperature=self.temperature if self.temperature >= 1e-4 else 0.0,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            choice=choice,
            prompt_index=prompt_index,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.biases,
            min_tokens=self.min_tokens,
        )

    def chosen_seed(self) -> int:
        """The client's seed, or a fresh one that the client can send back: at most 2**63 - 1."""
        return secrets.randbits(63) if self.seed is None else self.seed


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description=f"1 to {MAX_MESSAGES} messages with a role (system, developer, user or assistant) and text content",
    )
    logprobs: Flag = Field(False, description="true or false")
    top_logprobs: Int = Field(
        0,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}, with logprobs=true",
    )

    unsupported = {
        **GenerationRequest.unsupported,
        "echo": lambda value: value is False,
        "chat_template": lambda value: False,
        "chat_template_kwargs": lambda value: value == {},
        "documents": lambda value: value == [],
        "add_generation_prompt": lambda value: value is True,
        "continue_final_message": lambda value: value is False,
        "add_special_tokens": lambda value: value is False,
    }

    @model_validator(mode="after")
    def _asked_for_both(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs={self.top_logprobs}: expected logprobs=true with it"
            raise RequestError(message, param="top_logprobs", code="invalid_value")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    unsupported = {**GenerationRequest.unsupported, "add_special_tokens": lambda value: value is True}

    prompt: Any = Field(
        description=f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these",
        json_schema_extra={"anyOf": _PROMPT_SHAPES},
    )
    max_tokens: Int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="a whole number from 1 to 1048576, or 0 with echo=true"
    )
    logprobs: Int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"a whole number from 0 to {MAX_LOGPROBS}",
        json_schema_extra=_or_false,
    )
    echo: Flag = Field(False, description="true or false")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_means_none(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _something_to_say(self) -> CompletionRequest:
        if self.token_limit == 0 and not self.echo:
            expected = type(self).model_fields["max_tokens"].description
            raise RequestError(f"max_tokens=0: expected {expected}", param="max_tokens", code="invalid_value")
        return self

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo shows what log-probabilities were asked for, for the prompt as well."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num for num in asked if num is not None), default=None)

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: Any) -> list[Prompt]:
        """Any of the four shapes -> a list of prompts. By hand: a union would try each shape on each token id."""
        if isinstance(value, str) or (isinstance(value, list) and value and _are_token_ids(value)):
            return [value]
        if isinstance(value, list) and 1 <= len(value) <= MAX_PROMPTS and all(map(_is_prompt, value)):
            return value
        raise PydanticCustomError("prompt", "unknown shape")

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if self.n * len(self.prompt) > MAX_PROMPTS:
            message = f"n={self.n} with {len(self.prompt)} prompts: expected at most {MAX_PROMPTS} choices in one request"
            raise RequestError(message, param="n")
        return self


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and _are_token_ids(value))


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value) and (
        not value or (min(value) >= 0 and max(value) < 1 << 31)
    )


# --- bytes -> model -------------------------------------------------------------------------------------


def _number(text: str) -> int | float:
    """Some languages write whole numbers as 5.0, which to JSON is the same number."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("number out of range")
    return int(number) if number.is_integer() else number


_decoder = msgspec.json.Decoder(float_hook=_number)


def parse(kind: type[Model], body: bytes) -> Model:
    """Read and validate a request body.

    Raises:
        RequestError: not JSON, or a field is missing, of the wrong type or outside its range.
    """
    try:
        tree = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise RequestError(f"the body must be a JSON object, got {_short(tree)}", code="invalid_json")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _explain(kind, error.errors(include_url=False)[0]) from None


def _unsupported(name: str, value: Any) -> RequestError:
    message = f"{name}={_short(value)}: not supported by this server; leave it out"
    return RequestError(message, param=name, code="unsupported_parameter")


def _explain(kind: type[Body], item: Mapping[str, Any]) -> RequestError:
    """The first complaint of pydantic -> our sentence."""
    top = str(item["loc"][0]) if item["loc"] else ""
    info = kind.model_fields.get(top)
    expected = (info.description if info else None) or item["msg"]
    if item["type"] == "missing" and len(item["loc"]) == 1:
        return RequestError(
            f"{top}: missing; expected {expected}", param=top, code="missing_required_parameter"
        )
    code = "invalid_type" if item["type"].endswith("_type") else "invalid_value"
    return RequestError(
        f"{_path(item['loc'])}={_short(item['input'])}: expected {expected}", param=top, code=code
    )


def _path(loc: tuple[Any, ...]) -> str:
    """("messages", 0, "content", "str") -> messages[0].content, without pydantic's names for union members."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isdecimal():
            text += f'["{part}"]'
        elif part.isidentifier() and part not in ("str", "int"):
            text += f".{part}" if text else part
    return text


def _short(value: Any) -> str:
    """A value in an error message: as JSON writes it, and never long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, dict)) and len(value) > 16:
        return f"<{len(value)} items>"
    text = msgspec.json.encode(value[:80] if isinstance(value, str) else value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
