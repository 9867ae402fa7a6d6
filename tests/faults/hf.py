"""Planted faults of the room that reads Hugging Face folders."""

from scripts.mutant import Mutant

HF: tuple[Mutant, ...] = (
    Mutant(
        "rotary base unsaid",
        "hf/families.py",
        '"num_key_value_heads": None, "rope_theta": 10000.0',
        '"num_key_value_heads": None, "rope_theta": 500000.0',
        "a Llama that does not say its rotary base has that of Llama 3",
        ("hf/test_hf_config.py::test_what_an_absent_key_means_is_what_transformers_says",),
        was_unnoticed=True,
    ),
    Mutant(
        "strange keys ignored",
        "hf/config.py",
        "if value is None or key in understood or key not in DIFFERENT:",
        "if key not in only:",
        "a key of config.json that is not understood is ignored",
        ("hf/test_hf_config.py::test_what_the_decoder_has_nothing_for_is_refused_by_name_and_value[quantized]",),
    ),
    Mutant(
        "keys for values",
        "hf/names.py",
        'Weight("layers/attention/key", "transformer.h.{}.attn.c_attn.weight", "D N H", "D (3 N H)", 1)',
        'Weight("layers/attention/key", "transformer.h.{}.attn.c_attn.weight", "D N H", "D (3 N H)", 2)',
        "the keys of GPT-2 are read from where its values are",
        ("hf/test_hf_reading.py::test_logits_are_those_of_transformers[gpt2]",),
    ),
    Mutant(
        "layers of another shard",
        "hf/reading.py",
        "place = [begin + number for",
        "place = [number for",
        "each stage of a pipeline reads the first layers of a folder",
        ("hf/test_hf_reading.py::test_a_shard_of_the_layers_has_its_own_layers",),
    ),
    Mutant(
        "overlaps accepted",
        "hf/files.py",
        "        if begin < last:\n",
        "        if False:\n",
        "tensors of a file may share bytes",
        ("hf/test_hf_files.py::test_a_crafted_header_is_one_line_for_each_problem[overlap]",),
    ),
    Mutant(
        "adapters left out",
        "hf/export.py",
        'if f"{path}{A}" not in leaves:',
        "if True:",
        "an export has the matrices without their adapters",
        ("hf/test_hf_adapters.py::test_merged_matrices_are_the_base_plus_the_products_of_peft[all of llama]",),
    ),
    Mutant(
        "values for keys",
        "hf/adapters.py",
        "of_b[part * outputs : (part + 1) * outputs, ranks]",
        "of_b[index * outputs : (index + 1) * outputs, ranks]",
        "the adapter of GPT-2's values is written for its keys where these have none",
        ("hf/test_hf_adapters.py::test_merged_matrices_are_the_base_plus_the_products_of_peft[some of gpt2]",),
    ),
    Mutant(
        "template left behind",
        "config/of_folder.py",
        "DataOptions(tokenizer=str(folder))",
        "DataOptions(tokenizer=str(folder / TOKENIZER_FILE))",
        "the configuration of a Hugging Face folder has its tokenizer without its chat template",
        ("run/test_run_weights_from.py::test_a_folder_brings_its_tokenizer_and_its_chat_template",),
    ),
)
