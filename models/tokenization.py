"""Text to token ids, the same way in training, calibration and serving.

The tokenizer is shared between threads and never mutated: a per-request ``enable_truncation`` on a shared
``tokenizers.Tokenizer`` silently truncates the other caller's text. Here a text is encoded untruncated and without
special tokens, the resulting encoding is cut, and the special tokens are added last.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding, Tokenizer

# `Tokenizer.encode` keeps Python's lock (2.7 s for 100,000 characters on a busy machine), `encode_batch` does not.
LONG_CHARACTERS = 1_000
# Texts of up to so many characters a token that the model takes are tried as they are: most of them need no cutting,
# and the special tokens then come with the ids, at half the time.
CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text (or pair) as ids, special tokens included.

    ``tokens_before`` counts tokens before truncation; ``truncated`` says whether any were cut.
    """

    ids: list[int]
    type_ids: list[int]
    tokens_before: int

    @property
    def truncated(self) -> bool:
        return self.tokens_before > len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """Encodes texts and pairs with a Hugging Face ``tokenizers`` file; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        """``max_length`` is in tokens, special tokens included."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.max_length = max_length
        self._special = tokenizer.num_special_tokens_to_add(False)
        self._special_pair = tokenizer.num_special_tokens_to_add(True)

    @classmethod
    def from_file(cls, path: Path, max_length: int) -> "TextEncoder":
        return cls(Tokenizer.from_file(str(path)), max_length)

    def limited_to(self, max_length: int) -> "TextEncoder":
        """The same encoder, which cuts to ``max_length`` tokens where that is less."""
        return TextEncoder(self._tokenizer, min(max_length, self.max_length))

    @property
    def largest_id(self) -> int:
        """The largest id that a text, or a pair of texts, can be encoded to, special tokens included."""
        empty = self._without_special("")
        always = [*self._tokenizer.post_process(empty).ids, *self._tokenizer.post_process(empty, empty).ids]
        return max([*self._tokenizer.get_vocab(with_added_tokens=True).values(), *always], default=0)

    def largest_type_id(self, *, pair: bool) -> int:
        """The largest token type id of a text, or of a ``pair`` of texts."""
        return max(self.encode("a", "a" if pair else None).type_ids, default=0)

    def special_tokens(self, *, pair: bool) -> int:
        """How many special tokens are added to a text, or to a ``pair`` of texts."""
        return self._special_pair if pair else self._special

    def encode(self, text: str, pair: str | None = None) -> Encoded:
        """Ids of ``text`` (and ``pair``), cut to ``max_length`` tokens from the right.

        A pair that is too long loses tokens from its longer side first, as ``longest_first`` of ``tokenizers`` does.
        """
        characters = len(text) + (0 if pair is None else len(pair))
        if characters <= min(LONG_CHARACTERS, CHARACTERS_A_TOKEN * self.max_length):
            whole = self._tokenizer.encode(text, pair)
            ids = whole.ids
            if len(ids) <= self.max_length:
                return Encoded(ids, whole.type_ids, len(ids))
        first = self._without_special(text)
        if pair is None:
            room = self.max_length - self._special
            before = len(first) + self._special
            if len(first) > room:
                first.truncate(room)
            full = self._tokenizer.post_process(first, None, True)
        else:
            second = self._without_special(pair)
            room = self.max_length - self._special_pair
            before = len(first) + len(second) + self._special_pair
            keep_first, keep_second = _longest_first(len(first), len(second), room)
            if keep_first < len(first):
                first.truncate(keep_first)
            if keep_second < len(second):
                second.truncate(keep_second)
            full = self._tokenizer.post_process(first, second, True)
        return Encoded(full.ids, full.type_ids, before)

    def _without_special(self, text: str) -> Encoding:
        if len(text) > LONG_CHARACTERS:
            return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return self._tokenizer.encode(text, add_special_tokens=False)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths after cutting a pair to ``room`` tokens, as ``tokenizers`` does for ``longest_first``.

    Only the longer side is cut while that is enough; else both get half, and an odd token goes to the longer side
    (``utils/truncation.rs``: to the second where both are equal).
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)
