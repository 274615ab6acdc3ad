"""The disk tier over restarts, and against files that are not what they seem."""

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvpool.disk import BlockFiles, DiskTier, disk_tier
from tests.kvpool.test_tier import BLOCK, FILE, FINGERPRINT, data, digest, fill, make_disk, read


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def stored(folder: Path, *numbers: int) -> None:
    tier = make_disk(folder, 100)
    fill(tier, *numbers)
    tier.close()


def test_blocks_are_found_after_a_restart_the_least_recently_used_first(tmp_path: Path) -> None:
    stored(tmp_path, 1, 2, 3)
    for age, path in enumerate(files_of(tmp_path)):
        os.utime(path, (1000 + age, 1000 + age))
    tier = make_disk(tmp_path, 3)
    assert read(tier, 1) == [data(1)]
    tier.close()
    tier = make_disk(tmp_path, 3)
    fill(tier, 4)
    assert [tier.holds(digest(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]
    tier.close()
    assert [path.stem for path in files_of(tmp_path)] == [digest(n).hex() for n in (1, 3, 4)]


def test_a_smaller_size_after_a_restart_is_kept(tmp_path: Path) -> None:
    stored(tmp_path, *range(10))
    make_disk(tmp_path, 4).close()
    assert len(files_of(tmp_path)) == 4


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-1], "has 207 bytes"),
        (lambda content: b"", "has 0 bytes"),
        (lambda content: content[:-1] + b"x", "checksum"),
        (lambda content: content[:150] + bytes([content[150] ^ 1]) + content[151:], "checksum"),
        (lambda content: b"GGUF" + content[4:], "no KV block file"),
        (lambda content: content[:12] + bytes(32) + content[44:], "another model or layout"),
        (lambda content: content[:44] + bytes(32) + content[76:], "another block"),
    ],
)
def test_a_damaged_file_is_reported_ignored_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: "object", why: str
) -> None:
    stored(tmp_path, 1, 2, 3)
    second = files_of(tmp_path)[1]
    second.write_bytes(damage(second.read_bytes()))  # type: ignore[operator]
    tier = make_disk(tmp_path, 100)
    with caplog.at_level(logging.WARNING):
        assert read(tier, 1, 2, 3) == [data(1)]
    assert why in caplog.text
    assert not tier.holds(digest(2))
    assert not second.exists()
    assert tier.wants(digest(2))
    fill(tier, 2)
    assert read(tier, 1, 2, 3) == [data(1), data(2), data(3)]
    assert tier.stats()[0].num_failed == 1
    tier.close()


def test_another_block_under_this_name_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 1, 2)
    one, two = files_of(tmp_path)
    two.write_bytes(one.read_bytes())
    tier = make_disk(tmp_path, 100)
    assert read(tier, 1, 2) == [data(1)]
    assert "another block" in caplog.text
    tier.close()


def test_blocks_of_another_model_are_reported_and_never_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        other = disk_tier(tmp_path, bytes(32), BLOCK, 100 * FILE)
    assert f"holds {FILE} bytes of other models" in caplog.text
    assert not other.holds(digest(1))
    other.close()


def test_a_folder_of_other_files_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        (tmp_path / f"photo{number}.jpg").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        make_disk(tmp_path, 100).close()
    [warning] = caplog.messages
    assert f"{tmp_path} holds 8 files that are no KV blocks: photo0.jpg, photo1.jpg" in warning
    assert warning.endswith("photo4.jpg, ...")
    assert len(list(tmp_path.glob("*.jpg"))) == 8, "they are left alone"


def test_foreign_and_unfinished_files_do_not_matter(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    for name in ("notes.txt", "abc.kv", "zz" * 32 + ".kv"):
        (folder / name).write_text("hello")
    unfinished = folder / f"{digest(2).hex()}.99.tmp"
    unfinished.write_bytes(b"half")
    tier = make_disk(tmp_path, 100)
    assert [tier.holds(digest(n)) for n in (1, 2)] == [True, False]
    assert not unfinished.exists()
    assert (folder / "notes.txt").exists()
    tier.close()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    stored(tmp_path, 1, 2)
    tier = make_disk(tmp_path, 100)
    files_of(tmp_path)[1].unlink()
    assert read(tier, 1, 2) == [data(1)]
    assert not tier.holds(digest(2))
    tier.close()


def test_what_cannot_be_written_is_reported_and_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_disk(tmp_path, 100)
    [folder] = list(tmp_path.iterdir())
    folder.rmdir()
    fill(tier, 1)
    tier.close()
    assert "cannot be written" in caplog.text
    assert not tier.holds(digest(1))
    assert tier.stats()[0].num_failed == 1


def test_a_block_can_be_fetched_while_it_is_still_being_written(tmp_path: Path) -> None:
    tier = make_disk(tmp_path, 100)
    gate: Future[None] = Future()
    tier._writer.submit(gate.result)  # type: ignore[attr-defined]
    fill(tier, 1)
    assert read(tier, 1) == [data(1)]
    gate.set_result(None)
    tier.close()
    assert len(files_of(tmp_path)) == 1


def test_a_disk_that_is_behind_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.disk.MAX_BACKLOG_BYTES", 2 * BLOCK)
    tier = make_disk(tmp_path, 100)
    gate: Future[None] = Future()
    tier._writer.submit(gate.result)  # type: ignore[attr-defined]
    fill(tier, 1, 2, 3)
    assert not tier.is_accepting
    assert [tier.holds(digest(n)) for n in (1, 2, 3)] == [True, True, False]
    gate.set_result(None)
    tier.close()


KILLED = """
import sys
from pathlib import Path
from kvpool.disk import disk_tier
tier = disk_tier(Path(sys.argv[1]), bytes(range(32)), 100, 1 << 30)
number = 0
while True:
    tier.store(number.to_bytes(32, "big"), number.to_bytes(4, "big") * 25)
    number += 1
    if number == 300:
        print("busy", flush=True)
"""


def test_a_killed_writer_leaves_whole_blocks_only(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"busy\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    tier = make_disk(tmp_path, 10**6)
    numbers = [int(path.stem, 16) for path in files_of(tmp_path)]
    assert numbers == list(range(len(numbers)))
    assert read(tier, *numbers) == [data(number) for number in numbers]
    tier.close()


def test_a_folder_that_cannot_be_used_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskTier(BlockFiles(tmp_path / "file" / "folder", FINGERPRINT, BLOCK), 1000)
