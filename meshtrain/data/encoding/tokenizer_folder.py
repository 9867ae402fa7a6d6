"""Reads the JSON files in the folder of a tokenizer: settings, special tokens, and the ids that end a text."""

from pathlib import Path

from meshtrain.errors import Problem, UserError
from meshtrain.files import JsonObject, read_json, what_is_at

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def read_tokenizer_json(file: Path, fix: str) -> JsonObject:
    """Reads the JSON object in a file of a tokenizer.

    The package tokenizers also loads some files that are not JSON; they are rejected here.

    Args:
      file: an existing file.
      fix: the suggested value of `data.tokenizer`, for the error.

    Raises:
      UserError: the file cannot be read, or is no JSON object.
    """
    try:
        content = read_json(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it contains {type(content).__name__}")
    except (OSError, ValueError) as error:
        fault = f"'{file}' cannot be read ({error})"
        problem = Problem("data.tokenizer", fault=fault, allowed="a JSON object in UTF-8", nearest=fix)
        raise UserError(problem) from error
    return content


def tokenizer_file(path: str) -> Path:
    """Returns the file of a tokenizer: `path`, or the tokenizer.json in it if `path` is a folder."""
    return Path(path, TOKENIZER) if what_is_at(path) == "a folder" else Path(path)


def settings(path: str, name: str = SETTINGS) -> JsonObject:
    """Reads the JSON object in a file of a tokenizer's folder; returns {} if `path` is no folder or has no such file.

    Args:
      path: the folder of the tokenizer.
      name: the name of the file.

    Raises:
      UserError: the file cannot be read, or is no JSON object.
    """
    file = Path(path, name)
    if what_is_at(file) != "a file":
        return {}
    return read_tokenizer_json(file, f"data.tokenizer={tokenizer_file(path)}, without the other files of its folder")


def special_tokens(content: JsonObject) -> dict[str, str]:
    """Returns {name: text} of the special tokens in the content of a tokenizer_config.json, such as `eos_token`.

    >>> special_tokens({"eos_token": {"content": "</s>", "special": True}, "bos_token": None, "pad_token": "<pad>"})
    {'eos_token': '</s>', 'pad_token': '<pad>'}
    """
    tokens = {}
    for name, value in content.items():
        text = value["content"] if isinstance(value, dict) and "content" in value else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def folder_end_token(path: str) -> str:
    """Returns the `eos_token` in the tokenizer_config.json of a tokenizer's folder; '' if it has none.

    Raises:
      UserError: the file cannot be read, or is no JSON object.
    """
    return special_tokens(settings(path)).get("eos_token") or ""


def end_ids(path: str) -> tuple[int, ...]:
    """Returns the ids that end a generated text, from the files in the folder of a model or tokenizer.

    The ids are `eos_token_id` in generation_config.json, or else in config.json; () if both lack this entry.

    Raises:
      UserError: a file cannot be read, or its `eos_token_id` is invalid.
    """
    for name in ("generation_config.json", "config.json"):
        if (given := settings(path, name).get("eos_token_id")) is not None:
            listed = given if isinstance(given, list) else [given]
            if not all(type(one) is int and 0 <= one < 1 << 31 for one in listed):
                raise UserError(
                    Problem(
                        f"{Path(path, name)}: eos_token_id",
                        got=str(given)[:200],
                        allowed="an id, or a list",
                        nearest="the file that was published with the model",
                    )
                )
            return tuple(listed)
    return ()
