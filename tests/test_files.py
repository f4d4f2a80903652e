"""The atomic writer: files and directories that are the old ones or the new ones, whatever happens."""

import errno
import os
import resource
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest

from regard import files
from regard.files import atomic_directory, atomic_file, check_target, recover


def put(path: Path, content: bytes = b"new") -> None:
    with atomic_file(path, "the test") as file:
        file.write(content)


def put_directory(path: Path, names: str = "a config", *, old: str = "a config stale") -> None:
    """Write entries that hold b"new", in place of those called `old`."""
    with atomic_directory(path, "the test", replaces=lambda there: set(old.split()), last="config") as part:
        for name in names.split():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(b"new")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def limit(size: int):
    """No file may grow beyond this many bytes: what a full disk looks like from inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_stranger(group: int | None = None):
    """Root may do everything: act as nobody."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    before = os.getegid()
    if group is not None:
        os.setegid(group)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setegid(before)


# ------------------------------------------------------------------------------------------------- what is no file


def test_pipes_sockets_and_devices_are_refused_and_stay(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with suppress(PermissionError):  # of our own, in case it is replaced after all
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, still in [
            ("pipe", stat.S_ISFIFO),
            ("link", stat.S_ISFIFO),
            ("null", stat.S_ISCHR),
            ("socket", stat.S_ISSOCK),
        ]:
            if not (tmp_path / name).exists():
                continue  # only root makes devices
            with pytest.raises(OSError, match=f"'{tmp_path}/{name}'"):
                put(tmp_path / name)
            assert still((tmp_path / name).stat().st_mode)
    assert {path.name for path in tmp_path.iterdir()} <= {"pipe", "link", "null", "socket"}


def test_folders_loops_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        put(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none'"):
        put(tmp_path / "none" / "a")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop") as caught:
        put(tmp_path / "loop")
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("name", ["/dev/stdout", "log", "/dev/stderr"])
def test_file_that_output_goes_to_is_refused(tmp_path, name):
    code = "import sys; from regard.files import check_target\ntry: check_target(sys.argv[1])\n"
    code += "except OSError as error: print(error, file=sys.stderr)\n"
    with open(tmp_path / "log", "ab") as log:
        log.write(b"kept\n")
        log.flush()
        subprocess.run([sys.executable, "-c", code, name], stdout=log, stderr=log, cwd=tmp_path, check=True)
    said = (tmp_path / "log").read_text()
    assert said.startswith("kept\n")
    assert repr(name) in said


# ---------------------------------------------------------------------------------------------------------- permissions


def test_new_file_honours_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    before = os.umask(0o027)
    try:
        put(tmp_path / "new")
        put(tmp_path / "new")
        assert mode(tmp_path / "new") == 0o640
        for other in (0o600, 0o664, 0o444 | 0o200):
            (tmp_path / "new").chmod(other)
            put(tmp_path / "new")
            assert mode(tmp_path / "new") == other
    finally:
        os.umask(before)


def test_part_is_never_readable_by_more_than_the_old_file(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    with atomic_file(path):
        (part,) = tmp_path.glob(".secret.*.part")
        assert mode(part) == 0o600


def test_owner_and_group_are_kept(tmp_path):
    path = tmp_path / "file"
    path.touch(mode=0o640)
    try:
        os.chown(path, 12345, 23456)
    except PermissionError:
        pytest.skip("only root can give a file away")
    put(path)
    now = path.stat()
    assert (now.st_uid, now.st_gid, mode(path)) == (12345, 23456, 0o640)


def test_group_that_cannot_be_kept_does_not_hand_its_rights_to_another():
    with TemporaryDirectory() as name:  # pytest's own folders are closed to others
        Path(name).chmod(0o777)
        path = Path(name, "file")
        path.touch()
        path.chmod(0o666)
        with as_stranger(group=65534):
            put(path)
        now = path.stat()
        assert (now.st_uid, mode(path)) == (65534, 0o606)
        assert path.read_bytes() == b"new"


def test_read_only_file_is_refused():
    with TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        path = Path(name, "file")
        path.write_bytes(b"old")
        path.chmod(0o444)
        with as_stranger(), pytest.raises(PermissionError):
            put(path)
        assert contents(Path(name)) == {"file": b"old"}


def test_links_stay_and_what_they_lead_to_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, target in [("old", "folder/old"), ("dangling", "folder/new")]:
        (tmp_path / name).symlink_to(target)
    (tmp_path / "folder" / "old").write_bytes(b"old")
    for name in ("old", "dangling"):
        put(tmp_path / name)
        assert (tmp_path / name).is_symlink()
    assert contents(tmp_path / "folder") == {"old": b"new", "new": b"new"}


@pytest.mark.parametrize("name", ["한" * 85, "x" * 255, ".hidden", "a b[*]?.c", "-"])
def test_any_name_that_a_file_can_have_is_written(tmp_path, name):
    put(tmp_path / name)
    put(tmp_path / name, b"again")
    assert contents(tmp_path) == {name: b"again"}


# ---------------------------------------------------------------------------------------------------- whole or absent


def test_content_that_does_not_fit_the_disk_leaves_the_old_file(tmp_path):
    put(tmp_path / "file", b"old")
    with limit(10_000), pytest.raises(OSError, match="File too large") as caught:
        put(tmp_path / "file", b"x" * 10_001)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "file"))
    assert contents(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError(), OSError(errno.ENOSPC, "No space")], ids=repr)
