"""What is exchanged with Hugging Face? config.json, tensors and tokenizers, read and written.

Families and names are tables: what a config.json may say, and which tensor holds which weight. A folder is compared
with its config.json before anything is read; tensors become sharded arrays shard by shard. Export reads the same
tables backwards, and writes adapters for peft.
"""
