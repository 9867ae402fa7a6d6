"""The bytes of a text are those of its tokens, whatever the tokenizer, but for what it adds or takes away itself."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

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
