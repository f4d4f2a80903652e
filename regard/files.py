"""Files and directories that are written whole or not at all; and directories of runs that can be resumed.

Everything is written under a hidden name beside its target, `.name.<32 hex digits>.part`, synced to the disk and then
renamed. Whatever happens in between (an error, Ctrl-C, a full disk, kill -9, a power cut), the target is the old one or
the new one. The next write to the same target removes what a killed one left: a `.lock` file beside each part is
locked as long as its writer lives, so that the part of a living writer is never touched. Where the file system has no
such locks, nothing is removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

from regard.formats import read_json

if sys.platform != "win32":
    import fcntl

OPEN_LOCK = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}  # of syncing a directory
RUN = "run.json"  # which run a directory holds


# ---------------------------------------------------------------------------------------------------- files written


@contextmanager
def atomic_file(path: str | os.PathLike[str], what: str = "the file") -> Iterator[BufferedWriter]:
    """Open a file for writing that takes its place at `path` when the block ends without an exception.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(f"{folder}/a.txt") as file:
    ...         _ = file.write(b"new")
    ...     Path(folder, "a.txt").read_bytes(), os.listdir(folder)
    (b'new', ['a.txt'])

    An existing file keeps its mode, and its owner if the system allows it; a new one gets what the umask allows. A
    symbolic link stays and its target is replaced. Other hard links keep the old content. Raises OSError as
    `check_target`, and when writing fails, naming `what`; then the old file is untouched and no part is left.
    """
    target = check_target(path)
    before = target.stat() if target.exists() else None
    mode = 0o666 if before is None else before.st_mode & 0o777  # never looser than it was, not for a moment
    with _named_errors(what, path), _part_of(target.parent, target.name) as part:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if before is not None:
                _keep_permissions(part, before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        _confirm(target)


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that writing to a path would replace, links followed.

    Raises OSError for a missing folder, a folder, a read-only file, a device, a pipe or a socket, and the file that
    standard output or error goes to: these are never replaced.
    """
    cannot = f"cannot write {os.fspath(path)!r}"
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{cannot}: there is no folder {str(target.parent)!r}; make it first")
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(f"{cannot}: it is a folder; name a file")
    if not stat.S_ISREG(there.st_mode):
        raise OSError(f"{cannot}: it is a device, a pipe or a socket; name a file")
    printed = []
    for stream in (1, 2):
        with suppress(OSError):  # closed
            printed.append(os.fstat(stream))
    if any(os.path.samestat(stream, there) for stream in printed):
        raise OSError(f"{cannot}: the program's output is redirected there; name another file")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{cannot}: it is read-only; allow writing or choose another name")
    return target


def _keep_permissions(path: Path, before: os.stat_result) -> None:
    """Give a new file or directory the owner, if we may, and the mode of the one it will replace."""
    mode = stat.S_IMODE(before.st_mode)
    if hasattr(os, "chown"):
        with suppress(PermissionError):
            os.chown(path, before.st_uid, -1)
        try:
            os.chown(path, -1, before.st_gid)
        except PermissionError:  # the group's rights were given to another group
            mode &= ~0o070
    os.chmod(path, mode if stat.S_ISDIR(before.st_mode) else mode & 0o777)  # after chown, which may drop bits


