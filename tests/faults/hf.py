"""Planted faults in what comes from Hugging Face."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "hf/config_json.py",
        "if value is None or key in understood or key not in DIFFERENT:",
        "if key not in only:",
        "a key of config.json that is not understood is ignored",
        "hf/test_hf_config_json.py::test_what_the_decoder_has_nothing_for_is_refused_by_name_and_value[quantized]",
    ),
    # Once no test noticed these.
    Fault(
        "hf/families.py",
        '"num_key_value_heads": None, "rope_theta": 10000.0',
        '"num_key_value_heads": None, "rope_theta": 500000.0',
        "a Llama that does not say its rotary base has that of Llama 3",
        "hf/test_hf_config_json.py::test_what_an_absent_key_means_is_what_transformers_says",
    ),
)
