"""The folder of compiled kernels: what is loaded from it this user has written, and it is whole.

Loading a library runs its code, so whoever can put a file into the folder runs what they like as whoever
starts next. The folder, and each file in it, must therefore belong to this user or to root, and nobody else
may write to it; links on the way to it must be theirs too. (A folder that an earlier version left open to the
group is emptied, and closed to it.) These are checked on open descriptors, and the library is loaded through
the descriptor whose bytes were hashed. Other folders on the way may belong to anyone: what somebody puts in
the place of ours is theirs, and refused. Relative paths are not followed, since they lead somewhere else in
every working directory, among them folders that came out of an archive.

A library's name ends with the SHA-256 of its bytes, which tells one that was damaged on disk, and makes two
files of one name equal: whoever is last to move one into place changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600
"""Age of what a build that was killed has left; a build takes minutes."""


class FolderError(OSError):
    """The folder, or a file in it, is not to be used; the message says why."""


def cache_dir() -> Path:
    """The user's folder for what need not be made again; it may be missing.

    Raises FolderError if the user has no home, or the environment names a relative path.
    """
    variable = "HF_PAGED_CACHE_DIR"
    try:
        if named := os.environ.get(variable):
            found = Path(named).expanduser()
        elif os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):  # others count as unset, by XDG
            found = Path(base, "hf_paged_cache")
        else:
            variable = "HOME"
            found = Path.home() / ".cache" / "hf_paged_cache"
    except RuntimeError as error:
        raise FolderError(f"there is no home folder ({error})") from error
    if not found.is_absolute():
        raise FolderError(f"{variable} leads to the relative path {str(found)!r}; it must be an absolute one")
    return found


def make(path: Path) -> None:
    """Make the folder, for this user alone, unless it is there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def take_back(path: Path) -> bool:
    """Take a folder of kernels from the group that earlier versions let write to it, and empty it.

    Returns whether that was done. Nothing is done to a folder that is not this user's own, that all may write
    to, that holds anything beside kernels, or that is a link or lies where others may replace it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # which whoever opens it for use says better
    try:
        found, above = os.fstat(handle), path.parent.stat()
        is_own = found.st_uid == os.geteuid() and _may_write(found) == stat.S_IWGRP
        is_sticky = above.st_mode & stat.S_ISVTX
        is_safe = above.st_uid in (0, os.geteuid()) and (is_sticky or not above.st_mode & stat.S_IWOTH)
        of_kernels = (x.startswith("cpu-") and x.endswith((".so", _TEMPORARY)) for x in os.listdir(handle))
        if not (is_own and is_safe and all(of_kernels)):
            return False
        # From here on nobody can add to it; the bit that stays has it refused if this is interrupted.
        os.fchmod(handle, 0o700 | stat.S_IWGRP)
        for name in os.listdir(handle):
            os.unlink(name, dir_fd=handle)
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return True


class LibraryFolder:
    """The folder, open; made if it is missing. What fails raises `OSError`, of which `FolderError` is one."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # where it can't be made it can't be opened, which says more
            make(path)
        for above in (path, *path.parents):
            if above.is_symlink():
                _check_owner(above.lstat(), f"the link {above}")
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_private(os.fstat(self._handle), str(path))
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> LibraryFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def libraries(self, stem: str, problems: list[str]) -> Iterator[LibraryFile]:
        """The whole libraries whose names begin with a stem. Damaged ones are removed.

        `problems` gets a sentence for each file of such a name that is not a whole library of this user.
        """
        for name in sorted(os.listdir(self._handle)):
            if not (name.startswith(f"{stem}-") and name.endswith(".so")):
                continue
            try:
                library = LibraryFile(self.path / name, self._handle)
            except OSError as error:
                problems.append(f"{self.path / name} is not loaded: {reason_of(error)}.")
                continue
            if name == f"{stem}-{library.digest}.so":
                yield library
                continue
            library.close()
            problems.append(f"{self.path / name} is damaged, and replaced.")
            self.remove(name)

    def keep(self, stem: str, path: Path) -> LibraryFile:
        """A copy of a library for later processes, which is on disk as a whole before it gets its name."""
        content = path.read_bytes()
        name = f"{stem}-{hashlib.sha256(content).hexdigest()}.so"
        temporary = f"{stem}.{secrets.token_hex(8)}{_TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._handle)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _remove_stale(self._handle, os.fstat(descriptor).st_mtime, suffix=_TEMPORARY)
                file.write(content)
                file.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)
            os.rename(temporary, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            self.remove(temporary)
            raise
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(self._handle)
        return LibraryFile(self.path / name, self._handle)

    def remove(self, name: str) -> None:
        """Remove a file, if that can be."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._handle)


class LibraryFile:
    """A library of this user, open and hashed.

    Opening raises `OSError` if it cannot be read, is no regular file, or others may write to it. Where the
    descriptor of its folder is given it is found there, whatever its path leads to now.
    """

    def __init__(self, path: Path, folder: int | None = None) -> None:
        # Opening a pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.path = path
        try:
            self._descriptor = os.open(path if folder is None else path.name, flags, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FolderError("it is a link") from error
            raise
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise FolderError("it is no regular file")
            _check_private(found, "it")
            with open(self._descriptor, "rb", closefd=False) as file:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        except BaseException:
            self.close()
            raise

    def load(self) -> ctypes.CDLL:
        """Load exactly the bytes that were hashed; where the loader refuses them, close the file.

        The descriptor stays open: the loader knows libraries by their paths, and would take a later file that
        got the same number for this one.
        """
        path = f"/proc/self/fd/{self._descriptor}"
        if sys.platform != "linux" or not os.path.exists(path):
            path = str(self.path)  # nobody else can write where it lies
        try:
            return ctypes.CDLL(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close a file that is not loaded."""
        os.close(self._descriptor)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder to compile in, gone afterwards."""
    prefix = "hf_paged_cache-build-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as made:
        with contextlib.suppress(OSError):
            above = os.open(os.path.dirname(made), os.O_RDONLY | os.O_DIRECTORY)
            try:
                _remove_stale(above, os.stat(made).st_mtime, prefix=prefix)
            finally:
                os.close(above)
        yield Path(made)


def reason_of(error: OSError) -> str:
    """Why, without number and path."""
    return error.strerror or str(error)


def _check_owner(found: os.stat_result, name: str) -> None:
    if found.st_uid not in (0, os.geteuid()):  # root can do all that this user can
        raise FolderError(f"{name} belongs to user {found.st_uid}, not to this one")


def _check_private(found: os.stat_result, name: str) -> None:
    _check_owner(found, name)
    if _may_write(found):
        raise FolderError(f"other users may write to {name} (`chmod go-w` it if none did)")


def _may_write(found: os.stat_result) -> int:
    """Who may beside the owner: the bits of the group, and of all."""
    return found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove_stale(folder: int, now: float, *, prefix: str = "", suffix: str = "") -> None:
    """Remove what killed builds have left: entries of this user that nobody has touched for a day.

    Names begin and end as told; `now` is by the clock of that disk, which may not be this machine's.
    """
    for name in os.listdir(folder):
        if not (name.startswith(prefix) and name.endswith(suffix)):
            continue
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if found.st_uid != os.geteuid() or now - found.st_mtime < _STALE_S:
                continue
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