@pytest.mark.parametrize("before", [b"old", None])
def test_exception_in_the_block_leaves_what_was_there(tmp_path, error, before):
    def fail():
        with atomic_file(tmp_path / "file") as file:
            file.write(b"half")
            file.flush()
            raise error

    if before:
        put(tmp_path / "file", before)
    with pytest.raises(type(error)):
        fail()
    assert contents(tmp_path) == ({"file": before} if before else {})


def test_file_and_folder_are_synced_in_order(tmp_path, monkeypatch):
    calls = []

    def sync(descriptor):
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name[:2])

    real = os.replace
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), real(*paths)))
    put(tmp_path / "file")
    assert calls == ["sync .f", "replace", f"sync {tmp_path.name[:2]}"]


def test_part_of_a_private_directory_is_private(old):
    old.chmod(0o700)
    with atomic_directory(old, "the test", replaces=lambda there: {"a"}, last="config") as part:
        assert mode(part) == 0o700
        (part / "a").write_bytes(b"new")


def test_directories_are_synced_before_and_after_the_last_name(tmp_path, monkeypatch):
    (tmp_path / "model" / "data").mkdir(parents=True)
    calls = []
    real = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name[:6]))
    monkeypatch.setattr(os, "rename", lambda one, other: (calls.append(f"to {Path(other).name}"), real(one, other)))
    put_directory(tmp_path / "model")
    written = [".model", "a", "config"]
    assert sorted(calls[:3]) == written
    assert calls[3:] == ["to a", "model", "to config", "model", tmp_path.name[:6]]


def test_folder_that_cannot_be_synced_is_told_though_the_file_is_there(tmp_path, monkeypatch):
    real = os.fsync

    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="Input/output error"):
        put(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"new"}


# ------------------------------------------------------------------------------------------------------------- sweeping


def leave(folder: Path, name: str, number: str | None = None) -> list[Path]:
    """What a killed writer leaves: a lock that nobody holds, and a part."""
    base = f".{name}.{uuid4().hex if number is None else number}"
    left = [folder / f"{base}.lock", folder / f"{base}.part"]
    for path in left:
        path.write_bytes(b"half")
    return left


def test_next_write_removes_what_killed_ones_left_and_nothing_else(tmp_path):
    leave(tmp_path, "file")
    leave(tmp_path, "file")[0].unlink()  # killed while it was cleaning up
    others = leave(tmp_path, "other") + leave(tmp_path, "file", "1" * 31) + leave(tmp_path, "file", "file.part")
    others += [tmp_path / "file.part", tmp_path / ".file.part"]
    for path in others[-2:]:
        path.touch()
    put(tmp_path / "file")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "file", *others])