# --------------------------------------------------------------------------------------------------------- directories


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], what: str, *, replaces: Callable[[Collection[str]], set[str]], last: str
) -> Iterator[Path]:
    """Make an empty directory to write into, which takes the place of the one at `path` when the block ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("old.txt", "notes.md"):
    ...         _ = Path(folder, name).write_text("before")
    ...     with atomic_directory(folder, "the text", replaces=lambda names: {"old.txt"}, last="new.txt") as part:
    ...         _ = Path(part, "new.txt").write_text("after")
    ...     sorted(os.listdir(folder))
    ['new.txt', 'notes.md']

    A directory that has something to replace is exchanged with the new one in one step, after all that is not replaced
    has been hard-linked into it (copied where the file system has no links). Linux and macOS do that; on file systems
    that cannot (NFS) and on Windows the old directory is renamed away before the new one comes, and `recover` puts it
    back if the program is killed between the two. Where nothing is replaced, the new files are moved into the
    directory, `last` at the end. Mode and owner are kept, as for files; a symbolic link to a directory stays.

    Args:
        path: made if it is not there, with its parents.
        what: what is written, for errors.
        replaces: from the names in an existing directory, those to remove; the name of a new entry always is.
        last: the entry without which the others are of no use.

    Raises:
        OSError: a file has that name, or is on the way; the directory is read-only; something is to be replaced and
            the directory is a mount point, holds the current directory or is in a folder that cannot be written to;
            or writing fails. Then what was there is untouched.
    """
    target = Path(os.path.realpath(path))
    file = next((x for x in (target, *target.parents) if x.exists()), target)
    if file.exists() and not file.is_dir():
        which = "it" if file == target else repr(str(file))
        raise NotADirectoryError(f"cannot write {what} to {os.fspath(path)!r}: {which} is a file; name a directory")
    recover(target)
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(
            f"cannot write {what} to {os.fspath(path)!r}: it is read-only; allow writing, or name another"
        )
    with _named_errors(what, path):
        target.parent.mkdir(parents=True, exist_ok=True)
        there = target.is_dir()
        inside = there and (os.path.ismount(target) or not os.access(target.parent, os.W_OK | os.X_OK))
        if there and not replaces(names := os.listdir(target)).isdisjoint(names):
            _check_exchange(target, inside)
        with _part_of(target if inside else target.parent, target.name) as part:
            part.mkdir(mode=0o700 if there else 0o777)  # until it gets the mode of the one that is there
            yield part
            _sync(part)
            _put_in_place(part, target, replaces, last)
            _confirm(target)


