"""Contents of an exported Hugging Face folder besides the weights: tokenizer files, chat template, special tokens."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from meshtrain.config.data_sources import find
from meshtrain.config.schema import Config
from meshtrain.data.chat_template import template_text
from meshtrain.data.encoding.tokenizer_folder import TEMPLATE, TOKENIZER, end_ids, settings, special_tokens
from meshtrain.data.sources import reads_documents
from meshtrain.data.tokenizer import NO_TOKEN, NUM_BYTES, file_tokenizer, open_tokenizer, with_begin_token
from meshtrain.errors import Problem, UserError
from meshtrain.files import (
    JsonObject,
    expand_user,
    is_url,
    what_is_at,
)
from meshtrain.hf import export
from meshtrain.hf.config_json import (
    describe_model,
    differences,
    is_decoder,
    is_described,
)
from meshtrain.models.moe.experts import MATRICES
from meshtrain.run import weights

EOS, BOS = "eos_token", "bos_token"
ORIGINAL = "hugging_face"  # folder in an imported workdir: config.json and tokenizer files of the Hugging Face folder


def export_problems(config: Config, *, is_of_adapters: bool) -> list[Problem]:
    """Returns an error line if a run cannot be exported, else [].

    Args:
      config: the run's configuration.
      is_of_adapters: whether only the adapters are exported.
    """
    if not is_decoder(config.model):
        return [
            Problem(
                "task", got=config.task, condition="for export", allowed="decoder", nearest="the workdir of a decoder"
            )
        ]
    if not is_of_adapters:
        return []
    if not config.lora.rank:
        return [
            Problem(
                "--adapters",
                got="a run without adapters, lora.rank=0",
                allowed="a run with adapters",
                nearest="leave it out",
            )
        ]
    if config.optimizer.trainable:
        return [
            Problem(
                "--adapters",
                got=f"a run with optimizer.trainable={config.optimizer.trainable}, whose weights are not in an adapter",
                allowed="a run that trains only adapters",
                nearest="leave it out",
            )
        ]
    of_experts = [f"layers/experts/{name}" for name in MATRICES]
    if config.model.moe.num_experts and any(re.search(config.lora.targets, path) for path in of_experts):
        return [
            Problem(
                "--adapters",
                got=(
                    f"a run with adapters of experts, lora.targets='{config.lora.targets}', for which the package peft "
                    "has no modules"
                ),
                allowed="adapters of attention",
                nearest="leave it out; then the adapters are merged",
            )
        ]
    return []


def original_folder(config: Config, workdir: str | Path) -> Path | None:
    """Returns the Hugging Face folder from which a run's model came; None if it is not on this machine.

    Candidates are the workdir, the folder of the starting weights, and the folder `hugging_face` in each of them. The
    first candidate whose config.json describes the run's model is returned.

    Args:
      config: the run's configuration.
      workdir: the run's folder, or a Hugging Face folder.
    """
    given = [
        expand_user(one) for one in (workdir, weights.base_weights(config)[0]) if str(one) and not is_url(str(one))
    ]
    for folder in (one / inner for one in given for inner in ("", ORIGINAL)):
        if is_described(folder):
            theirs = describe_model(folder, ignore=None).options
            if not differences(config.model, theirs, config.sequence_length, folder):
                return folder
    return None


def with_text_source(config: Config, original: Path | None) -> Config:
    """Replaces the data source `tokens` (files of token ids) by `text`, so that the configuration names a tokenizer.

    The tokenizer, the end token and the begin token come from the description of the token files. The configuration is
    returned unchanged for other sources, or if the token files are not on this machine.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none. If its tokenizer.json is equal
        to the tokenizer of the token files, the folder becomes `data.tokenizer`.
    """
    if config.data.source != "tokens":
        return config
    try:
        tokenizer = find(config.data.source).tokenizer(config.data, config.model.vocab_size)
    except UserError:
        return config
    name, end_token, begin_token = tokenizer.name, "", ""
    if name != "bytes":
        content = settings("", name)
        vocab = content["model"]["vocab"]
        texts = {number: text for text, number in vocab.items()} if isinstance(vocab, dict) else {}
        texts |= {one["id"]: one["content"] for one in content["added_tokens"]}
        end_token = texts[tokenizer.end_id] if tokenizer.end_id in texts else ""
        own = None if original is None else original / TOKENIZER
        if own is not None and what_is_at(own) == "a file" and own.read_bytes() == Path(name).read_bytes():
            name = str(original)
        begin = [texts[one] for one in tokenizer.begin if one in texts] or [NO_TOKEN]
        begin_token = begin[0] if len(begin) == 1 else ""  # tokenizer.json itself defines several begin tokens
    data = dataclasses.replace(config.data, source="text", tokenizer=name, end_token=end_token, begin_token=begin_token)
    return dataclasses.replace(config, data=data)


def text_files(config: Config, original: Path | None) -> tuple[Path | None, dict[str, str], int]:
    """Returns the files of a run's tokenizer and chat template, for an exported folder.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none. Its files are copied if the
        data have no tokenizer, or if the tokenizer is not on this machine.

    Returns:
      The folder to copy files from (None: no folder), name -> content of the files to write, and the id of the token
      that ends a document (-1: no token).
    """
    data, size = config.data, config.model.vocab_size
    written, what = dict[str, str](), what_is_at(data.tokenizer)
    if what_is_at(data.chat_template) == "a file":
        written[TEMPLATE] = template_text(data.chat_template)
    if not reads_documents(data):
        return original, written, -1
    if data.tokenizer == "bytes":
        return (None, export.byte_files() | written, NUM_BYTES) if size > NUM_BYTES else (None, written, -1)
    if what not in ("a file", "a folder"):
        return original, written, -1
    end_id = file_tokenizer(data.tokenizer, data.end_token, NO_TOKEN).end_id
    if changed := with_begin_token(data.tokenizer, data.begin_token):
        written[TOKENIZER] = changed
    end_id = end_id if end_id < size else -1
    if what == "a folder":
        return Path(data.tokenizer), written, end_id
    content = Path(data.tokenizer).read_text(encoding="utf-8")
    beside = Path(data.tokenizer).parent
    return beside if beside == original else None, {TOKENIZER: content, **written}, end_id


def special_ids(config: Config, original: Path | None, end_id: int) -> JsonObject:
    """Returns the special token ids to write into an exported config.json; {} if the ids of `original` are still right.

    `eos_token_id` is an id, or a list if several ids end a text. If the run's vocabulary differs from the original's,
    the result also has `bos_token_id` and `pad_token_id`: an id, or None if the tokenizer has no such token.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none.
      end_id: the id that ends a document, from `text_files`; -1: the run read no text, so the result is empty.
    """
    used, size = config.data.tokenizer, config.model.vocab_size
    if end_id < 0:
        return {}
    ends = [one for one in dict.fromkeys((end_id, *end_ids(used))) if one < size]
    file = None if original is None else original / TOKENIZER
    is_same = file is not None and (what_is_at(file) != "a file" or weights.has_same_vocabulary(used, file))
    if is_same and {*ends} == {*end_ids(str(original))}:
        return {}
    ids: JsonObject = {"eos_token_id": ends if len(ends) > 1 else end_id}
    if is_same:
        return ids
    tokenizer, named = open_tokenizer(used, config.data.end_token, NO_TOKEN), special_tokens(settings(used))
    for name in (BOS, "pad_token"):
        encoded = tokenizer.encode(named[name]) if name in named else []
        ids[f"{name}_id"] = encoded[0] if len(encoded) == 1 else None
    return ids


def tokenizer_settings(
    config: Config, of_text: Path | None, written: Mapping[str, str], end_id: int
) -> dict[str, str | bool]:
    """Returns entries of an export's tokenizer_config.json that replace the entries of the copied tokenizer.

    They are `eos_token`, `bos_token` and `add_bos_token`, if the run's data options set them. A token whose key the
    chat template uses is not replaced, because the run was trained with texts from this template.

    Args:
      config: the run's configuration.
      of_text: the folder from which tokenizer files are copied; None: no folder.
      written: name -> content of the files to write; they may include the chat template.
      end_id: the id that ends a document; -1: the run read no text, so the result is empty.
    """
    if end_id < 0 or config.data.tokenizer == "bytes":
        return {}
    content = {} if of_text is None else settings(str(of_text))
    if TEMPLATE in written:
        template = written[TEMPLATE]
    elif of_text is not None and what_is_at(of_text / TEMPLATE) == "a file":
        template = template_text(of_text / TEMPLATE)
    else:
        template = json.dumps(content["chat_template"]) if "chat_template" in content else ""
    begin = config.data.begin_token
    tokens = {EOS: config.data.end_token, BOS: "" if begin == NO_TOKEN else begin}
    chosen: dict[str, str | bool] = {key: token for key, token in tokens.items() if token and key not in template}
    if begin and "add_bos_token" in content:  # some tokenizer classes rebuild the post-processor from this entry
        chosen["add_bos_token"] = begin != NO_TOKEN
    return chosen
