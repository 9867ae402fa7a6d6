"""Documents of a bucket: the same tokens and lines as from a disk, little in memory, and one line where it refuses."""

import gzip
import json
import random

import pyarrow
import pyarrow.parquet
import pytest

from meshtrain.data import text
from meshtrain.data.chat import read_lines
from meshtrain.data.corpus import open_corpus
from meshtrain.data.prepare import main, prepare
from meshtrain.data.sources import DataOptions, DataRequest, check
from meshtrain.errors import Problems, UserError
from meshtrain.store import buckets

DOCUMENTS = [f"document {number} ☃ " * (number % 9 + 1) for number in range(300)]


@pytest.fixture(scope="module")
def places(bucket_server, tmp_path_factory):
    """The same files on a disk and below a prefix of a bucket."""
    folder, prefix = tmp_path_factory.mktemp("disk") / "deep", bucket_server.prefix()
    folder.mkdir()
    rows = [{"text": one, "prompt": "a", "completion": one} for one in DOCUMENTS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:150]), folder / "a.parquet", row_group_size=40)
    lines = "".join(json.dumps(row) + "\n" for row in rows[150:]).encode()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.txt").write_text("one document\nof two lines")
    (folder / "empty.txt").touch()
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(random.Random(0).randbytes(9000))[:-20])
    (folder / "ids.bin").write_bytes(bytes(range(9)))
    client = buckets.place(prefix) and buckets._client()
    for path in folder.iterdir():
        client.pipe_file(f"{prefix}/deep/{path.name}", path.read_bytes())
    return folder, f"{prefix}/deep"


@pytest.mark.parametrize("glob", ["a.*", "b.jsonl.gz", "[abc].*"])
def test_a_bucket_gives_the_tokens_of_a_disk(places, tmp_path, glob):
    folder, prefix = places
    for name, place in (("disk", folder), ("bucket", prefix)):
        prepare(f"{place}/{glob}", str(tmp_path / f"{name}.bin"))
    assert (tmp_path / "bucket.bin").read_bytes() == (tmp_path / "disk.bin").read_bytes()
    corpora = [open_corpus(DataOptions(source="text", path=f"{place}/{glob}"), DataRequest({}, {}, 8, 257, 0))
               for place in places]  # fmt: skip
    assert corpora[0].fingerprint == corpora[1].fingerprint


def test_globs_list_what_those_of_a_disk_do(places):
    folder, prefix = places
    for glob in ("deep/*", "deep/*.txt", "deep/[ab].*", "deep/?.txt", "**/*.txt"):
        on_disk, wrong = text.find_files(f"{folder.parent}/{glob}")
        found, lines = text.find_files(f"{prefix.removesuffix('/deep')}/{glob}")
        assert [(path.name, size) for path, size in found.items()] == [(one.name, n) for one, n in on_disk.items()]
        assert (lines, wrong) == ([], [])
        assert all(str(path).startswith(f"{prefix}/") for path in found)


def test_chat_has_the_lines_of_a_disk(places):
    folder, prefix = places
    for name in ("a.parquet", "b.jsonl.gz"):
        problems = Problems()
        [there] = text.find_files(f"{prefix}/{name}")[0]
        assert [one.pair for one in read_lines(there, problems)] == [
            one.pair for one in read_lines(folder / name, problems)
        ]
        assert not problems.count
        assert not check(DataOptions(source="chat", path=f"{prefix}/{name}"))


def test_a_folder_of_shards_is_prepared_and_goes_on(places, tmp_path, capsys):
    folder, prefix = places
    for place in (folder, prefix, prefix):
        prepare(f"{place}/[ab].*", f"{tmp_path / ('disk' if place is folder else 'bucket')}/")
    assert "2 of 2 files are complete" in capsys.readouterr().out
    for name in ("a.parquet.bin", "b.jsonl.gz.bin"):
        assert (tmp_path / "bucket" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of the upload
def test_an_object_is_read_in_pieces(bucket, monkeypatch):
    buckets.place(bucket)
    row = json.dumps({"text": random.Random(0).randbytes(50_000).hex()}).encode() + b"\n"
    buckets._client().pipe_file(f"{bucket}/a.jsonl", row * 300)
    got_bytes, call = [], buckets._client()._call

    async def counted(*given, **named):
        answer = await call(*given, **named)
        got_bytes.append(len(answer[1]) if isinstance(answer, tuple) else 0)
        return answer

    monkeypatch.setattr(buckets._client(), "_call", counted)
    [path] = text.find_files(f"{bucket}/*.jsonl")[0]
    problems = Problems()
    read = text.read_documents(path, "text", problems)
    next(read)
    assert 0 < sum(got_bytes) < 12_000_000
    assert sum(1 for _ in read) == 299
    assert sum(got_bytes) >= 30_000_000


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://missing/a.jsonl", "gs://missing/a.jsonl: got no bucket with this name; .* create gs://missing$"),
        ("gs://missing", "gs://missing: got no bucket with this name; .* create gs://missing$"),
        ("gs://private/*.txt", r"gs://private/\*.txt: got no credentials \(.*list and read; nearest: gcloud auth "),
        ("DIR/b.jsonl.gzip", "got '.*', which matches no object; allowed: .*; did you mean 'b.jsonl.gz'"),
        ("DIR", "got '.*/deep', which matches no object; .*; nearest: '.*/deep/[*]'$"),
        ("DIR/zz*", "which matches no object; .*; nearest: '.*/deep/[*]'$"),
        ("DIR/empty.txt", r"which matches only empty objects \(1\); "),
        ("DIR/cut.jsonl.gz", "'gs://.*/cut.jsonl.gz' cannot be read .*; allowed: complete files"),
        ("DIR/ids.bin", "got 'gs://.*/ids.bin', which has zero bytes, so it is not text"),
        ("s3://runs/a.txt", "got 's3://runs/a.txt', a URL; .*nearest: s3fs"),
    ],
)
def test_what_cannot_be_read_is_one_line(places, tmp_path, url, said, caplog, capfd):
    url = url.replace("DIR", places[1])
    with pytest.raises(UserError, match=f"^--path: {'.*' * (said[:2] != 'gs')}{said}") as caught:
        main([f"--path={url}", f"--output={tmp_path}/out.bin"])
    assert len(caught.value.problems) == 1
    assert not [*tmp_path.iterdir()]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    lines = check(DataOptions(source="text", path=f"{places[1]}/c.txt", validation_path=f"a={url}"))
    assert all(line.startswith("data.validation_path: ") for line in lines)
    assert len(lines) == ("cut" not in url)  # which is seen when it is read


def test_an_object_that_may_not_be_read_is_one_line(places, monkeypatch):
    [path] = text.find_files(f"{places[1]}/c.txt")[0]

    async def refused(*_, **__):
        raise buckets.import_modules("gcsfs.retry")[0].HttpError({"message": "Forbidden", "code": 403})

    monkeypatch.setattr(buckets._client(), "_call", refused)
    problems = Problems()
    assert not [*text.read_documents(path, "text", problems)]
    [line] = problems.lines()
    assert line.startswith(f"data.path: {path}: got no permission (Forbidden")
    assert line.endswith("list and read; nearest: grant the role storage.objectViewer on the bucket")