def _put_in_place(part: Path, target: Path, replaces: Callable[[Collection[str]], set[str]], last: str) -> None:
    if not target.exists():
        try:
            os.rename(part, target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # else another process was faster
    new = set(os.listdir(part))
    with _locked(target):  # against other writers: each sees what the one before it left
        there = set(os.listdir(target))
        old = there & (replaces(there) | new)
        if old:
            _check_exchange(target, part.parent == target)
            _exchange_carrying(part, target, old)
        else:
            _move_into(part, target, sorted(new, key=lambda name: (name == last, name)))


def _check_exchange(target: Path, inside: bool) -> None:
    """Raise OSError for a directory whose name or inode somebody depends on."""
    try:
        here = Path(os.getcwd())
    except FileNotFoundError:  # it was removed
        here = None
    why = None
    if inside:
        why = f"{str(target.parent)!r} cannot be written to, or it is a mount point"
    elif here is not None and here.is_relative_to(target):
        why = "it is or holds the current directory"
    if why is not None:
        raise OSError(
            f"cannot replace what is in {str(target)!r}: a directory is replaced as a whole, and {why}; "
            "name another directory"
        )


def _exchange_carrying(part: Path, target: Path, replaced: set[str]) -> None:
    for name in replaced & set(os.listdir(part)):
        if (part / name).is_file() and (target / name).is_file():
            _keep_permissions(part / name, (target / name).stat())
    _keep_permissions(part, target.stat())
    _carry(target, part, replaced)
    _sync(part, files=False)
    if not _exchange(part, target):
        aside = part.with_suffix(".old")
        os.rename(target, aside)  # `_clear` puts it back if the next line is not reached
        os.rename(part, target)
        os.rename(aside, part)  # under this name it is never put back
    try:
        _carry(part, target, replaced)  # what came while the first round went on
    except OSError as error:
        raise OSError(f"{str(target)!r} is written, but without what came there meanwhile: {error}") from error


def _carry(source: Path, target: Path, leave: set[str]) -> None:
    """Link what a directory holds into another that lacks it."""
    with os.scandir(source) as entries:
        for entry in entries:
            place = target / entry.name
            if entry.name in leave:
                continue
            if entry.is_dir(follow_symlinks=False):
                is_new = not place.exists()
                place.mkdir(mode=0o700, exist_ok=True)
                _carry(source / entry.name, place, set())
                if is_new:
                    _keep_permissions(place, entry.stat())
            elif not os.path.lexists(place):
                try:
                    os.link(source / entry.name, place, follow_symlinks=False)
                except OSError as error:
                    if error.errno == errno.EXDEV:  # a copy would be removed from the mount with the old directory
                        raise OSError(f"cannot carry {entry.path!r} over: it is on another file system") from None
                    shutil.copy2(source / entry.name, place, follow_symlinks=False)
                    if not place.is_symlink():
                        _keep_permissions(place, (source / entry.name).stat())
                        _sync(place)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change names in one step; False where the system cannot, or not on this file system."""
    if sys.platform == "win32":
        return False
    import ctypes  # 5 ms that `regard --help` need not take

    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):  # Linux
        return bool(libc.renameat2(-100, names[0], -100, names[1], 2) == 0)  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renamex_np"):  # macOS
        return bool(libc.renamex_np(*names, 2) == 0)  # RENAME_SWAP
    return False


def _move_into(part: Path, target: Path, names: list[str]) -> None:
    """Rename entries into a directory that has none of them, in this order; all of them or none."""
    try:
        for name in names[:-1]:
            os.rename(part / name, target / name)
        _sync_folder(target)
        os.rename(part / names[-1], target / names[-1])
        _sync_folder(target)
    except BaseException:
        for name in names:
            if not os.path.lexists(part / name):
                os.rename(target / name, part / name)
        raise


def recover(path: str | os.PathLike[str]) -> None:
    """Put a directory back that a killed `atomic_directory` renamed away; waits for a writer that still lives.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, f".model.{'0' * 32}.old").mkdir()
    ...     recover(f"{folder}/model")
    ...     os.listdir(folder)
    ['model']
    """
    with suppress(ValueError):  # of a null byte in a name that is none
        if not os.path.exists(path):
            target = Path(os.path.realpath(path))
            _sweep(target.parent, target.name, wait=True)


# ------------------------------------------------------------------------------------------------------ parts and locks


@contextmanager
def _part_of(folder: Path, name: str) -> Iterator[Path]:
    """A free path beside a target; what is there in the end is removed, as are parts of writers that were killed."""
    _sweep(folder, name)
    while True:
        part = folder / f".{_stem(name)}.{os.urandom(16).hex()}.part"
        lock = part.with_suffix(".lock")
        held = os.open(lock, OPEN_LOCK | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock(held, wait=True)
            if os.fstat(held).st_nlink == 0:  # swept in the moment before it was locked
                continue
            yield part
            return
        finally:
            _clear(part, folder / name)
            os.close(held)


def _sweep(folder: Path, name: str, *, wait: bool = False) -> None:
    """Remove what killed writers left and put a directory back that one renamed away; `wait` for a living one."""
    pattern = re.compile(rf"(\.{re.escape(_stem(name))}\.[0-9a-f]{{32}})\.(?:part|old|lock)")
    try:
        leftovers = {match[1] for entry in os.listdir(folder) if (match := pattern.fullmatch(entry))}
    except OSError:  # a missing folder, or one that may be written to but not listed
        return
    for base in leftovers:
        part = folder / f"{base}.part"
        try:
            held = os.open(part.with_suffix(".lock"), OPEN_LOCK)
        except FileNotFoundError:  # made before the part and removed after it: its writer is gone
            held = None
        except OSError:  # another user's
            continue
        try:
            locked = True if held is None else _lock(held, wait=wait and part.with_suffix(".old").exists())
            if locked:
                _clear(part, folder / name)
            elif locked is None:
                _put_back(part, folder / name)
        finally:
            if held is not None:
                os.close(held)


def _clear(part: Path, target: Path) -> None:
    """Remove what is left of a write, as far as we can: the rest is swept by the next write."""
    _put_back(part, target)
    for path in (part.with_suffix(".old"), part, part.with_suffix(".lock")):  # the lock says that there may be others
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _put_back(part: Path, target: Path) -> None:
    """Give a directory that was renamed away its name again, if nothing has taken its place."""
    aside = part.with_suffix(".old")
    if aside.exists() and not target.exists():
        os.rename(aside, target)


def _stem(name: str) -> str:
    """A target's name in the names of its parts; a digest of one that leaves no room for more letters."""
    raw = os.fsencode(name)
    if len(raw) <= 200:
        return name
    from hashlib import sha256  # 9 ms that `regard --help` need not take

    return sha256(raw).hexdigest()