def test_part_of_a_living_writer_is_not_swept(tmp_path):
    path = tmp_path / "file"
    with atomic_file(path) as slow:
        slow.write(b"slow")
        put(path, b"fast")
        assert len(list(tmp_path.iterdir())) == 3
        assert path.read_bytes() == b"fast"
    assert contents(tmp_path) == {"file": b"slow"}


def test_part_of_a_living_process_is_not_swept_and_that_of_a_killed_one_is(tmp_path):
    code = "import sys; from regard.files import atomic_file\n"
    code += "with atomic_file(sys.argv[1]) as file: print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "file"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"1\n"
    left = set(tmp_path.iterdir())
    put(tmp_path / "file")
    assert set(tmp_path.iterdir()) == left | {tmp_path / "file"}
    other.kill()
    other.communicate()
    assert set(tmp_path.iterdir()) == left | {tmp_path / "file"}
    put(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"new"}


def test_part_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    real = files._lock
    locked = []

    def slow(descriptor, *, wait):
        if not locked:
            (lock,) = tmp_path.glob("*.lock")
            lock.unlink()
        locked.append(descriptor)
        return real(descriptor, wait=wait)

    monkeypatch.setattr(files, "_lock", slow)
    put(tmp_path / "file")
    assert len(locked) == 2
    assert contents(tmp_path) == {"file": b"new"}


def test_nothing_is_swept_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    left = leave(tmp_path, "file")
    monkeypatch.setattr(files, "_lock", lambda descriptor, *, wait: None)
    put(tmp_path / "file")
    assert set(tmp_path.iterdir()) == {tmp_path / "file", *left}


# ---------------------------------------------------------------------------------------------------------- directories


@pytest.fixture(params=["exchanged", "renamed"])
def way(request, monkeypatch):
    """Both ways to replace a directory: in one step, and by two renames where the system has no such step."""
    if request.param == "renamed":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    return request.param


@pytest.fixture
def old(tmp_path) -> Path:
    """A directory with something to replace, and much that is not."""
    folder = tmp_path / "model"
    (folder / ".git" / "objects").mkdir(parents=True)
    for name in ("a", "config", "stale", "notes.md", ".git/HEAD", ".git/objects/aa"):
        (folder / name).write_bytes(b"old")
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / ".git").chmod(0o750)
    (folder / "a").chmod(0o600)
    folder.chmod(0o711)
    return folder


KEPT = {"notes.md": b"old", ".git/HEAD": b"old", ".git/objects/aa": b"old"}


def test_directory_is_replaced_and_what_is_not_ours_is_carried_over(old, way):
    inode = (old / "notes.md").stat().st_ino
    put_directory(old, "a b config sub/c")
    assert contents(old) == KEPT | dict.fromkeys(["a", "b", "config", "sub/c"], b"new")
    assert (old / "notes.md").stat().st_ino == inode  # a program that has it open goes on writing to it
    assert os.readlink(old / "link") == "nowhere"
    assert stat.S_ISFIFO((old / "pipe").stat().st_mode)
    assert (mode(old), mode(old / ".git"), mode(old / "a")) == (0o711, 0o750, 0o600)
    assert [path.name for path in old.parent.iterdir()] == ["model"]


