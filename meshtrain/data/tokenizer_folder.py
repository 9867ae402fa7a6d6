"""The files of a tokenizer's folder, as Hugging Face writes them: tokenizer.json, and beside it its special tokens."""

from pathlib import Path
from typing import Any

from meshtrain.words.errors import UserError
from meshtrain.words.paths import what_is_at
from meshtrain.words.read_json import read_json

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def tokenizer_file(path: str) -> Path:
    """Returns the file that `data.tokenizer` means: the path itself, or the tokenizer.json in the folder."""
    return Path(path, TOKENIZER) if what_is_at(path) == "a folder" else Path(path)


def settings(path: str, name: str = SETTINGS) -> dict[str, Any]:
    """Returns the content of a file in a tokenizer's folder; {} where `path` is no folder, or has no such file.

    Raises:
      UserError: the file cannot be read, or holds no JSON object.
    """
    file = Path(path, name)
    if what_is_at(file) != "a file":
        return {}
    try:
        content = read_json(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.tokenizer: '{file}' cannot be read ({error}); allowed: a JSON object in UTF-8; nearest: "
            f"data.tokenizer={tokenizer_file(path)}, which is read alone"
        ) from error
    return content


def special_tokens(content: dict[str, Any]) -> dict[str, str]:
    """Returns name -> text of the special tokens in a tokenizer_config.json, such as `eos_token`.

    >>> special_tokens({"eos_token": {"content": "</s>", "special": True}, "bos_token": None, "pad_token": "<pad>"})
    {'eos_token': '</s>', 'pad_token': '<pad>'}
    """
    found = {}
    for name, value in content.items():
        text = value["content"] if isinstance(value, dict) and "content" in value else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def end_token(path: str) -> str:
    """Returns the token that ends a document according to the folder's tokenizer_config.json; `` if it names none.

    Raises:
      UserError: the file cannot be read, or holds no JSON object.
    """
    found = special_tokens(settings(path))
    return found["eos_token"] if "eos_token" in found else ""


def end_ids(path: str) -> tuple[int, ...]:
    """Returns the ids that end a generated text by the folder's generation_config.json, otherwise by its config.json.

    Raises:
      UserError: a file cannot be read, or has something else there.
    """
    for name in ("generation_config.json", "config.json"):
        if (given := settings(path, name).get("eos_token_id")) is not None:
            listed = given if isinstance(given, list) else [given]
            if not all(type(one) is int and 0 <= one < 1 << 31 for one in listed):
                raise UserError(f"{Path(path, name)}: eos_token_id: got {str(given)[:200]}; allowed: an id, or a list; "
                                "nearest: the file that was published with the model")  # fmt: skip
            return tuple(listed)
    return ()
