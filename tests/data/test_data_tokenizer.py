import numpy as np
import pytest
import tokenizers

from meshtrain.data.tokenizer import byte_tokenizer, file_tokenizer, number_tokenizer, open_tokenizer
from meshtrain.errors import UserError


def byte_level(special=("<|endoftext|>",)):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the thin thing thought this through"] * 10, trainer)
    return made


def saved_tokenizer(path, special=("<|endoftext|>",)):
    made = byte_level(special)
    if special:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    made.enable_truncation(4)
    made.enable_padding(length=16)
    made.save(str(path))
    return path


def test_bytes_round_trip_and_broken_characters():
    tokenizer = byte_tokenizer()
    text = "naïve ☃ text\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("☃") == [0xE2, 0x98, 0x83]
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a", ""])] == [[97], []]
    assert tokenizer.decode([97, 256, 300, -1, 98]) == "ab"
    assert tokenizer.decode([0xE2, 97]) == "\ufffda"
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.dtype) == (257, 256, np.uint16)


def test_file_tokenizer_ignores_stored_truncation_and_padding(tmp_path):
    tokenizer = open_tokenizer(str(saved_tokenizer(tmp_path / "tokenizer.json")))
    text = "the thing thought naïve ☃ through and through"
    ids = tokenizer.encode(text)
    assert tokenizer.begin == (tokenizer.end_id,), "its post-processor puts the end token before a text"
    assert ids.count(tokenizer.end_id) == 1
    assert len(ids) > 5
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text
    assert tokenizer.encode_documents([text, "a"])[0].tolist() == ids
    assert len(tokenizer.encode_documents(["a"])[0]) == 2
    assert tokenizer.end_id == 0
    assert max(ids) < tokenizer.vocab_size <= 300


def test_end_token_is_named_known_or_added(tmp_path):
    none = saved_tokenizer(tmp_path / "none.json", special=())
    added = file_tokenizer(str(none))
    assert added.vocab_size == added.end_id + 1
    assert added.end_id not in added.encode("the thing")
    two = str(saved_tokenizer(tmp_path / "two.json", special=("<|endoftext|>", "<stop>")))
    assert file_tokenizer(two).end_id == 0
    assert file_tokenizer(two, "<stop>").end_id == 1
    with pytest.raises(UserError, match=r"data.end_token.*got '<\|end\|>'.*did you mean '<\|endoftext\|>'"):
        file_tokenizer(two, "<|end|>")


def test_unusable_tokenizer_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(UserError, match="did you mean 'bytes'"):
        open_tokenizer("byte")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"is not a valid tokenizer\.json"):
        open_tokenizer(str(tmp_path / "other.json"))


def test_numbers():
    tokenizer = number_tokenizer(16)
    assert tokenizer.decode(tokenizer.encode("3 15 0")) == "3 15 0"
    with pytest.raises(UserError, match="got '16'"):
        tokenizer.encode("1 16")
