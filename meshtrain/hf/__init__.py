"""Models of Hugging Face's format: name tables, config.json, safetensors files, and their way into sharded arrays."""
