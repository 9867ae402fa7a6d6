"""A custom data source: Grain reads documents from an ArrayRecord file; each document becomes one example.

python -m meshtrain train --config.data.source=docs.guide.own_data:documents --config.data.path=FILE
"""

from pathlib import Path

import grain
import numpy as np

from meshtrain.config import Config
from meshtrain.data.dataset import Dataset
from meshtrain.data.tokenizer import byte_tokenizer


def documents(config: Config) -> Dataset:
    """Returns the UTF-8 records of `config.data.path` as byte tokens, truncated; 1 in 20 is for validation."""
    length, text = config.sequence_length, byte_tokenizer()

    def row(record: bytes) -> dict[str, np.ndarray]:
        ids = np.asarray([*record, text.end_id][: length + 1], np.int32)
        is_token = np.arange(length) < len(ids) - 1
        padded = np.pad(ids, (0, length + 1 - len(ids)))
        return {
            "tokens": np.where(is_token, padded[:-1], 0),
            "targets": np.where(is_token, padded[1:], 0),
            "segment_ids": is_token.astype(np.int32),  # 0: padding
            "positions": np.arange(length, dtype=np.int32),
            "weights": is_token.astype(np.float32),  # padding is never a target
        }

    rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(config.data.path)).map(row)
    about, held_out = Path(config.data.path).stat(), max(len(rows) // 20, 1)
    fingerprint = f"bytes of {len(rows)} records, {about.st_size} bytes"
    return Dataset(rows[held_out:], rows[:held_out], fingerprint, text=text)
