"""Ids are those of transformers' fast tokenizers, alone or in company."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from models.tokenization import TextEncoder

WORDS = ["the", "film", "is", "good", "bad", "not", "a", "slow", "start", "end"]


def wordpiece() -> Tokenizer:
    """A tiny BERT tokenizer: ``[CLS] a [SEP]`` and ``[CLS] a [SEP] b [SEP]``, second text of type 1."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "##s", "##ed", "##ing", "!", "."]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return tokenizer


def roberta() -> Tokenizer:
    """A tiny byte-level BPE with RoBERTa's pair template ``<s> a </s></s> b </s>``, all of type 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *alphabet])}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("o", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


KINDS = {"wordpiece": wordpiece, "roberta": roberta}
TEXTS = st.lists(st.sampled_from([*WORDS, "films", "starting", "zzz", "!", "é"]), max_size=24).map(" ".join)


@cache
def fast_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]())


def reference(kind: str, text: str, pair: str | None, max_length: int) -> tuple[list[int], list[int]]:
    """What transformers' fast tokenizer gives with ``truncation="longest_first"``."""
    # As batches of one: outside a batch transformers takes an empty second text for none at all.
    encoded = fast_tokenizer(kind)(
        [text],
        None if pair is None else [pair],
        truncation="longest_first",
        max_length=max_length,
        return_token_type_ids=True,
    )
    return encoded["input_ids"][0], encoded["token_type_ids"][0]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=TEXTS, max_length=st.integers(3, 20))
def test_a_single_text_is_cut_as_transformers_cuts_it(kind: str, text: str, max_length: int) -> None:
    encoded = TextEncoder(KINDS[kind](), max_length).encode(text)
    assert (encoded.ids, encoded.type_ids) == reference(kind, text, None, max_length)
    assert len(encoded) <= max_length


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120)
@given(text=TEXTS, pair=TEXTS, max_length=st.integers(5, 20))
def test_a_pair_is_cut_as_transformers_cuts_it(kind: str, text: str, pair: str, max_length: int) -> None:
    encoded = TextEncoder(KINDS[kind](), max_length).encode(text, pair)
    assert (encoded.ids, encoded.type_ids) == reference(kind, text, pair, max_length)


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("second", range(9))
def test_every_way_in_which_a_pair_can_be_too_long_is_cut_as_tokenizers_does(first: int, second: int) -> None:
    for max_length in range(3, 13):
        cutting = wordpiece()
        cutting.enable_truncation(max_length, strategy="longest_first")
        text, pair = " ".join(["good"] * first), " ".join(["bad"] * second)
        encoded = TextEncoder(wordpiece(), max_length).encode(text, pair)
        assert encoded.ids == cutting.encode(text, pair).ids


def test_an_empty_pair_is_a_pair() -> None:
    encoder = TextEncoder(wordpiece(), 16)
    assert len(encoder.encode("good", "")) == len(encoder.encode("good")) + 1


def test_threads_that_share_an_encoder_each_get_their_own_text() -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 60))) for _ in range(400)]
    encoder = TextEncoder(wordpiece(), 24)
    alone = [encoder.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(encoder.encode, texts))
    assert together == alone
    assert {encoded.truncated for encoded in alone} == {True, False}


def test_a_long_text_leaves_python_to_other_threads() -> None:
    """`Tokenizer.encode` does not: one text of 100,000 characters held up every request of a server for seconds."""
    encoder, go, ran = TextEncoder(wordpiece(), 8), threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    other.start()
    interval = sys.getswitchinterval()
    # From here on a thread only gets a turn where another gives it up.
    sys.setswitchinterval(60)
    try:
        go.set()
        encoder.encode("good film " * 10_000)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_a_long_text_is_encoded_as_a_short_one_is() -> None:
    tokenizer, text = wordpiece(), "good film, b\u00e4d " * 200
    assert TextEncoder(tokenizer, 10_000).encode(text).ids == tokenizer.encode(text).ids


def test_it_says_how_long_the_text_was_before_it_was_cut() -> None:
    encoder = TextEncoder(wordpiece(), 6)
    short, long = encoder.encode("good film"), encoder.encode("the film is good not bad")
    assert (len(short), short.tokens_before, short.truncated) == (4, 4, False)
    assert (len(long), long.tokens_before, long.truncated) == (6, 8, True)
    pair = encoder.encode("the film is good", "not bad")
    assert (len(pair), pair.tokens_before, pair.truncated) == (6, 9, True)


def test_truncation_and_padding_saved_in_the_file_are_ignored(tmp_path: Path) -> None:
    saved = wordpiece()
    saved.enable_truncation(4)
    saved.enable_padding(length=32)
    saved.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder.from_file(tmp_path / "tokenizer.json", 64)
    assert encoder.encode("the film is good").ids == TextEncoder(wordpiece(), 64).encode("the film is good").ids
    assert len(encoder.encode("the film is good")) == 6