def _lock(descriptor: int, *, wait: bool) -> bool | None:
    """Lock an open file until it is closed: True; False if another process has; None if there are no locks here."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock; another process may exchange it while we wait."""
    if sys.platform == "win32":
        yield
        return
    while True:
        held = os.open(directory, os.O_RDONLY)
        try:
            _lock(held, wait=True)
            if os.path.samestat(os.fstat(held), os.stat(directory)):
                yield
                return
        finally:
            os.close(held)


# ------------------------------------------------------------------------------------------------------ disk and errors


def _sync(path: Path, *, files: bool = True) -> None:
    """Wait until a file, or a directory and all in it (without `files`: its folders), is on the disk."""
    if path.is_dir():
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) or (files and entry.is_file(follow_symlinks=False)):
                    _sync(path / entry.name, files=files)
        _sync_folder(path)
    else:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Wait until the names in a directory are on the disk, where the system can say so."""
    try:
        if sys.platform != "win32":
            _fsync(path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _confirm(target: Path) -> None:
    """Sync the folder of what has just been put in place."""
    try:
        _sync_folder(target.parent)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{str(target)!r} is written, but may not survive a power cut: {why}") from error


@contextmanager
def _named_errors(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to an error of the system what could not be written where; its number, and so its class, stays."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # ours, or one whose message is complete
            raise
        why = f"cannot write {what}: {error.strerror}; what was there before is untouched"
        raise OSError(error.errno, why, os.fspath(path)) from error


# -------------------------------------------------------------------------------------------------- directories of runs


@contextmanager
def opened_run(out: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Begin a run in a directory, or take up the one that is there, and hold its lock.

    Raises FileExistsError if it holds another run or no run, NotADirectoryError if it is a file, BlockingIOError if
    another process runs there.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; name a directory for the run")
    out.mkdir(parents=True, exist_ok=True)
    held = None if sys.platform == "win32" else os.open(out, os.O_RDONLY)
    try:
        if held is not None and _lock(held, wait=False) is False:
            raise BlockingIOError(f"{str(out)!r} is in use by another process; wait for it, or name another")
        _check_run(out, identity)
        yield
    finally:
        if held is not None:
            os.close(held)


def _check_run(out: Path, identity: dict[str, Any]) -> None:
    """Write what the run is, or compare it with what is written there."""
    if not (out / RUN).is_file():
        if any(not entry.name.startswith(f".{RUN}.") for entry in out.iterdir()):  # those are of a killed write
            raise FileExistsError(f"{out} is not empty and holds no run ({RUN} is missing); name another directory")
        with atomic_file(out / RUN, "the run") as file:
            file.write(json.dumps(identity, indent=1).encode())
        return
    stored = read_json(out / RUN)
    if not isinstance(stored, dict):
        raise FileExistsError(f"{out / RUN} is damaged; name another directory")
    changed = [key for key in {**stored, **identity} if stored.get(key) != identity.get(key)]
    if changed:
        values = "; ".join(
            f"{key}: {_short(stored.get(key))} there, {_short(identity.get(key))} now" for key in changed
        )
        raise FileExistsError(
            f"{out} holds another run ({values}). Name another directory, or the same options to resume"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + " …"
