"""Import from and export to Hugging Face: config.json, tensors and tokenizers.

Tables describe the supported families: the keys of their config.json, and the tensor that contains each weight. Import
compares a folder with its config.json before it reads any tensor; tensors become sharded arrays shard by shard. Export
uses the same tables in the other direction, and writes adapters for peft.
"""
