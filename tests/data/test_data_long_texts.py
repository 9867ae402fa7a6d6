"""Long texts are encoded in pieces: ids and places are those of the whole text, for every kind of tokenizer.json."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from meshtrain.data import adjacent, long_texts
from meshtrain.data import tokenizer as tokenizer_module
from meshtrain.data.corpus import SOURCES
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.tokenizer import file_tokenizer
from meshtrain.errors import UserError

TEXT = ("It's the 3rd of 12345 words, isn't it?  The end.\n\nA new line,\tand tabs; naïve café — “quoted” 你好，世界。"
        " x = {'a': [1, 2.5]}  # comment\r\n") * 4  # fmt: skip
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")  # fmt: skip
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
SPLIT, BYTES = pre_tokenizers.Split, pre_tokenizers.ByteLevel
IN_ORDER = pre_tokenizers.Sequence
METASPACE = pre_tokenizers.Metaspace
REPLACE = normalizers.Replace(" ", "▁")


def byte_bpe(*steps, normalizer=None):
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=len(steps) == 2))
    found.pre_tokenizer = IN_ORDER(list(steps)) if len(steps) > 1 else steps[0]
    found.decoder = decoders.ByteLevel()
    if normalizer is not None:
        found.normalizer = normalizer
    special = [AddedToken("<eos>", special=True), AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)]
    alphabet = BYTES.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([TEXT], trainer)
    return found


def character_bpe(normalizer, pre_tokenizer, *, by_words=True):
    """As Llama 2 and Gemma have it: blanks are written as ▁, and a word may be the whole text."""
    found = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    found.pre_tokenizer = METASPACE(prepend_scheme="always") if by_words else METASPACE(split=False)
    found.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    )
    if normalizer is not None:
        found.normalizer = normalizer
    found.pre_tokenizer = pre_tokenizer
    return found


def trained(model, trainer, normalizer, pre_tokenizer):
    found = tokenizers.Tokenizer(model)
    if normalizer is not None:
        found.normalizer = normalizer
    found.pre_tokenizer = pre_tokenizer
    found.train_from_iterator([TEXT], trainer(special_tokens=["[UNK]"], show_progress=False))
    return found


PLAIN = BYTES(add_prefix_space=False, use_regex=False)
LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), REPLACE])
KINDS = {
    "gpt2": lambda: byte_bpe(BYTES(add_prefix_space=False)),
    "roberta": lambda: byte_bpe(BYTES(add_prefix_space=True)),
    "llama3": lambda: byte_bpe(SPLIT(Regex(CL100K), "isolated"), PLAIN),
    "qwen": lambda: byte_bpe(SPLIT(Regex(CL100K.replace("{1,3}", "")), "isolated"), PLAIN,
                             normalizer=normalizers.NFC()),
    "gpt-oss": lambda: byte_bpe(SPLIT(Regex(O200K), "removed", invert=True), PLAIN),
    "deepseek": lambda: byte_bpe(SPLIT(Regex(r"\p{N}{1,3}"), "isolated"), SPLIT(Regex("[一-龥]+"), "isolated"),
                                 SPLIT(Regex(CL100K), "isolated"), PLAIN),
    "starcoder": lambda: byte_bpe(pre_tokenizers.Digits(individual_digits=True), BYTES(add_prefix_space=False)),
    "falcon": lambda: byte_bpe(pre_tokenizers.Punctuation("contiguous"), BYTES(add_prefix_space=False),
                               pre_tokenizers.Digits()),
    "llama2": lambda: character_bpe(LLAMA2, None),
    "mistral": lambda: character_bpe(None, METASPACE(prepend_scheme="first", split=False)),
    "gemma": lambda: character_bpe(REPLACE, SPLIT(" ", "merged_with_previous")),
    "t5": lambda: trained(models.Unigram(), lambda **given: trainers.UnigramTrainer(vocab_size=120, unk_token="[UNK]",
                          **given), normalizers.NFKC(), METASPACE()),
    "bert": lambda: trained(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer,
                            normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "words": lambda: trained(models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer,
                             normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(),
                                                   normalizers.StripAccents()]), pre_tokenizers.Whitespace()),
    "blanks": lambda: trained(models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer,
                              normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.WhitespaceSplit()),
}  # fmt: skip
# Texts that a place depends on characters further away for, or whose steps are not known: no place is safe.
UNSAFE = {
    "scripts": lambda: byte_bpe(pre_tokenizers.UnicodeScripts(), PLAIN),
    "look behind": lambda: byte_bpe(SPLIT(Regex(r"(?<=a)b+|\s+|\w+"), "isolated"), PLAIN),
    "anchor": lambda: byte_bpe(SPLIT(Regex(r"^\w+|\s+|\w+"), "isolated"), PLAIN),
    "pairs of words": lambda: byte_bpe(SPLIT(Regex(r"\S+\s+\S+|[\s\S]"), "isolated"), PLAIN),
    "everything": lambda: byte_bpe(SPLIT(Regex(r"[\s\S]+"), "isolated"), PLAIN),
    "merged": lambda: byte_bpe(SPLIT(Regex(r"\s+|\S+"), "merged_with_next"), PLAIN),
    "one word": lambda: character_bpe(None, METASPACE(split=False), by_words=False),
    "strip": lambda: byte_bpe(BYTES(), normalizer=normalizers.Strip()),
}


def made_text(random_):
    words = ["a", "The", "it's", "x", "12345", "7", "naïve", "é", "e\u0301", "你好", "世界", "。", "，", ".", "--",
             "\n", "\r\n", "\n\n", "\t", "  ", "   ", "\u00a0", "▁", "한국", "\u1112\u1161\u11ab", "ﬁ", "ß", "İ", "🙂",
             "²", "👩\u200d👧", "Ⅷ", "<eos>", "<mask>", "<", ">", "end"]  # fmt: skip
    return "".join(random_.choice(words) + random_.choice(["", "", " ", " ", " ", "\n"]) for _ in range(60))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_and_places_of_the_text(kind, tmp_path, monkeypatch):
    loaded = KINDS[kind]()
    loaded.save(str(tmp_path / "t.json"))
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 10_000)
    whole = file_tokenizer(str(tmp_path / "t.json"))
    random_ = random.Random(0)
    texts = [made_text(random_) for _ in range(40)]
    expected, places = whole.encode_documents(texts), whole.with_places(texts)
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 6)
    monkeypatch.setattr(long_texts, "BATCH_CHARACTERS", 100)
    cuts, num_pieces = long_texts.cuts_of(loaded), 0
    for text in texts:
        num_pieces += len(cuts.pieces(text, kind))
    assert num_pieces > 5 * len(texts), "texts are cut"
    for text, ids, other in zip(texts, expected, whole.encode_documents(texts), strict=True):
        assert ids.tolist() == other.tolist(), repr(text)
    for text, (ids, spans), (other_ids, others) in zip(texts, places, whole.with_places(texts), strict=True):
        assert ids.tolist() == other_ids.tolist()
        # Tokens that a normalizer adds lie nowhere in the text.
        assert (np.abs(spans - others) <= (kind == "llama2")).all(), repr(text)


@pytest.mark.parametrize("kind", UNSAFE)
def test_a_text_without_safe_places_has_a_stated_limit(kind, tmp_path, monkeypatch):
    UNSAFE[kind]().save(str(tmp_path / "t.json"))
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 6)
    monkeypatch.setattr(long_texts, "MOST_CHARACTERS", 1000)
    tokenizer = file_tokenizer(str(tmp_path / "t.json"))
    assert len(long_texts.cuts_of(UNSAFE[kind]()).pieces(TEXT, "t")) == 1
    text = TEXT * 5
    tokenizer.encode(text[:1000])
    with pytest.raises(UserError, match=r"with 1,001 characters that cannot be split .*at most 1,000; nearest: "):
        tokenizer.encode(text[:1001])


def test_no_place_is_beside_an_added_token(tmp_path):
    found = byte_bpe(BYTES(add_prefix_space=False))
    found.add_tokens([AddedToken("end of", normalized=True), AddedToken("STOP", normalized=True, single_word=True)])
    cuts = long_texts.cuts_of(found)
    text = "an end of it, and STOP it there"
    safe = [place for place in range(1, len(text)) if cuts._is_safe(text, place)]
    assert not [
        place for place in safe if 2 <= place <= 10 or text.index("STOP") - 1 <= place <= text.index("STOP") + 5
    ]
    assert safe
    for place in safe:
        both = [*found.encode(text[:place]).ids, *found.encode(text[place:]).ids]
        assert both == found.encode(text).ids


@pytest.mark.parametrize(
    ("pattern", "pair", "expected"),
    [
        (r"\p{L}+|\s+", "a ", (False, True, True)),
        (r"\p{L}+|\s+", "ab", (True, True, True)),
        (r" ?\p{L}+|\s+(?!\S)", "a ", (False, False, True)),  # nothing matches a blank for sure
        (r"\s+(?!\S)|\s", "\na", (True, False, True)),  # the lookahead sees the letter
        (r"(ab)*", "ba", (True, False, True)),
        (r"(ab)?", "ba", (False, False, True)),
        (r"[^\S\n]+|x", "\n ", (False, True, True)),
        (r"(?i:Q)+", "qq", (True, True, True)),
        (r"\P{L}+|y", "1a", (False, False, True)),
        (r"\d{1,3}", "a ", (False, False, False)),
        (r"a++b|(?>c+)", "ab", (True, False, True)),
    ],
)
def test_facts_about_an_expression(pattern, pair, expected):
    assert adjacent.facts(pattern, *pair) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(?<=a)b",
        "a(?=b)",
        "^a",
        "a$",
        r"\ba",
        r"(a)\1",
        "(?!a)b",
        r"\p{Han}+",
        "[a&&b]",
        "[[:alpha:]]",
        "(?i)a",
        "(",
        r"\X",
    ],
)
def test_an_expression_that_looks_elsewhere_is_unknown(pattern):
    with pytest.raises(adjacent.Unknown):
        adjacent.facts(pattern, "a", " ")


@pytest.mark.parametrize("source", ["prepare", "text", "chat"])
def test_a_long_document_reaches_the_tokenizer_in_pieces(tmp_path, monkeypatch, source):
    byte_bpe(BYTES(add_prefix_space=False)).save(str(tmp_path / "t.json"))
    text = "the quick brown fox " * 10_000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text, "completion": "jumps"}))
    sizes = list[int]()

    def recorded(*given):
        for batch in long_texts.batches(*given):
            sizes.extend(end - start for _, start, end in batch)
            yield batch

    monkeypatch.setattr(tokenizer_module, "batches", recorded)
    if source == "prepare":
        prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.bin"), tokenizer=str(tmp_path / "t.json"))
    else:
        path = str(tmp_path / ("a.txt" if source == "text" else "a.jsonl"))
        options = DataOptions(source=source, path=path, tokenizer=str(tmp_path / "t.json"), validation_fraction=0)
        SOURCES[source].open(options, DataRequest({"weights": None}, {}, 16, 1000, 0))
    assert max(sizes) <= 2 * long_texts.PIECE_CHARACTERS
    assert sum(sizes) == len(text) + 5 * (source == "chat")
