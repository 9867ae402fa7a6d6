"""Measures text preparation: the speed of `prepare`, memory by format, and a start on 10^10 tokens.

It makes files of `--gigabytes`, and a file of 10^10 tokens, in a temporary folder, and reads them in separate
processes. The large file takes no disk space if the file system supports sparse files.

Extras: data
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
from jax.sharding import SingleDeviceSharding

from meshtrain.data.corpus import open_corpus
from meshtrain.data.loader import batches
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.token_files import Index, TokenFile, sidecar_path, write_index
from meshtrain.errors import run

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
NUM_TOKENS, NUM_DOCUMENTS, END = 10**10, 10**7, 50_256
LENGTH, BATCH, MILLIONTH, NUM_BATCHES = 1024, 8, 10**6, 50
GROUP_BYTES = 1 << 28  # of a row group in a .parquet


def library() -> list[str]:
    """Returns the files of the standard library and its tests."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return texts


def write_table(path: Path, num_bytes: int) -> None:
    """Writes a .parquet of random letters, so that compression saves nothing and a row group has 256 MiB."""
    random, schema = np.random.default_rng(0), pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema, use_dictionary=False, compression="snappy") as out:
        for _ in range(0, num_bytes, GROUP_BYTES):
            letters = random.integers(97, 123, GROUP_BYTES, np.uint8).tobytes().decode()
            texts = [letters[start : start + 4096] for start in range(0, len(letters), 4096)]
            out.write_table(pyarrow.table({"text": texts}), len(texts))


def write_lines(path: Path, texts: Sequence[str], num_bytes: int) -> None:
    """Writes texts repeatedly as lines until they have `num_bytes` bytes."""
    lines, size = [json.dumps({"text": text}).encode() + b"\n" for text in texts], 0
    with path.open("wb") as file:
        out: BinaryIO = file
        if path.suffix == ".gz":
            out = cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1))
        elif path.suffix == ".zst":
            out = pyarrow.CompressedOutputStream(file, "zstd")
        while size < num_bytes:
            size += sum(map(out.write, lines))
        out.close()


def speed(folder: Path, rounds: int, num_texts: int) -> None:
    """Prints the speed of prepare and of only the tokenizer on the same texts in memory."""
    texts = library()[:num_texts]
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE())
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=16_000, show_progress=False, initial_alphabet=alphabet)
    loaded.train_from_iterator(texts[:300], trainer)
    loaded.save(str(folder / "tokenizer.json"))
    size = sum(len(text.encode()) for text in texts)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "speed.parquet", compression="zstd")
    for ending in FORMATS[:3]:
        write_lines(folder / f"speed{ending}", texts, 1)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ("tokenizer", *FORMATS)}
    for _ in range(rounds):
        for name, held in seconds.items():
            wall, cpu = time.perf_counter(), time.process_time()
            if name == "tokenizer":
                loaded.encode_batch_fast(texts, add_special_tokens=False)
            else:
                out = folder / "speed.bin"
                prepare(str(folder / f"speed{name}"), str(out), tokenizer=str(folder), overwrite=True)
            held.append((time.perf_counter() - wall, time.process_time() - cpu))
    print(f"only the tokenizer took {statistics.median(one[1] for one in seconds['tokenizer']):.2f} s of CPUs for "
          f"{size / 1e6:.1f} MB of text, {rounds} rounds")  # fmt: skip
    for name in FORMATS:
        pairs = [*zip(seconds["tokenizer"], seconds[name], strict=True)]
        wall, cpu = (statistics.median(own[side] / one[side] for own, one in pairs) for side in (0, 1))
        print(f"prepare {name:<11} {wall:.2f} of its speed by the clock, {cpu:.2f} by CPU time", flush=True)


def memory(folder: Path, num_bytes: int) -> None:
    """Prints the peak memory of prepare for a file of each format."""
    texts = library()
    for ending in FORMATS:
        path = folder / f"large{ending}"
        write_table(path, num_bytes) if ending == ".parquet" else write_lines(path, texts, num_bytes)
        words = ["-m", "meshtrain", "prepare", f"--path={path}", f"--output={folder}/large.bin", "--overwrite"]
        # In a small process, because a child's peak memory includes its parent's memory at the fork.
        code = f"import os, sys; child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, *{words}]); "
        code += "used = os.wait4(child, 0)[2]; print(used.ru_maxrss, used.ru_utime)"
        said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        kibibytes, seconds = map(float, said.splitlines()[-1].split())
        print(f"prepare {ending:<11} {path.stat().st_size / 1e9:.2f} GB: at most {kibibytes / 1024:.0f} MiB, "
              f"{seconds:.0f} s of CPUs with bytes as tokens", flush=True)  # fmt: skip
        path.unlink()
    (folder / "large.bin").unlink()


