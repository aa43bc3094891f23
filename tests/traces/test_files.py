"""Trace files: exact round trip, NumPy and zipfile read them, and what an interrupted or damaged one gives."""

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
import zipfile

import numpy as np
import pytest

from oled_jax.errors import UsageError
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces import archive, files
from oled_jax.traces.files import TraceWriter, open_trace
from oled_jax.traces.trace import COSINE_GAPS, Trace, TraceHeader, TracePass

L, E, K = 3, 256, 2
HEADER = TraceHeader(
    source="synthetic", model="made up", num_layers=L, num_experts=E, top_k=K, hidden_size=8, moe_intermediate_size=4,
    dtype="bfloat16", block_length=4, settings={"seed": 1, "nested": {"a": [1, None]}},
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Several chunks without making thousands of passes."""
    monkeypatch.setattr(files, "CHUNK_PASSES", 64)


def make_pass(number: int, *, cosine: bool = False, tokens: int | None = None) -> TracePass:
    """Passes differ in rows, positions, kind and requests; everything follows from the number."""
    rng = np.random.default_rng(number)
    kind = list(PassKind)[number % 4]
    B = 1 + number % 3
    N = B * (tokens or (16 if kind is PassKind.PREFILL else 4))

    def flags():
        return rng.random(N) < 0.5

    def ids(shape, limit):
        return rng.integers(0, limit, shape).astype(np.int32)

    return TracePass(
        prompts=tuple(ids(length, 100) for length in (5, 0, 7)[: number % 4]),
        new_blocks=number % 2,
        request_ids=ids(B, 9),
        block_starts=ids(B, 1000),
        info=PassInfo(
            kind=kind, token_ids=ids(N, 100), masked=flags(), token_mask=flags(),
            confidence=rng.random(N).astype(np.float32),
        ),
        expert_ids=ids((L, N, K), E),
        gates=rng.random((L, N, K)).astype(np.float32),
        outcome=IterationOutcome(
            kind=kind, token_ids=ids(N, 100), written=flags(), masked=flags(),
            confidence=rng.random(N).astype(np.float32),
        ),
        cosine=np.where(rng.random((L, COSINE_GAPS)) < 0.5, np.nan, 0.5).astype(np.float32) if cosine else None,
    )  # fmt: skip


def write(path, count: int, **options) -> list[TracePass]:
    """A finished trace of so many passes."""
    passes = [make_pass(number, **options) for number in range(count)]
    with TraceWriter(path, HEADER) as writer:
        for each in passes:
            writer.add(each)
    return passes


def flat(record) -> dict:
    """Everything in a pass, by name."""
    found = {}
    for name, value in vars(record).items():
        found |= (
            {f"{name}.{inner}": v for inner, v in flat(value).items()}
            if dataclasses.is_dataclass(value)
            else {name: value}
        )
    return found


def assert_same(got, expected) -> None:
    """Every array of every pass is the same, dtype included."""
    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        one, other = flat(one), flat(other)
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_equal(one[name], value, err_msg=name)
            if isinstance(value, np.ndarray):
                assert one[name].dtype == value.dtype, name


@pytest.mark.parametrize("cosine", [False, True])
def test_what_is_read_is_what_was_written(tmp_path, cosine):
    passes = write(tmp_path / "t.npz", 150, cosine=cosine)
    trace = open_trace(tmp_path / "t.npz")
    assert isinstance(trace, Trace)
    assert trace.header == HEADER
    assert trace.finished
    assert len(trace) == 150
    assert_same(trace, passes)
    assert_same(trace, passes)  # once more: it can be gone through again
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_numpy_and_zipfile_read_it(tmp_path):
    passes = write(tmp_path / "t.npz", 70, cosine=True)
    with zipfile.ZipFile(tmp_path / "t.npz") as plain:
        assert plain.testzip() is None
        assert json.loads(plain.read("header.json"))["version"] == 1
        assert json.loads(plain.read("end.json")) == {"passes": 70}
    columns = np.load(tmp_path / "t.npz")
    assert columns["000000/expert_ids"].dtype == np.uint8
    gates, offsets = columns["000001/gates"], columns["000001/token_offsets"]
    np.testing.assert_array_equal(gates[:, offsets[2] : offsets[3]], passes[66].gates)
    assert columns["000001/cosine"].shape == (6, L, COSINE_GAPS)


@pytest.mark.parametrize(("experts", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_expert_ids_take_the_smallest_type(tmp_path, experts, dtype):
    with TraceWriter(tmp_path / "t.npz", dataclasses.replace(HEADER, num_experts=experts)) as writer:
        ids = np.full((L, 4, K), experts - 1, np.int64)
        writer.add(dataclasses.replace(make_pass(3), expert_ids=ids))
    assert np.load(tmp_path / "t.npz")["000000/expert_ids"].dtype == dtype
    (each,) = open_trace(tmp_path / "t.npz")
    np.testing.assert_array_equal(each.expert_ids, ids)


def test_chunks_are_bounded_in_passes_and_in_bytes(tmp_path):
    write(tmp_path / "many.npz", 130)
    trace = open_trace(tmp_path / "many.npz")
    assert [np.load(tmp_path / "many.npz")[f"{n:06}/kind"].size for n in range(3)] == [64, 64, 2]
    assert len(trace.chunks) == 3
    wide = [make_pass(4, tokens=90_000) for _ in range(2)]
    assert wide[0].gates.nbytes + wide[0].expert_ids.nbytes > files.CHUNK_BYTES
    with TraceWriter(tmp_path / "wide.npz", HEADER) as writer:
        for each in wide:
            writer.add(each)
            assert writer.num_bytes == (tmp_path / "wide.npz").stat().st_size
    assert len(open_trace(tmp_path / "wide.npz").chunks) == 2


def test_a_trace_is_readable_after_every_chunk_and_replaces_the_old_one_with_its_first(tmp_path):
    path = tmp_path / "t.npz"
    old = write(path, 3)
    writer = TraceWriter(path, HEADER)
    passes = [make_pass(number) for number in range(128)]
    for number, each in enumerate(passes):
        if number == 63:
            assert_same(open_trace(path), old)
        writer.add(each)
        if number in (63, 100, 127):
            assert zipfile.is_zipfile(path)
            with pytest.warns(UserWarning, match="ends early: (64|128) passes"):
                trace = open_trace(path)
            assert not trace.finished
            assert_same(trace, passes[: len(trace)])
    writer.close()
    writer.close()
    assert_same(open_trace(path), passes)
    with pytest.raises(RuntimeError, match="closed"):
        writer.add(passes[0])


def test_a_link_is_kept(tmp_path):
    write(tmp_path / "t.npz", 1)
    (tmp_path / "link").symlink_to(tmp_path / "t.npz")
    passes = write(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink()
    assert_same(open_trace(tmp_path / "t.npz"), passes)


# Interrupted


def test_an_exception_keeps_what_there_is_and_does_not_finish(tmp_path):
    path = tmp_path / "t.npz"
    passes = [make_pass(number) for number in range(70)]
    with contextlib.suppress(KeyboardInterrupt), TraceWriter(path, HEADER) as writer:
        for each in passes:
            writer.add(each)
        raise KeyboardInterrupt
    with pytest.warns(UserWarning, match="70 passes"):
        assert_same(open_trace(path), passes)


def test_an_exception_before_the_first_pass_leaves_what_was_there(tmp_path):
    path = tmp_path / "t.npz"
    old = write(path, 2)
    with contextlib.suppress(KeyboardInterrupt), TraceWriter(path, HEADER):
        raise KeyboardInterrupt
    assert_same(open_trace(path), old)
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def flushes(tmp_path_factory):
    """A file's bytes after its second chunk, after its third, and where the third began to be written."""
    path = tmp_path_factory.mktemp("flushes") / "t.npz"
    writer = TraceWriter(path, HEADER)
    contents = []
    for chunk in range(3):
        for number in range(4):
            writer.add(make_pass(4 * chunk + number))
        writer.flush()
        contents.append(path.read_bytes())
    writer.close(finished=False)
    return *contents[1:], contents[2].find(b"000002/") - 30


def places(content: bytes) -> list[int]:
    """Where a write may have stopped: at and beside the start of every record, and inside it."""
    marks = [0, len(content)]
    for mark in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"):
        at = content.find(mark)
        while at >= 0:
            marks.append(at)
            at = content.find(mark, at + 1)
    marks.sort()
    around = {mark + shift for mark in marks for shift in (-1, 0, 1, 3, 20)}
    middles = {(one + other) // 2 for one, other in itertools.pairwise(marks)}
    return sorted(place for place in around | middles if 0 <= place <= len(content))


def open_quietly(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_trace(path)


@pytest.mark.slow
def test_a_kill_inside_a_flush_loses_that_chunk_only(tmp_path, flushes):
    before, after, start = flushes
    path = tmp_path / "t.npz"
    expected = [make_pass(number) for number in range(12)]
    lengths = set()
    stops = [place for place in places(after) if place >= start]
    assert len(stops) > 200
    for place in stops:
        path.write_bytes(after[:place] + before[place:])
        trace = open_quietly(path)
        lengths.add(len(trace))
        assert not trace.finished
        assert len(trace) >= 8
        if place % 10 == 0:
            assert_same(trace, expected[: len(trace)])
    assert lengths == {8, 12}


def test_a_file_that_was_cut_off_gives_its_whole_chunks(tmp_path, flushes):
    _, content, _ = flushes
    path = tmp_path / "t.npz"
    first_chunk = content.find(b"000000/")
    lengths = []
    for place in places(content)[::5]:
        path.write_bytes(content[:place])
        if not lengths and place < content.find(b"000001/") - 30:
            words = "no routing trace|cut off before its header" if place < first_chunk - 30 else "in its first chunk"
            with pytest.raises(UsageError, match=words):
                open_trace(path)
        else:
            trace = open_quietly(path)
            lengths.append(len(trace))
            assert_same([next(iter(trace))], [make_pass(0)])
    assert lengths == sorted(lengths)
    assert set(lengths) == {4, 8, 12}


WRITING = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_files import HEADER, TraceWriter, make_pass
with TraceWriter(Path(sys.argv[1]), HEADER) as writer:
    for number in itertools.count():
        writer.add(make_pass(number % 10))
"""


def test_a_killed_process_leaves_a_readable_trace(tmp_path):
    path = tmp_path / "t.npz"
    here = os.path.dirname(__file__)
    writing = subprocess.Popen([sys.executable, "-c", WRITING, str(path), here], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while writing.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size > 100_000:
            break
        time.sleep(0.01)
    writing.send_signal(signal.SIGKILL)
    assert writing.wait() == -signal.SIGKILL, writing.stderr.read()[-500:]
    writing.stderr.close()
    with pytest.warns(UserWarning, match="ends early"):
        trace = open_trace(path)
    assert len(trace) >= 64
    assert len(trace) % 64 == 0
    assert_same(trace, (make_pass(number % 10) for number in range(len(trace))))


# Bad input


def altered(path, **changes) -> None:
    """The same trace with another description."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members["header.json"] = json.dumps({**json.loads(members["header.json"]), **changes}).encode()
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)


def damage(path) -> None:
    """One bit of a gate of the second chunk is another."""
    with path.open("rb") as stream:
        (member,) = [each for each in archive.find_members(stream) if each.name == "000001/gates.npy"]
    content = bytearray(path.read_bytes())
    content[member.offset + 200] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "there is no trace"),
        (lambda path: path.write_bytes(b""), "is no routing trace"),
        (lambda path: path.write_text("text " * 100), "is no routing trace"),
        (lambda path: np.savez(path, a=np.ones(3)), "is no routing trace"),
        (lambda path: altered(path, format="something else"), "is no routing trace"),
        (lambda path: altered(path, version=2), "has format 2, this oled_jax reads 1"),
        (lambda path: altered(path, header={"model": "x"}), "damaged in its header"),
        (lambda path: altered(path, kinds=["prefill"]), "damaged in chunk 0"),
        (lambda path: altered(path, header=dataclasses.asdict(HEADER) | {"num_experts": 8}), "routes to expert"),
        (lambda path: altered(path, header=dataclasses.asdict(HEADER) | {"num_layers": 2}), "its routes are not"),
        (damage, "damaged in chunk 1 .*checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "cut off before its header is whole"),
        (lambda path: path.write_bytes(path.read_bytes()[:1500]), "holds no pass: it is cut off in its first chunk"),
        (lambda path: write(path, 0), "holds no pass: nothing ran"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path, spoil, words):
    path = tmp_path / "t.npz"
    write(path, 70)
    spoil(path)
    with pytest.raises(UsageError, match=words) as caught:
        list(open_trace(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_trace(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        open_trace(tmp_path)


def test_chunks_that_are_missing_from_a_finished_trace_are_missed(tmp_path):
    path = tmp_path / "t.npz"
    write(path, 70)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist() if name != "000001/written.npy"}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    with pytest.raises(UsageError, match="64 of its 70 passes"):
        open_trace(path)


@pytest.mark.parametrize(
    ("target", "words"), [(".", "is a directory"), ("none/t.npz", "there is no directory"), ("fifo", "no regular file")]
)
def test_targets_that_cannot_be_written_are_refused_at_once(tmp_path, target, words):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=words):
        files.check_trace_target(tmp_path / target)
    with pytest.raises(UsageError, match=words):
        TraceWriter(tmp_path / target, HEADER)
    files.check_trace_target(tmp_path / "t.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


@contextlib.contextmanager
def file_size_limit(num_bytes: int):
    """Writing beyond it fails as on a full disk: what still fits is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_the_users_and_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "t.npz"
    passes = [make_pass(number) for number in range(128)]
    with TraceWriter(path, HEADER) as writer:
        for each in passes[:64]:
            writer.add(each)
    size = path.stat().st_size

    def record():
        with TraceWriter(path, HEADER) as writer:
            for each in passes:
                writer.add(each)

    for room in (size, size + 1000, size + 10_000):
        with file_size_limit(room), pytest.raises(UsageError, match="cannot be written: File too large"):
            record()
        with pytest.warns(UserWarning, match="64 passes"):
            assert_same(open_trace(path), passes[:64])
    with file_size_limit(100), pytest.raises(UsageError, match="File too large"):
        TraceWriter(tmp_path / "other.npz", HEADER)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gates": np.ones((L, 4, K))}, TypeError, "gates is float64"),
        ({"gates": np.ones((L, 3, K), np.float32)}, ValueError, "gates"),
        ({"block_starts": np.zeros(2, np.int32)}, ValueError, "2 block starts"),
        ({"cosine": np.zeros((L, COSINE_GAPS), np.float32)}, ValueError, "every pass"),
        ({"outcome": dataclasses.replace(make_pass(3).outcome, kind=PassKind.COMMIT)}, ValueError, "ends as commit"),
        ({"outcome": dataclasses.replace(make_pass(3).outcome, written=np.ones(5, bool))}, ValueError, "5 values of w"),
    ],
)
def test_passes_that_contradict_themselves_are_refused(tmp_path, changes, error, words):
    writer = TraceWriter(tmp_path / "t.npz", HEADER)
    writer.add(make_pass(3))
    writer.add(dataclasses.replace(make_pass(3), **changes))
    with pytest.raises(error, match=words):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_large_archives_use_the_64_bit_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT_32", 2_000)
    monkeypatch.setattr(archive, "LIMIT_16", 9)
    contents = {f"{number:03}": bytes([number]) * 600 for number in range(12)}
    path = tmp_path / "a.zip"
    with path.open("wb", buffering=0) as stream:
        growing = archive.GrowingZip(stream)
        for name, content in contents.items():
            growing.append([archive.NewMember(name, content, archive.STORED)])
    raw = path.read_bytes()
    assert raw.count(b"PK\x06\x06") == raw.count(b"PK\x06\x07") == 1
    # What lies beyond the limit is said in 64 bits; zipfile knows a larger limit, so the 32-bit field must be ignored.
    raw = raw.replace((2_000).to_bytes(4, "little"), b"\xff\xff\xff\xff").replace(
        b"\x09\x00\x09\x00", b"\xff\xff\xff\xff"
    )
    path.write_bytes(raw)
    with zipfile.ZipFile(path) as plain:
        assert {name: plain.read(name) for name in plain.namelist()} == contents
    with path.open("rb") as stream:
        assert {each.name: archive.read_member(stream, each) for each in archive.find_members(stream)} == contents