def test_files_are_copied_where_there_are_no_hard_links(old, way, monkeypatch):
    (old / "pipe").unlink()

    def link(*paths, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    (old / "notes.md").chmod(0o600)
    put_directory(old)
    assert contents(old) == KEPT | dict.fromkeys(["a", "config"], b"new")
    assert mode(old / "notes.md") == 0o600
    assert os.readlink(old / "link") == "nowhere"


def test_file_that_comes_while_the_directory_is_replaced_is_carried_over(old, way, monkeypatch):
    real = files._exchange

    def late(one, other):
        (other / "late.log").write_bytes(b"late")
        return real(one, other)

    monkeypatch.setattr(files, "_exchange", late)
    put_directory(old)
    assert (old / "late.log").read_bytes() == b"late"


def test_mount_inside_is_refused_rather_than_emptied(old, monkeypatch):
    def link(*paths, **options):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    before = contents(old)
    with pytest.raises(OSError, match="file system"):
        put_directory(old)
    assert contents(old) == before


def test_directory_is_made_with_the_folders_on_the_way(tmp_path):
    put_directory(tmp_path / "new" / "model")
    assert contents(tmp_path) == {"new/model/a": b"new", "new/model/config": b"new"}


def test_directory_without_anything_to_replace_is_written_into(tmp_path, monkeypatch):
    (tmp_path / "notes").write_bytes(b"old")
    inode = tmp_path.stat().st_ino
    monkeypatch.chdir(tmp_path)
    moved = []
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda one, other: (moved.append(Path(other).name), real(one, other)))
    put_directory(Path("."), "config z a")
    assert moved == ["a", "z", "config"]
    assert tmp_path.stat().st_ino == inode
    assert contents(tmp_path) == {"notes": b"old", "a": b"new", "config": b"new", "z": b"new"}


def test_new_names_replace_old_ones_though_nothing_else_is_to_go(tmp_path, way):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").write_bytes(b"old")
    put_directory(tmp_path, old="")
    assert contents(tmp_path) == {"a": b"new", "b": b"old", "config": b"new"}


def test_link_to_a_directory_stays(old, way, tmp_path):
    (tmp_path / "link").symlink_to("model")
    put_directory(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert contents(old) == KEPT | dict.fromkeys(["a", "config"], b"new")


def test_current_directory_is_not_replaced(old, monkeypatch):
    before = contents(old)
    for place in (old, old / ".git"):
        monkeypatch.chdir(place)
        with pytest.raises(OSError, match="current directory"):
            put_directory(old)
    assert contents(old) == before
    assert os.listdir(old.parent) == ["model"]


def test_mount_point_is_not_replaced_but_can_be_written_into(old, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    before = contents(old)
    with pytest.raises(OSError, match="mount point"):
        put_directory(old)
    assert contents(old) == before
    with pytest.raises(OSError, match="mount point"):
        put_directory(old, old="")
    assert contents(old) == before
    put_directory(old, "new config2", old="")
    assert contents(old) == before | {"new": b"new", "config2": b"new"}


def test_folder_that_cannot_be_written_to_is_named():
    with TemporaryDirectory() as name:
        target = Path(name, "model")
        target.mkdir()
        (target / "config").write_bytes(b"old")
        Path(name).chmod(0o555)
        target.chmod(0o777)
        with as_stranger():
            with pytest.raises(OSError, match=f"'{name}'"):
                put_directory(target)
            with pytest.raises(PermissionError, match="Permission denied"):
                put_directory(Path(name, "other"))
        assert contents(Path(name)) == {"model/config": b"old"}


def test_read_only_directory_is_refused():
    with TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        target = Path(name, "model")
        target.mkdir()
        (target / "config").write_bytes(b"old")
        target.chmod(0o555)
        with as_stranger(), pytest.raises(PermissionError, match=f"'{target}'"):
            put_directory(target)
        assert contents(Path(name)) == {"model/config": b"old"}


def test_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="file"):
            put_directory(path)
    assert contents(tmp_path) == {"file": b"mine"}


def test_directory_that_does_not_fit_the_disk_leaves_the_old_one(old):
    before = contents(old)
    with (
        limit(1000),
        pytest.raises(OSError, match="File too large") as caught,
        atomic_directory(old, "the test", replaces=lambda there: {"a"}, last="config") as part,
    ):
        (part / "a").write_bytes(b"x" * 1001)
    assert caught.value.errno == errno.EFBIG
    assert contents(old) == before
    assert os.listdir(old.parent) == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.parametrize("there", ["model", "other files", "nothing"])
def test_exception_at_any_step_leaves_the_old_directory_or_the_new_one(tmp_path, monkeypatch, way, there, error):
    """Raise before the first change of a name or of the disk, before the second, and so on, until a write succeeds."""
    names = {"model": ("a", "config", "stale", "n/otes"), "other files": ("notes",), "nothing": ()}[there]
    folder = tmp_path / "model"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"old")
    before = contents(tmp_path)
    kept = {name: content for name, content in before.items() if name.endswith("otes")}
    after = kept | {"model/a": b"new", "model/config": b"new"}
    for step in range(100):
        left = step

        def failing(real):
            def call(*given, **options):
                nonlocal left
                left -= 1
                if left == -1:
                    raise error
                return real(*given, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "link", "fsync", "mkdir", "chmod", "chown"):
                patch.setattr(os, name, failing(getattr(os, name)))
            if way == "exchanged":
                patch.setattr(files, "_exchange", failing(files._exchange))
            try:
                put_directory(folder)
            except (KeyboardInterrupt, OSError):
                assert left < 0
        if left >= 0:
            break
        if (now := contents(tmp_path)) != before:
            assert now == after
            before = after  # the step was after the new directory had come
    assert step > 5
    assert contents(tmp_path) == after