def sparse(folder: Path) -> Path:
    """Makes a sparse token file of 10^10 zeros, with its description and the index of 10^7 documents."""
    path = folder / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(2 * NUM_TOKENS)
    described = TokenFile("uint16", END + 1, NUM_TOKENS, NUM_DOCUMENTS, END, "bytes", "", "")
    sidecar_path(path).write_text(json.dumps(vars(described)))
    lengths = np.random.default_rng(0).integers(2, 1999, NUM_DOCUMENTS, np.uint16)
    about = path.stat()
    write_index(path, Index(about.st_size, about.st_mtime_ns, "0" * 64, END, True, lengths))
    return path


def counter(file: str, name: str) -> int:
    """Returns a counter of the system for this process: `rchar` in bytes, memory in KiB."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    [found] = [line for line in lines if line.startswith(f"{name}:")]
    return int(found.split()[1])


def mapped(path: Path) -> int:
    """Returns the bytes of a mapped file that this process has touched."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        is_file = line.endswith(str(path)) if line[0] in "0123456789abcdef" else is_file
        found += int(line.split()[1]) * 1024 if is_file and line.startswith("Rss:") else 0
    return found


def start(path: Path, packing: str) -> None:
    """Prints bytes read and memory of a start on a token file, and the cost of batches. Runs in a separate process."""
    jax.config.update("jax_platforms", "cpu")
    sharding = SingleDeviceSharding(jax.devices()[0])
    names = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"weights": np.float32}
    batch = {name: jax.ShapeDtypeStruct((BATCH, LENGTH), kind, sharding=sharding) for name, kind in names.items()}
    read, held, begun = counter("io", "rchar"), counter("status", "RssAnon"), time.process_time()
    options = DataOptions(source="tokens", path=str(path), packing=packing)
    corpus = open_corpus(options, DataRequest(batch, {}, LENGTH, END + 1, 0))
    seconds, index_bytes = time.process_time() - begun, path.with_name(f"{path.name}.index").stat().st_size
    read = counter("io", "rchar") - read + mapped(path) + (index_bytes if packing == "first_fit" else 0)
    after = counter("status", "RssAnon") - held
    print(f"{packing}: {len(corpus.train) // BATCH:,} batches an epoch; start: {seconds:.1f} s of one core, "
          f"{read / 1e6:.2f} MB read, {after / 1024:.0f} MiB allocated, {counter('status', 'VmHWM') / 1024:.0f} MiB "
          "at most "
          "with Python and JAX")  # fmt: skip
    for first in (0, MILLIONTH):
        rows = batches(corpus.train, batch=batch, seed=0, start_step=first, num_threads=0)
        next(rows)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(NUM_BATCHES):
            jax.block_until_ready(next(rows))
        wall, cpu = (1e3 * spent / NUM_BATCHES for spent in (time.perf_counter() - wall, time.process_time() - cpu))
        print(f"{packing}: a batch from step {first:,} on: {cpu:.2f} ms of one core, {wall:.2f} ms in all")
    print(
        f"{packing}: {(counter('status', 'RssAnon') - held) / 1024:.0f} MiB allocated after {2 * NUM_BATCHES} batches"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the tables of the requested parts."""
    parser = argparse.ArgumentParser(prog="scripts/bench ingest", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parts", default="speed,memory,start", help="parts to run: speed, memory, start, separated by commas"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the large files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=1000, help="number of standard library files to tokenize")
    parser.add_argument("--of", default="", help=argparse.SUPPRESS)  # PACKING:FILE, for `start` in a separate process
    given = parser.parse_args(argv)
    if given.of:
        packing, _, name = given.of.partition(":")
        start(Path(name), packing)
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder, parts = Path(made), given.parts.split(",")
        if "speed" in parts:
            speed(folder, given.rounds, given.texts)
        if "memory" in parts:
            memory(folder, int(given.gigabytes * 1e9))
        if "start" in parts:
            path = sparse(folder)
            for packing in ("stream", "first_fit"):
                words = [sys.executable, "-m", "scripts.benchmarks.ingest", f"--of={packing}:{path}"]
                subprocess.run(words, check=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
