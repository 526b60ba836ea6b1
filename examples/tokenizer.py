"""Text to token ids and back, from the vocabulary and the chat template inside a GGUF file.

Byte-level BPE ("gpt2") and SentencePiece BPE ("llama") vocabularies; `tokenizers` does the encoding, decoding is a table of bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from gguf_file import GGUFFile, InputError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Encoder and decoder of one model.

    Raises InputError for a vocabulary of another kind, or when a package is missing.
    """

    def __init__(self, file: GGUFFile) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise InputError("reading text needs the package tokenizers: pip install 'cupaged[models]'") from None
        self.tokens: list[str] = file.get("tokenizer.ggml.tokens")
        self.types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(self.tokens))
        self.template: str | None = file.get("tokenizer.chat_template", None)
        kind = file.get("tokenizer.ggml.model")
        self.bos: int | None = file.get("tokenizer.ggml.bos_token_id", None)
        ends = (file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot"))
        self.eos_ids = tuple(dict.fromkeys(int(token) for token in ends if token is not None))
        self._add_bos = bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama"))
        if kind == "gpt2":
            self._encoder = _byte_level_bpe(tokenizers, file, self.tokens)
            byte_of = {char: byte for byte, char in _byte_chars().items()}
            self._bytes = [
                b"" if t == CONTROL else _table_bytes(s, byte_of) for s, t in zip(self.tokens, self.types, strict=True)
            ]
        elif kind == "llama":
            self._encoder = _sentencepiece_bpe(tokenizers, file, self.tokens)
            self._bytes = [_piece_bytes(s, t) for s, t in zip(self.tokens, self.types, strict=True)]
        else:
            raise InputError(f"{file.path}: expected a vocabulary 'gpt2' or 'llama', got {kind!r}")
        whole = [
            token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ in (CONTROL, USER_DEFINED)
        ]
        self._encoder.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in whole]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens written out in it become themselves."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids of a prompt as the user's turn of the chat template, after a system prompt if there is one.

        Where the file has no template, plain text.
        """
        if self.template is None:
            text = prompt if system is None else f"{system}\n\n{prompt}"
            return ([self.bos] if self._add_bos and self.bos is not None else []) + self.encode(text)
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.encode(self._render([*messages, {"role": "user", "content": prompt}]))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token] for token in ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """A decoder that takes one token at a time."""
        return TextStream(self._bytes)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise InputError("the chat template needs the package jinja2: pip install 'cupaged[models]'") from None
        special = {
            "bos_token": "" if self.bos is None else self.tokens[self.bos],
            "eos_token": self.tokens[self.eos_ids[0]] if self.eos_ids else "",
        }
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            template = environment.from_string(self.template or "")
            return str(template.render(messages=messages, add_generation_prompt=True, **special))
        except TemplateError as error:
            raise InputError(f"the model's chat template: {error}") from None


class TextStream:
    """Turns tokens into text one at a time, holding back bytes until they are whole characters."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became whole with this token."""
        return self._decoder.decode(self._bytes[token])

    def end(self) -> str:
        """What is left of a broken character."""
        return self._decoder.decode(b"", final=True)


def _byte_level_bpe(tokenizers: Any, file: GGUFFile, tokens: list[str]) -> Any:
    from tokenizers import Regex, models, pre_tokenizers

    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    if pre == "smollm":  # every digit is a piece of its own
        split: Any = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre == "gpt-2":
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in ("llama-bpe", "llama3", "llama-v3"):
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise InputError(f"{file.path}: expected the text split 'smollm', 'gpt-2' or 'llama-bpe', got {pre!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    whole_words = pre.startswith("llama")  # Llama 3 looks a word up before it merges
    encoder = tokenizers.Tokenizer(models.BPE({s: i for i, s in enumerate(tokens)}, merges, ignore_merges=whole_words))
    encoder.pre_tokenizer = split
    return encoder


def _sentencepiece_bpe(tokenizers: Any, file: GGUFFile, tokens: list[str]) -> Any:
    """SentencePiece merges the neighbours whose union scores best: a pair's rank is the rank of its union."""
    from tokenizers import models, normalizers

    vocabulary = {s: i for i, s in enumerate(tokens)}
    scores = file.get("tokenizer.ggml.scores")
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(tokens, key=lambda token: -scores[vocabulary[token]])
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
    encoder.normalizer = normalizers.Sequence(spaces)
    return encoder


def _byte_chars() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al., GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _table_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()  # an added token in plain text


def _piece_bytes(token: str, type_: int) -> bytes:
    if type_ == CONTROL:
        return b""
    if type_ == BYTE:  # "<0x0A>"
        return bytes([int(token[3:-1], 16)])
    return token.replace("▁", " ").encode()


def _raise_exception(message: str) -> None:
    """What chat templates call to refuse a conversation."""
    from jinja2 import TemplateError

    raise TemplateError(message)