# ------------------------------------------------------------------------------------------------------------- recovery


def test_directory_that_a_killed_writer_renamed_away_comes_back(tmp_path):
    target, aside = tmp_path / "model", tmp_path / f".model.{'a' * 32}.old"
    aside.mkdir()
    (aside / "config").write_bytes(b"old")
    _, part = leave(tmp_path, "model", "a" * 32)
    part.unlink()
    part.mkdir()
    (tmp_path / "link").symlink_to("model")
    recover(tmp_path / "link")
    assert contents(target) == {"config": b"old"}
    assert sorted(os.listdir(tmp_path)) == ["link", "model"]


def test_directory_that_is_there_wins_over_what_was_renamed_away(old, tmp_path):
    (tmp_path / f".model.{'a' * 32}.old").mkdir()
    before = contents(old)
    recover(old)
    assert contents(old) == before
    put_directory(old)
    assert os.listdir(tmp_path) == ["model"]


def test_reader_waits_for_a_writer_between_its_two_renames(tmp_path, monkeypatch):
    """In another process the lock is taken, and given up when the new directory is in place."""
    base = tmp_path / f".model.{'a' * 32}"
    Path(f"{base}.old").mkdir()
    Path(f"{base}.part").mkdir()
    code = (
        "import fcntl, os, sys, time; base = sys.argv[1]; file = open(base + '.lock', 'w'); fcntl.flock(file, 2)\n"
        "print(1, flush=True); input(); time.sleep(0.2); os.rename(base + '.part', sys.argv[2])"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, base, tmp_path / "model"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"1\n"
    inode = Path(f"{base}.part").stat().st_ino
    writer.stdin.write(b"\n")
    writer.stdin.flush()
    recover(tmp_path / "model")
    writer.communicate()
    assert (tmp_path / "model").stat().st_ino == inode
    assert os.listdir(tmp_path) == ["model"]


def test_names_that_are_none_are_left_to_the_reader():
    for name in ("a\0b", "x" * 5000, "", "no/such/folder"):
        recover(name)


def test_processes_that_write_the_same_directory_at_once_all_succeed(tmp_path):
    """As all ranks of a distributed run do by mistake."""
    code = """
import sys
from pathlib import Path
from regard.files import atomic_directory
for _ in range(30):
    with atomic_directory(sys.argv[1], "it", replaces=lambda names: {"a", "config"}, last="config") as part:
        for name in ("a", "config"):
            (part / name).write_text(sys.argv[2])
"""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").write_bytes(b"old")
    command = [sys.executable, "-c", code, tmp_path / "model"]
    ranks = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE) for n in range(3)]
    for rank in ranks:
        assert rank.communicate()[1] == b""
    now = contents(tmp_path)
    assert now.keys() == {"model/a", "model/config", "model/notes"}
    assert now["model/a"] == now["model/config"]


def test_check_target_gives_the_file_behind_a_link(tmp_path):
    (tmp_path / "link").symlink_to("file")
    assert check_target(tmp_path / "link") == tmp_path / "file"
