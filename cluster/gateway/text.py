"""prompt text or chat messages -> token ids; token ids -> text pieces, cut at the first stop string."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.cluster.errors import ModelError, RequestError

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_PLAIN_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PLAIN_BYTES} | {
    chr(0x100 + at): byte for at, byte in enumerate(sorted(set(range(0x100)) - set(_PLAIN_BYTES)))
}
"""The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others for U+0100 onwards."""


class Tokenizer:
    """The tokenizer files of a model folder. Safe to call from several threads at once."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ModelError: tokenizer.json is missing or unreadable, or the chat template does not compile.
        """
        self._tokenizer, self._plain = _load_tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        self._special_texts = {key: _content(value) for key, value in names.items() if key.endswith("_token")}
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        """Ids from 0 up to this one exist."""
        self.max_token_len = max(map(len, vocab), default=1)
        """No token stands for more characters than this."""
        self.hidden_ids = frozenset(id for id, token in added.items() if token.special)
        """Special tokens: part of the output, never of the text."""
        self.byte_ids = frozenset(id for text, id in vocab.items() if _BYTE_TOKEN.fullmatch(text))
        """Tokens `<0x00>` to `<0xFF>` of models that spell out rare characters in bytes."""
        plain = (id for id in vocab.values() if id not in self.byte_ids and id not in self.hidden_ids)
        self.plain_id = next((id for id in plain if self.decode([id]).isalnum()), None)
        """Any token that is a text of its own."""
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self.bos_id = self._id_of("bos_token")
        self.stop_ids = self._find_stop_ids(folder)
        """Tokens with which the model ends its answer."""
        source = _chat_template(folder, config)
        self._template = _compile(source, folder) if source else None
        self._knows_developer = "developer" in source
        control = {token.content for token in added.values() if token.special or token.content in source}
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the model's own prefix; special tokens written out are understood."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without the special ones."""
        return self._tokenizer.decode(
            [id for id in ids if 0 <= id < self.vocab_size], skip_special_tokens=True
        )

    def token_bytes(self, id: int) -> bytes:
        """What one token stands for inside a text; special tokens as they are written, unknown ids as nothing."""
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if id in self.byte_ids:
            return bytes.fromhex(token[3:5])
        if self._is_byte_level and id not in self.hidden_ids and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        if id in self.hidden_ids or self.plain_id is None:
            return token.encode()
        # Behind another token: at a text's start some models drop a space.
        return self.decode([self.plain_id, id])[len(self.decode([self.plain_id])) :].encode()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat up to where the assistant speaks.

        Only the template may write control tokens. Where a message spells one out, it is marked before
        rendering and encoded as plain text, so nobody can forge a turn. Other chats render and encode as one.

        Raises:
            RequestError: the template refuses the messages, or there is none.
        """
        if not any(self._control.search(value) for message in messages for value in message.values()):
            return list(self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids)
        start, end = _unused_characters(messages)
        mark = f"{start}\\g<0>{end}"
        marked = [{key: self._control.sub(mark, value) for key, value in item.items()} for item in messages]
        return self._encode_marked(self.render_chat(marked), start, end)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat as one text, through the model's template in a sandbox."""
        if self._template is None:
            hint = "this model has no chat template; send a prompt to /v1/completions instead"
            raise RequestError(hint, param="messages", code="no_chat_template")
        chat = [dict(message) for message in messages]
        for message in chat:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        try:
            return self._template.render(messages=chat, add_generation_prompt=True, **self._special_texts)
        except (
            *(jinja2.TemplateError, TypeError, ValueError, AttributeError),
            *(ArithmeticError, LookupError, RecursionError),
        ) as error:
            raise RequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error

    def _encode_marked(self, chat: str, start: str, end: str) -> list[int]:
        """Encode a rendered chat; what stands between marks loses its special meaning.

        A mark that the template tore from its partner is dropped, but still keeps its two sides apart.
        """
        ids: list[int] = []
        pieces = re.split(f"{start}({self._control.pattern}){end}|[{start}{end}]", chat)
        for position, piece in enumerate(pieces):
            if not piece:
                continue
            is_plain = position % 2 == 1
            piece_ids = self._encode_piece(
                self._plain if is_plain else self._tokenizer, piece, is_first=not ids
            )
            if is_plain and self._tokenizer.token_to_id(piece) in piece_ids:
                raise RequestError(f"messages: {piece!r} is a control token of this model", param="messages")
            ids += piece_ids
        return ids

    def _encode_piece(self, tokenizer: tokenizers.Tokenizer, text: str, *, is_first: bool) -> list[int]:
        """A piece from the middle of a text must not get the space that some models put at a text's start.

        A newline in front takes that space; then both go.
        """
        if not is_first:
            newline = tokenizer.encode("\n", add_special_tokens=False).ids
            ids = tokenizer.encode("\n" + text, add_special_tokens=False).ids
            if ids[: len(newline)] == newline:
                return list(ids[len(newline) :])
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_stop_ids(self, folder: Path) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            found = _read_json(folder / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        eos = self._id_of("eos_token")
        return () if eos is None else (eos,)

    def _id_of(self, name: str) -> int | None:
        text = self._special_texts.get(name)
        return None if not text else self._tokenizer.token_to_id(text)


class Detokenizer:
    """Token ids one by one -> pieces of text whose sum is the text of all ids.

    A character split over tokens is held back until it is whole. Each step decodes a short window only: old tokens
    leave it as soon as the text of the rest does not depend on them.
    """

    _MAX_WINDOW = 16
    _KEEP = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_sent = 0
        self._text = ""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often the token's own, sometimes nothing."""
        if token_id in self._tokenizer.hidden_ids or not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._window.append(token_id)
        self._text = self._tokenizer.decode(self._window)
        piece = self._take(_certain_len(self._text))
        if token_id in self._tokenizer.byte_ids and self._num_sent == len(self._text):
            self._restart()
        elif len(self._window) > self._MAX_WINDOW:
            self._shorten()
        return piece

    def flush(self) -> str:
        """The rest, at the end: an incomplete character becomes U+FFFD."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece = self._text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return piece

    def _restart(self) -> None:
        """Byte tokens in a row decode all or nothing: a character that is whole must not depend on the next one."""
        anchor = self._tokenizer.plain_id
        self._window = [] if anchor is None else [anchor]
        self._text = self._tokenizer.decode(self._window)
        self._num_sent = len(self._text)

    def _shorten(self) -> None:
        rest = self._window[-self._KEEP :]
        text = self._tokenizer.decode(rest)
        num_waiting = len(self._text) - self._num_sent
        if text.endswith(self._text[-num_waiting - 1 :]):
            self._window, self._text, self._num_sent = rest, text, len(text) - num_waiting


class StopStrings:
    """Pieces of text -> the same text up to the first occurrence of a stop string, in pieces.

    Of all occurrences the one that begins first wins, as `min(text.find(stop))` would say, so the result does not
    depend on how the text was cut into pieces. What may be the beginning of a stop string is withheld.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the text ends behind the stop string, not before it."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._keep = keep
        self._starts = "".join(sorted({stop[0] for stop in stops}))
        self._may_start = re.compile(f"[{re.escape(self._starts)}]") if stops else None
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.is_matched = False

    def feed(self, piece: str) -> str:
        """What is certain to come before any stop string. Nothing more comes once one matched."""
        if self._may_start is None:
            return piece
        if self.is_matched:
            return ""
        text = self._held + piece
        match = self._first_match(text)
        open_at = self._first_open(text)
        if match is not None and match[0] <= open_at:
            self.is_matched, self._held = True, ""
            return text[: match[self._keep]]
        self._held = text[open_at:]
        return text[:open_at]

    def flush(self) -> str:
        """The withheld rest, at the end of the text; a stop string inside it still cuts."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        if match is None:
            return text
        self.is_matched = True
        return text[: match[self._keep]]

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Begin and end; of those that begin together the shortest, which is whole first however the text comes."""
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _first_open(self, text: str) -> int:
        """Where the earliest tail begins that more text could complete to a stop string; len(text) if none does."""
        assert self._may_start is not None
        for start in self._may_start.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[start.start() :]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start.start()
        return len(text)


def _certain_len(text: str) -> int:
    """Length without a trailing character that later tokens may complete: at most three bytes, so three U+FFFD."""
    end = len(text)
    while end > max(0, len(text) - 3) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end


# --- files ----------------------------------------------------------------------------------------------


def _load_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The tokenizer, and its twin that knows no added tokens: for it `<|end|>` is text like any other."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        full = tokenizers.Tokenizer.from_str(json.dumps(tree))
        plain = tokenizers.Tokenizer.from_str(
            json.dumps({**tree, "added_tokens": [], "post_processor": None})
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
    for tokenizer in (full, plain):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return full, plain


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


def _content(token: Any) -> str:
    """`"<s>"` or `{"content": "<s>", ...}` -> `<s>`; null -> nothing."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """chat_template.jinja, else the entry of tokenizer_config.json (of several, the one named default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((item.get("template") for item in found if item.get("name") == "default"), None)
    return found if isinstance(found, str) else ""


def _unused_characters(messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in the messages."""
    used = {
        char for message in messages for value in message.values() for char in value if ord(char) >= 0xF0000
    }
    free: Iterator[str] = (char for char in map(chr, _PRIVATE_USE) if char not in used)
    start, end = next(free, None), next(free, None)
    if start is None or end is None:
        raise RequestError("messages: too many different private-use characters", param="messages")
    return start, end


# --- the template language, as transformers offers it -----------------------------------------------------


def _compile(source: str, folder: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    globals: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(globals)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"{folder}: the chat template does not compile: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
