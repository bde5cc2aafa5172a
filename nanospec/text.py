"""Text in, text out: the tokenizer, the chat template, and text that grows token by token.

Knows nothing about models or requests. `tokenizers` and `jinja2` do the work; transformers, which
would bring the same with several seconds of imports, is not needed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from nanospec.errors import CheckpointError, ConfigError

Message = Mapping[str, Any]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

# How many prompt tokens precede the output when it is decoded, so that decoders which strip a
# leading space (SentencePiece style) see that the output continues a text.
_PROMPT_TAIL = 6


class Tokenizer:
    """A `tokenizer.json` with the special tokens and chat template of `tokenizer_config.json`."""

    def __init__(self, tokenizer: FastTokenizer, config: Mapping[str, Any], template: str | None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config = config
        self._template = template

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Read the tokenizer of a model folder; None where there is no `tokenizer.json`.

        Raises:
            CheckpointError: a tokenizer file cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every parsing error
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        return cls(tokenizer, config, _read_template(folder, config))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_ids` can work."""
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end-of-sequence token, None where it names none."""
        name = self._special("eos_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt, with the special tokens the model starts with.

        Raises:
            ConfigError: it is not valid Unicode.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def chat_ids(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's reply.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            variables: more variables of the template, for example `enable_thinking=False`.

        Raises:
            ConfigError: there is no template, or it rejects the messages.
        """
        return self._ids(self._render(messages, variables), add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, or bytes that are no text
            raise ConfigError(f"the prompt is not valid Unicode: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _render(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        if self._template is None:
            raise ConfigError("this model has no chat template; pass a raw prompt (--no-chat)")
        import jinja2  # imported here, like what follows: a raw prompt needs no template engine

        from nanospec.template import compiled

        special = {name: self._special(name) or "" for name in _SPECIAL_TOKENS}
        try:
            return compiled(self._template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **(special | variables),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template rejects the messages: {error}") from error

    def _special(self, name: str) -> str | None:
        token = self._config.get(name)
        if isinstance(token, Mapping):  # an AddedToken written out in full
            token = token.get("content")
        return token if isinstance(token, str) else None


class TextStream:
    """The text of one request, grown token by token.

    Invariant: `text` is the decoded output so far, without a trailing incomplete character, and
    cut before the first completed stop string. It only ever grows.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ):
        self._text = ""
        self._decode = _no_text if tokenizer is None else tokenizer.decode
        self._stop = tuple(stop)
        self._hold = max((len(string) for string in stop), default=1) - 1
        self._ids = list(prompt[-_PROMPT_TAIL:])
        self._start = 0  # decoding starts here, far enough back to be independent of what precedes
        self._done = len(self._ids)  # decoding starts here once the text so far is complete
        self._seen = len(self._decode(self._ids))  # characters from `_start` on, in `text`
        self._shown = 0  # characters that `take` has handed out
        self._is_behind = False  # whether there are tokens, or an end, that are not in `_text`
        self._is_last = False  # whether no more tokens come

    @property
    def text(self) -> str:
        """The text so far."""
        if self._is_behind:
            self._catch_up()
        return self._text

    def extend(self, token_ids: Sequence[int], may_stop_from: int = 0) -> int | None:
        """Append tokens, up to one that completes a stop string, which then ends the text.

        With several stop strings the one that is completed first counts, as if the text came
        character by character. Without any, decoding waits for who reads the text.

        Args:
            token_ids: to append.
            may_stop_from: index of the first one that may complete a stop string.

        Returns:
            The index of the token that completed a stop string, or None.
        """
        if not self._stop:
            self._ids += token_ids
            self._is_behind = True
            return None
        for index, token_id in enumerate(token_ids):
            old_len = len(self.text)
            self._ids.append(token_id)
            self._is_behind = True
            if index >= may_stop_from and self._cut_at_stop(old_len):
                return index
        return None

    def finish(self) -> None:
        """Add what was held back as an incomplete character; nothing follows."""
        self._is_behind = self._is_last = True
        self._hold = 0

    def take(self) -> str:
        """Return text that has not been returned yet and that no stop string can take back."""
        text, start = self.text, self._shown
        self._shown = max(len(text) - self._hold, start)
        return text[start : self._shown]

    def _catch_up(self) -> None:
        """Add the text of new tokens, but for the bytes of a last character that is incomplete."""
        decoded = self._decode(self._ids[self._start :])
        safe = decoded if self._is_last else decoded.rstrip("\ufffd")
        if len(safe) > self._seen:
            self._text += safe[self._seen :]
            self._seen = len(safe)
            if safe == decoded:
                self._start, self._done = self._done, len(self._ids)
                self._seen = len(self._decode(self._ids[self._start :]))
        self._is_behind = False

    def _cut_at_stop(self, old_len: int) -> bool:
        matches = []
        for string in self._stop:
            start = self.text.find(string, max(old_len - len(string) + 1, 0))
            if start >= 0:
                matches.append((start + len(string), start))
        if not matches:
            return False
        _, start = min(matches)
        self._text = self._text[:start]
        self._start = self._done = len(self._ids)  # nothing is left to decode
        self._hold = 0
        return True


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not readable text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
