"""Checkpoint folders: written whole or not at all, checked before anything is read from them, the oldest dropped.

What they hold is not known here (see `rlhf_kit.training_state`). A folder is written under a hidden draft name, with a
manifest of sizes and digests, synced to disk, and only then renamed: a kill at any moment leaves the previous
checkpoint as it was. A folder without a manifest, such as another library's, is never listed, replaced or deleted.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
NAME = re.compile(r"checkpoint-(\d+)")
DRAFT, OLD, DOOMED = ".draft", ".old", ".doomed"  # endings of hidden folders that a kill may leave behind


def checkpoint_folder(output_dir: Path, iteration: int) -> Path:
    """Where the checkpoint after `iteration` iterations belongs."""
    return output_dir / f"checkpoint-{iteration}"


def checkpoint_iteration(folder: Path) -> int:
    """The number in a checkpoint's name, -1 if it has another name."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [path for path in _numbered(output_dir) if (path / MANIFEST).is_file()]


def _numbered(output_dir: Path) -> list[Path]:
    """Everything that is called checkpoint-<number>, in order."""
    found = [path for path in output_dir.glob("checkpoint-*") if checkpoint_iteration(path) >= 0]
    return sorted(found, key=checkpoint_iteration)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A draft folder to write into; it becomes `folder` at the end of the block, or vanishes if the block raises.

    Raises:
        FileExistsError: `folder` exists and is no checkpoint.
        Exception: whatever the block raises, with a note that names the folder.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} exists and is not a checkpoint of rlhf_kit: move it away.")
    draft = _hidden(folder, DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        _write_manifest(draft)
        _sync(draft)
        _put_in_place(draft, folder)
    except Exception as error:
        error.add_note(f"while writing {folder}; checkpoints written before are as they were, to be resumed from.")
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def tidy_up(output_dir: Path) -> None:
    """Remove what a kill left behind; put a checkpoint back that was just being replaced."""
    for old in output_dir.glob(f".checkpoint-*{OLD}"):
        folder = output_dir / old.name.removeprefix(".").removesuffix(OLD)
        if not folder.exists():
            old.rename(folder)
    for ending in (DRAFT, OLD, DOOMED):
        for leftover in output_dir.glob(f".checkpoint-*{ending}"):
            shutil.rmtree(leftover, ignore_errors=True)


def drop_oldest(output_dir: Path, limit: int) -> None:
    """Keep the newest `limit` checkpoints. One that is being deleted is never seen half deleted."""
    for folder in list_checkpoints(output_dir)[:-limit]:
        doomed = _hidden(folder, DOOMED)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def set_aside_later(folder: Path, iteration: int) -> list[Path]:
    """Rename the other checkpoints of `iteration` and later, whole or not: the run goes on from `folder`.

    Args:
        folder: what is resumed from, whatever its name; its neighbours are looked at.
        iteration: iterations done in it.

    Returns:
        Their new places; nothing is deleted.
    """
    moved = []
    for other in _numbered(folder.parent):
        if checkpoint_iteration(other) >= iteration and other.resolve() != folder.resolve():
            moved.append(other.rename(_free_place(other.with_name(f"superseded-{other.name}"))))
    return moved


def _free_place(path: Path) -> Path:
    places = (path.with_name(f"{path.name}-{i}") for i in count(2))
    return path if not path.exists() else next(place for place in places if not place.exists())


def find_checkpoint(output_dir: Path, checkpoint: str | Path | bool) -> Path:
    """The folder that True or "last" (the newest in `output_dir`) or a path means.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the newest is not whole, or only linked from here.
    """
    if checkpoint not in (True, "last"):
        return Path(str(checkpoint))
    for newest in _numbered(output_dir)[-1:]:
        if newest.is_symlink():
            raise ValueError(
                f"{str(newest)!r} is a link to {str(newest.resolve())!r}: move the folder itself here, or pass its "
                "path to a run with another output_dir. Nothing was changed."
            )
        if not (newest / MANIFEST).is_file():
            raise ValueError(
                f"the newest checkpoint, {str(newest)!r}, has no {MANIFEST}, so it is not a whole one: move it away, "
                "or pass the path of an older one, and it will be set aside. Nothing was changed."
            )
    found = list_checkpoints(output_dir)
    if not found:
        raise FileNotFoundError(
            f"resume_from_checkpoint={checkpoint!r}, but {str(output_dir)!r} holds no checkpoint: start without it, "
            "or pass the path of one. Checkpoints are written every save_every iterations."
        )
    return found[-1]


def verify(folder: Path) -> None:
    """Raise `ValueError` unless the folder is a checkpoint of which every byte is as it was written."""
    try:
        for name, entry in _read_manifest(folder).items():
            _verify_file(folder, name, entry["size"], entry["sha256"])
    except (ValueError, OSError, KeyError, TypeError) as error:
        near = [*list_checkpoints(folder), *list_checkpoints(folder.parent)]  # a run's folder may have been meant
        others = [str(path) for path in near if path != folder]
        hint = f" Others here: {others}." if others else ""
        raise ValueError(f"{str(folder)!r} cannot be resumed from: {error} Nothing was changed.{hint}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError("there is no such folder.")
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"it has no {MANIFEST}, so it is not a checkpoint of rlhf_kit, or not a whole one.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__}).") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version!r}, this version of rlhf_kit reads format {FORMAT_VERSION}.")
    return files


def _verify_file(folder: Path, name: str, size: int, digest: str) -> None:
    relative = PurePosixPath(name)
    path = folder / relative
    if not relative.parts or relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{MANIFEST} names {name!r}, which lies outside the folder.")
    if not path.is_file():
        raise ValueError(f"{name} is missing.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is a link to a file outside the folder.")
    if path.stat().st_size != size:
        raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}.")
    if _sha256(path) != digest:
        raise ValueError(f"{name} has changed since it was written.")


def _write_manifest(draft: Path) -> None:
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    entries = {
        path.relative_to(draft).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    manifest = {"format": FORMAT_VERSION, "files": entries}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _put_in_place(draft: Path, folder: Path) -> None:
    old = _hidden(folder, OLD)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    _sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _hidden(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}{ending}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
