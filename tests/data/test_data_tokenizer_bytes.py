"""The bytes of a text are those of its tokens, whatever the tokenizer, but for what it adds or takes away itself."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshtrain.data.corpus import stream_of
from meshtrain.data.packing import TokenStream, pack
from meshtrain.data.tokenizer import NUM_BYTES, bytes_of_targets, file_tokenizer, number_tokenizer, open_tokenizer
from tests.data.test_data_tokenizer import byte_level

TEXT = "naïve ☃ in the thin thing, 日本 🎉!\n\tthought  this\n"
LEARNED = ["the thin thing thought this through in naïve"] * 10


def metaspace():
    """As Llama 2 and Gemma: a blank is an underline, and what has no piece is written in bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁th", "▁", "ink", "☃", *"thinak"]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    return made


def byte_fallback(*blanks, prepends=False, scheme=""):
    """A BPE that writes in bytes what it has no piece for, blanks perhaps among it.

    Args:
      blanks: pieces of `▁`, as Gemma and Llama have them, or none.
      prepends: whether a normalizer puts a blank before a text, as Llama 2's.
      scheme: of the pre-tokenizer Metaspace; `` for normalizers in its place.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"thaeinx", "th", *blanks]
    merges = [("t", "h"), *[("▁", "▁")] * ("▁▁" in blanks)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
        return made
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepends else replace
    strips = [decoders.Strip(" ", 1, 0)] if prepends else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    return made


def with_runs_of_blanks():
    """As Gemma: runs of blanks are added tokens, written as the normalizer writes them."""
    made = byte_fallback("▁", "▁▁")
    made.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
    return made


def byte_level_with_added():
    made = byte_level(("<|endoftext|>",))
    made.add_tokens(["  ", "é", "ĠĠ", "<thing>"])
    return made


KINDS = {
    "byte level": byte_level,
    "byte level, added": byte_level_with_added,
    "Gemma": with_runs_of_blanks,
    "Llama 2": lambda: byte_fallback("▁", prepends=True),
    "Llama 2, no piece for a blank": lambda: byte_fallback(prepends=True),
    "Gemma, no piece for a blank": byte_fallback,
    "always": lambda: byte_fallback("▁", scheme="always"),
    "first": lambda: byte_fallback("▁", scheme="first"),
    "never": lambda: byte_fallback("▁", scheme="never"),
}


def texts(number=30):
    """Returns texts that begin with no blank, which some tokenizers drop there, and without `▁`, which becomes one."""
    draw = random.Random(0)
    pieces = ["the", "thin", " ", "  ", "    ", "\n", "\t", "é", "☃", "日本", "🎉", "</s>", "<0xE2>", "█", " a"]
    return [draw.choice("ax<é") + "".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in range(number)]


@pytest.mark.parametrize("packing, length", [("first_fit", 5), ("first_fit", 64), ("stream", 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_have_the_bytes_of_their_texts(kind, packing, length, tmp_path):
    """Behind a begin token, each token of a text is a target once; a window may end within a text."""
    made = KINDS[kind]()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    tokenizer = file_tokenizer(path, "</s>", special_tokens="text")
    lengths, documents = tokenizer.byte_lengths(), texts()
    examples = pack(stream_of(tokenizer, documents), length, packing)
    found = bytes_of_targets(examples, range(len(examples)), lengths, tokenizer)
    wanted = sum(len(text.encode()) for text in documents)
    if packing == "stream":  # what is behind the last window
        assert wanted - 3 * length <= found <= wanted
    else:
        assert found == wanted


def test_an_end_token_inside_a_text_has_its_bytes(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level(("<s>", "</s>")).save(str(path))
    tokenizer = file_tokenizer(str(path), "</s>")
    documents = ["the</s> thin", "in </s>"]
    for packing in ("first_fit", "stream"):
        examples = pack(stream_of(tokenizer, documents), 4, packing)
        found = bytes_of_targets(examples, range(len(examples)), tokenizer.byte_lengths(), tokenizer)
        first = [int(tokenizer.byte_lengths()[tokenizer.encode(text)[0]]) for text in documents]
        assert found == sum(map(len, documents)) - sum(first)


def word_piece():
    """Blanks and what it does not know are lost: a word counts with the blank before it, and with no other."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=30, special_tokens=["[SEP]", "[UNK]"], show_progress=False)
    made.train_from_iterator(LEARNED, trainer)
    return made


def saved(path, make):
    made = make()
    made.add_tokens(["<thing>"])
    made.save(str(path))
    return file_tokenizer(str(path))


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_tokens_of_a_text_have_its_bytes(make, tmp_path):
    tokenizer = saved(tmp_path / "tokenizer.json", make)
    lengths = tokenizer.byte_lengths()
    ids = tokenizer.encode(f"{TEXT}<thing>{TEXT}")
    assert tokenizer.decode(ids) == f"{TEXT}<thing>{TEXT}"
    assert len(set(ids)) > 20
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[ids].sum() == len(f"{TEXT}<thing>{TEXT}".encode())
    assert lengths[tokenizer.end_id] == 0


def test_a_blank_counts_with_the_word_behind_it(tmp_path):
    tokenizer = saved(tmp_path / "tokenizer.json", word_piece)
    text = "the thing thought through"
    ids = tokenizer.encode(text)
    assert len(ids) > 4, "pieces of words among them"
    assert tokenizer.byte_lengths()[ids].sum() == len(text) + 1


def test_bytes_are_one_each_and_numbers_are_no_text():
    lengths = open_tokenizer("bytes").byte_lengths()
    assert lengths.tolist() == [1] * NUM_BYTES + [0]
    assert number_tokenizer(9).byte_lengths is None


@pytest.mark.parametrize("packing, missing", [("first_fit", 2), ("stream", 2 + 2)])
def test_targets_that_count_have_bytes(packing, missing):
    """A document's first token is never a target; windows leave out what does not fill the last one."""
    tokenizer = open_tokenizer("bytes")
    texts = ["first document, ", "and a second one"]
    ids = [id for text in texts for id in (*tokenizer.encode(text), tokenizer.end_id)]
    stream = TokenStream((np.asarray(ids, np.uint16),), tokenizer.end_id)
    examples = pack(stream, 6, packing)
    found = bytes_of_targets(examples, range(len(examples)), tokenizer.byte_lengths())
    assert found == sum(map(len, texts)) - missing
    assert bytes_of_targets(examples, [], tokenizer.byte_lengths()) == 0
