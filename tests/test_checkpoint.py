"""Checkpoint folders: whole or not there, checked before they are read, the oldest dropped."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rlhf_kit import checkpoint
from rlhf_kit.checkpoint import (
    MANIFEST,
    checkpoint_folder,
    drop_oldest,
    find_checkpoint,
    list_checkpoints,
    set_aside_later,
    tidy_up,
    verify,
    writing,
)

FILES = {"a.json": '{"x": 1}', "b.bin": "\x00" * 1000, "deep/c.txt": "text"}


def write(output_dir, iteration, files=FILES):
    with writing(checkpoint_folder(output_dir, iteration)) as draft:
        for name, text in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(text)
    return checkpoint_folder(output_dir, iteration)


def names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def test_what_was_written_is_there_and_verifies(tmp_path):
    # kills: files left out of the manifest, a draft left behind
    folder = write(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-3"]
    verify(folder)
    assert {name: (folder / name).read_text() for name in FILES} == FILES
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == set(FILES)


def test_listed_by_number_and_the_newest_is_found(tmp_path):
    # kills: order by name (10 before 9), other folders taken for checkpoints
    for iteration in (9, 10, 2):
        write(tmp_path, iteration)
    for other in ("checkpoint-1", "checkpoint-x", "checkpoint-12-old", "other"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-x" / MANIFEST).write_text("{}")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    assert find_checkpoint(tmp_path, True) == tmp_path / "checkpoint-10"
    assert find_checkpoint(tmp_path, str(tmp_path / "checkpoint-2")) == tmp_path / "checkpoint-2"


def test_none_found_says_what_to_do(tmp_path):
    # kills: silently starting from the beginning
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint.*save_every"):
        find_checkpoint(tmp_path, True)


def test_oldest_are_dropped_and_foreign_folders_never(tmp_path):
    # kills: the newest dropped, one too many kept, folders of other libraries deleted
    for iteration in (1, 2, 10):
        write(tmp_path, iteration)
    (tmp_path / "checkpoint-0").mkdir()
    drop_oldest(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-0", "checkpoint-10", "checkpoint-2"]


def test_later_ones_are_set_aside_not_deleted(tmp_path):
    # kills: a stale later checkpoint taken for the newest after the run went on from an earlier one
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    moved = set_aside_later(tmp_path / "checkpoint-1", 1)
    assert names(tmp_path) == ["checkpoint-1", "superseded-checkpoint-2", "superseded-checkpoint-3"]
    assert [path.name for path in moved] == ["superseded-checkpoint-2", "superseded-checkpoint-3"]
    for path in moved:
        verify(path)


def test_set_aside_whatever_the_name_of_what_is_resumed_from(tmp_path):
    # kills: the iteration read from the folder's name, the folder itself moved, an earlier one set aside
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    (tmp_path / "checkpoint-9").mkdir()  # not whole: it would stop the run when iteration 9 is saved
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "best")
    set_aside_later(tmp_path / "best", 2)
    expected = [
        "best",
        "checkpoint-1",
        "superseded-checkpoint-2",
        "superseded-checkpoint-3",
        "superseded-checkpoint-9",
    ]
    assert names(tmp_path) == expected


def test_what_was_set_aside_before_is_kept(tmp_path):
    # kills: an older set-aside checkpoint deleted, even the one that is resumed from
    for iteration in (1, 2):
        write(tmp_path, iteration)
    set_aside_later(tmp_path / "checkpoint-1", 1)
    write(tmp_path, 2)
    moved = set_aside_later(tmp_path / "superseded-checkpoint-2", 2)
    assert [path.name for path in moved] == ["superseded-checkpoint-2-2"]
    for path in (tmp_path / "superseded-checkpoint-2", *moved):
        verify(path)


def test_a_newest_that_is_not_whole_is_not_passed_over(tmp_path):
    # kills: the run silently taken back to an older checkpoint
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2', has no manifest.json.*move it away, or pass the path"):
        find_checkpoint(tmp_path, True)
    assert find_checkpoint(tmp_path, tmp_path / "checkpoint-1") == tmp_path / "checkpoint-1"


def test_a_newest_that_is_a_link(tmp_path):
    # kills: advice that leads in a circle
    write(tmp_path / "disk", 2)
    write(tmp_path / "run", 1)
    (tmp_path / "run" / "checkpoint-2").symlink_to(tmp_path / "disk" / "checkpoint-2")
    with pytest.raises(ValueError, match=r"is a link to .*move the folder itself here"):
        find_checkpoint(tmp_path / "run", True)


def test_written_again_in_place_of_the_old_one(tmp_path):
    # kills: files of both mixed, the old one left behind
    write(tmp_path, 1)
    folder = write(tmp_path, 1, {"new": "1"})
    verify(folder)
    assert names(folder) == [MANIFEST, "new"]
    assert names(tmp_path) == ["checkpoint-1"]


def test_foreign_folder_in_the_way_is_left_alone(tmp_path):
    # kills: another library's checkpoint replaced
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "model.bin").write_text("precious")
    with pytest.raises(FileExistsError, match="move it away"):
        write(tmp_path, 1)
    assert (tmp_path / "checkpoint-1" / "model.bin").read_text() == "precious"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_nothing_and_the_old_one(error, tmp_path):
    # kills: a half-written checkpoint put in place, or its draft left to fill the disk
    write(tmp_path, 1)
    with pytest.raises(type(error)) as raised, writing(tmp_path / "checkpoint-1") as draft:  # noqa: PT012
        (draft / "a.json").write_text("half")
        raise error
    if isinstance(error, OSError):  # who wrote what is not in the words of a full disk
        assert f"while writing {tmp_path}/checkpoint-1" in raised.value.__notes__[0]
    assert names(tmp_path) == ["checkpoint-1"]
    verify(tmp_path / "checkpoint-1")


# Killed at every step

STEPS = [
    (os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "mkdir"), (shutil, "rmtree"), (os, "open"),
]  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process runs afterwards."""


