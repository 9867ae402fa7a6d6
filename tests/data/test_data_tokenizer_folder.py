import json
import pathlib
import shutil

import pytest

from meshtrain.data.prepare import prepare
from meshtrain.data.token_files import read_sidecar, token_file_tokenizer
from meshtrain.data.tokenizer import file_tokenizer, open_tokenizer
from meshtrain.errors import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "hf" / "fixtures" / "chat"


def test_a_folder_is_its_tokenizer_json_with_its_end_token(tmp_path):
    of_folder, of_file = open_tokenizer(str(FOLDER)), open_tokenizer(str(FOLDER / "tokenizer.json"))
    assert of_folder.encode("the mesh <|im_end|>") == of_file.encode("the mesh <|im_end|>")
    assert (of_folder.end_id, of_file.end_id, of_folder.vocab_size) == (2, 0, 310)
    assert open_tokenizer(str(FOLDER), "<|im_start|>").end_id == 1, "data.end_token comes first"
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert open_tokenizer(str(tmp_path)).end_id == 0, "without tokenizer_config.json the well-known one"


def test_a_wrong_folder_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"a folder without tokenizer.json; allowed: bytes, or the path of"):
        file_tokenizer(str(tmp_path))
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(UserError, match=r"has the eos_token '</s>', which is not in its tokenizer.json"):
        file_tokenizer(str(tmp_path))
    assert file_tokenizer(str(tmp_path), "<|im_end|>").end_id == 2
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config.json' cannot be read"):
        file_tokenizer(str(tmp_path))


def test_the_ids_that_end_an_answer_are_those_of_generation_config_and_else_of_config(tmp_path):
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert open_tokenizer(str(tmp_path)).also_end == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 75]}')
    assert open_tokenizer(str(tmp_path)).also_end == (1, 75)
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert open_tokenizer(str(tmp_path)).also_end == (1, 75)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 106}')
    assert open_tokenizer(str(tmp_path)).also_end == (106,)
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).also_end == (), "the file alone"
    for wrong in ('"</s>"', "[1, null]", "true", "-1", f"1{'0' * 400}"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(
            UserError, match=r"generation_config.json: eos_token_id: got .*; allowed: an id, or a list; "
        ):
            open_tokenizer(str(tmp_path))


def test_prepared_tokens_keep_the_folders_end_token(tmp_path):
    (tmp_path / "a.txt").write_text("the mesh is one line")
    path = tmp_path / "a.bin"
    described = prepare(str(tmp_path / "a.txt"), str(path), tokenizer=str(FOLDER))
    assert (described.end_id, described.end_token) == (2, "<|im_end|>")
    assert token_file_tokenizer(path, read_sidecar(path)).end_id == 2