def kill_at(monkeypatch, number):
    """Every file operation from the `number`th on raises, those of clean-up code too."""
    count = 0

    def wrap(original):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number and original.__name__ == "rmtree":  # dies in the middle of it
                for path in sorted(Path(args[0]).rglob("*.json"))[:1]:
                    os.unlink(path)
            if count >= number:
                raise Killed
            return original(*args, **kwargs)

        return step

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: count


@pytest.mark.parametrize("again", [False, True], ids=["new", "replacing"])
def test_killed_at_any_step_a_whole_checkpoint_is_there(again, tmp_path):
    # kills: renamed before the manifest is written; the old one removed before the new one is in place; the oldest
    # deleted under its own name, so that a half-deleted one is listed
    steps = 0
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, 1)
        write(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            count = kill_at(patch, number)
            try:
                write(folder, 2 if again else 3, {"new": "1"})
                drop_oldest(folder, 1)
                steps = count()
            except Killed:
                pass
        tidy_up(folder)
        found = list_checkpoints(folder)
        assert found[-1].name in ("checkpoint-2", "checkpoint-3")
        for path in found:
            verify(path)
        assert set(names(folder)) <= {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
        write(folder, 4)
        if steps:
            break
    assert number > 10
    assert found[-1].name == ("checkpoint-2" if again else "checkpoint-3")


# Damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "flipped": (flip, "has changed"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes instead of"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named(name, damage, tmp_path):
    # kills: sizes only, digests only, the last file not looked at
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    spoil, reason = DAMAGE[damage]
    spoil(folder / name)
    with pytest.raises(ValueError, match=rf"checkpoint-2.*{name}.*{reason}.*Nothing was changed.*checkpoint-1"):
        verify(folder)


MANIFESTS = {
    "no JSON": ("{", "damaged"),
    "no object": ("[]", "damaged"),
    "no files": ('{"format": 1}', "damaged"),
    "other format": ('{"format": 2, "files": {}}', "format 2"),
    "no entry": ('{"format": 1, "files": {"a.json": {}}}', "size"),
    "no dict": ('{"format": 1, "files": {"a.json": 5}}', ""),
    "parent": ('{"format": 1, "files": {"../secret": {"size": 1, "sha256": ""}}}', "outside"),
    "absolute": ('{"format": 1, "files": {"/etc/passwd": {"size": 1, "sha256": ""}}}', "outside"),
    "empty name": ('{"format": 1, "files": {"": {"size": 1, "sha256": ""}}}', "outside"),
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifest_that_makes_no_sense(manifest, tmp_path):
    # kills: a KeyError or JSONDecodeError for the user to read; a path that leaves the folder
    folder = write(tmp_path, 1)
    text, reason = MANIFESTS[manifest]
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=rf"cannot be resumed from.*{reason}"):
        verify(folder)


def test_link_out_of_the_folder_is_refused(tmp_path):
    # kills: a link followed to a file elsewhere
    folder = write(tmp_path, 1)
    (folder / "a.json").rename(tmp_path / "elsewhere")
    (folder / "a.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"a\.json is a link to a file outside"):
        verify(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    # kills: an adapter folder or nothing at all taken for a checkpoint
    with pytest.raises(ValueError, match="no such folder"):
        verify(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="not a checkpoint of rlhf_kit"):
        verify(tmp_path)


def test_every_file_reaches_the_disk_before_the_rename(tmp_path, monkeypatch):
    # kills: no fsync, fsync after the rename, the folder itself not synced
    events = []
    real_rename, real_sync = Path.rename, checkpoint._sync_path
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("rename"), real_rename(self, to))[1])
    monkeypatch.setattr(checkpoint, "_sync_path", lambda path: (events.append(path.name), real_sync(path))[1])
    write(tmp_path, 1)
    before = events[: events.index("rename")]
    assert {"a.json", "b.bin", "c.txt", MANIFEST, ".checkpoint-1.draft"} <= set(before)
    assert tmp_path.name in events[events.index("rename") :]
