"""What is loaded from the folder of compiled kernels: only what this user wrote, and only if it is whole."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache.kernels import cpp, dispatch
from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.kernels.cpp import build, library_folder
from tests.kernels.cases import CASES
from tests.kernels.cases import build as build_problem

pytestmark = [
    pytest.mark.skipif(cpp.unavailable_reason() is not None, reason=str(cpp.unavailable_reason())),
    pytest.mark.usefixtures("tiny_source", "fresh", "temporary"),
]

SOMEBODY = 12345
PLANTED = """
#include <fstream>
__attribute__((constructor)) static void run() {{ std::ofstream("{marker}") << "it ran"; }}
extern "C" int answer() {{ return 13; }}
"""


@dataclass(frozen=True)
class Intruder:
    """Somebody who leaves a library where ours would be.

    Attributes:
        library: Its bytes.
        marker: A file that it makes when it is loaded.
        stem: What the name of ours begins with.
        own: The inodes that are this user's no longer.
    """

    library: bytes
    marker: Path
    stem: str
    own: set[int]

    def plant(self, folder: Path) -> Path:
        """As a whole library, under the name that is looked for."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.stem}-{hashlib.sha256(self.library).hexdigest()}.so"
        path.write_bytes(self.library)
        path.chmod(0o644)
        return path

    def take(self, *paths: Path) -> None:
        """Become the owner; where these tests may not give files away, look like it."""
        for path in paths:
            if os.geteuid() == 0:
                os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
            else:
                self.own.add(path.lstat().st_ino)


@pytest.fixture
def intruder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Intruder:
    marker, library = tmp_path / "marker", tmp_path / "planted.so"
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED.format(marker=marker))
    compiler, version = build.find_compiler()
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    flags = build._candidate_flags("portable", build._cpu_flags(), is_clang="clang" in version)[0]
    stem = f"cpu-portable-{build._digest([*compiler, *build._COMMON_FLAGS, *flags], version)}"
    own: set[int] = set()
    check = library_folder._check_owner

    def check_owner(found: os.stat_result, name: str) -> None:
        if found.st_ino in own:
            raise library_folder.FolderError(f"{name} belongs to user {SOMEBODY}, not to this one")
        check(found, name)

    monkeypatch.setattr(library_folder, "_check_owner", check_owner)
    return Intruder(library.read_bytes(), marker, stem, own)


def test_a_planted_library_of_this_user_would_run(intruder: Intruder, fresh: Path) -> None:
    """Otherwise the tests below would see nothing."""
    intruder.plant(fresh)
    assert build.load().handle.answer() == 13
    assert intruder.marker.exists()


def folder_of_another(intruder: Intruder, folder: Path) -> None:
    intruder.take(intruder.plant(folder), folder)


def folder_of_another_where_ours_was(intruder: Intruder, folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert build.load().handle.answer() == 42
    folder.rename(folder.with_name("elsewhere"))
    intruder.take(intruder.plant(folder), folder)


def folder_for_everyone(intruder: Intruder, folder: Path) -> None:
    folder.chmod(0o1777)
    intruder.take(intruder.plant(folder))


def file_of_another(intruder: Intruder, folder: Path) -> None:
    intruder.take(intruder.plant(folder))


def file_for_everyone(intruder: Intruder, folder: Path) -> None:
    intruder.plant(folder).chmod(0o666)


def link_to_a_file(intruder: Intruder, folder: Path) -> None:
    planted = intruder.plant(folder.parent / "download")
    (folder / planted.name).symlink_to(planted)


def link_of_another(intruder: Intruder, folder: Path) -> None:
    intruder.plant(folder.parent / "download")
    folder.rmdir()
    folder.symlink_to(folder.parent / "download")
    intruder.take(folder)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (folder_of_another, "kernels belongs to user 12345"),
        (folder_of_another_where_ours_was, "kernels belongs to user 12345"),
        (folder_for_everyone, "other users may write to"),
        (file_of_another, "is not loaded: it belongs to user 12345"),
        (file_for_everyone, "is not loaded: other users may write to it"),
        (link_to_a_file, "is not loaded: it is a link"),
        (link_of_another, "the link"),
    ],
)
def test_what_others_may_have_written_is_refused_by_name(
    plant: Callable[[Intruder, Path], None], words: str, intruder: Intruder, fresh: Path
) -> None:
    plant(intruder, fresh)
    library = build.load()
    assert library.handle.answer() == 42
    assert not intruder.marker.exists()
    assert words in " ".join(library.problems)
    assert str(fresh) in library.problems[0]


@pytest.mark.parametrize(
    ("variables", "folder", "problem"),
    [
        ({"HF_PAGED_CACHE_DIR": "here"}, "here", "HF_PAGED_CACHE_DIR leads to the relative path 'here'"),
        ({"HF_PAGED_CACHE_DIR": "~/here", "HOME": "."}, "here", "HF_PAGED_CACHE_DIR leads to the relative"),
        ({"HF_PAGED_CACHE_DIR": "", "XDG_CACHE_HOME": "here"}, "here/hf_paged_cache", None),
        (
            {"HF_PAGED_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "here"},
            "here/.cache/hf_paged_cache",
            "HOME leads to the relative path",
        ),
    ],
)
def test_relative_paths_lead_to_no_library(
    variables: dict[str, str],
    folder: str,
    problem: str | None,
    intruder: Intruder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    intruder.plant(Path(folder))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    library = build.load()
    assert library.handle.answer() == 42
    assert not intruder.marker.exists()
    assert library.problems == () if problem is None else problem in library.problems[0]


@pytest.mark.parametrize("mode", [0o775, 0o720])  # the second is what an end halfway leaves
def test_a_folder_that_was_left_open_to_the_group_is_emptied_and_closed_once(
    mode: int, intruder: Intruder, compiled: list[Path], fresh: Path
) -> None:
    planted = intruder.plant(fresh)
    (fresh / "cpu-avx2-left.tmp").write_text("")
    fresh.chmod(mode)
    library = build.load()
    assert library.handle.answer() == 42
    assert not intruder.marker.exists()
    assert f"Other users could write to {fresh}" in library.problems[0]
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert planted not in fresh.iterdir()
    assert build.load().problems == ()
    assert len(compiled) == len(list(fresh.iterdir())) == 1


def other_files(intruder: Intruder, folder: Path) -> Path:
    (folder / "notes.txt").write_text("")
    return folder


def folder_in_one_for_everyone(intruder: Intruder, folder: Path) -> Path:
    folder.parent.chmod(0o777)
    return folder


def folder_in_one_of_another(intruder: Intruder, folder: Path) -> Path:
    intruder.take(folder.parent)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    return folder


def link_to_another_folder(intruder: Intruder, folder: Path) -> Path:
    target = folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(target)
    return target


@pytest.mark.parametrize(
    "place", [other_files, folder_in_one_for_everyone, folder_in_one_of_another, link_to_another_folder]
)
def test_a_folder_that_may_serve_others_keeps_its_mode_and_its_files(
    place: Callable[[Intruder, Path], Path], intruder: Intruder, fresh: Path
) -> None:
    planted = intruder.plant(fresh).name
    fresh.chmod(0o775)
    folder = place(intruder, fresh)
    library = build.load()
    assert library.handle.answer() == 42
    assert not intruder.marker.exists()
    assert "other users may write to" in library.problems[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    assert (folder / planted).exists()


@pytest.mark.parametrize("was_kept", [False, True])
def test_a_disk_that_runs_nothing_is_named_with_the_way_out(
    was_kept: bool, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if was_kept:
        build.load()
    load = library_folder.LibraryFile.load

    def refuse(library: library_folder.LibraryFile) -> Any:
        if library.path.is_relative_to(fresh):
            library.close()
            raise OSError(f"{library.path}: failed to map segment from shared object")
        return load(library)

    monkeypatch.setattr(library_folder.LibraryFile, "load", refuse)
    library = build.load()
    assert library.handle.answer() == 42
    (problem,) = library.problems
    assert f"not from {fresh} (" in problem
    assert "failed to map segment" in problem
    assert "HF_PAGED_CACHE_DIR" in problem
    assert len(list(fresh.iterdir())) == 1


def test_a_link_of_this_user_is_followed(fresh: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    fresh.rmdir()
    fresh.symlink_to(tmp_path / "scratch")
    assert build.load().problems == ()
    assert len(list((tmp_path / "scratch").iterdir())) == 1


def test_what_is_loaded_is_what_was_hashed(intruder: Intruder, fresh: Path) -> None:
    build.load()
    (kept,) = fresh.iterdir()
    library = library_folder.LibraryFile(kept)
    os.replace(intruder.plant(fresh), kept)
    if sys.platform == "linux":  # elsewhere there is no way to load an open file
        assert library.load().answer() == 42
        assert not intruder.marker.exists()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the compiler has put its results so far."""
    paths: list[Path] = []
    compile_kernel = build._compile

    def note(command: list[str], folder: Path, path: Path) -> None:
        paths.append(path)
        compile_kernel(command, folder, path)

    monkeypatch.setattr(build, "_compile", note)
    return paths


def test_a_library_is_compiled_once_for_this_user_alone(
    compiled: list[Path], tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    before = os.umask(0)
    try:
        assert build.load().handle.answer() == 42
    finally:
        os.umask(before)
    (kept,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, kept)] == [0o700, 0o644]
    folder.chmod(0o500)  # nothing need be written
    assert build.load().handle.answer() == 42
    assert len(compiled) == 1
    assert list(temporary.iterdir()) == []


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        flip,
        lambda content: b"",
        lambda content: content + b"more",
    ],
    ids=["truncated", "zeroed", "flipped", "empty", "longer"],
)
def test_a_damaged_library_is_compiled_again(
    damage: Callable[[bytes], bytes], compiled: list[Path], fresh: Path
) -> None:
    build.load()
    (kept,) = fresh.iterdir()
    content = kept.read_bytes()
    kept.unlink()  # the loaded one stays as it is
    kept.write_bytes(damage(content))
    library = build.load()
    assert library.handle.answer() == 42
    assert library.problems == (f"{kept} is damaged, and replaced.",)
    assert [path.read_bytes() for path in fresh.iterdir()] == [content]
    assert build.load().problems == ()
    assert len(compiled) == 2


def test_a_pipe_in_place_of_a_library_is_not_waited_for(fresh: Path) -> None:
    build.load()
    (kept,) = fresh.iterdir()
    kept.unlink()
    os.mkfifo(kept)
    library = build.load()
    assert library.handle.answer() == 42
    assert library.problems == (f"{kept} is not loaded: it is no regular file.",)
    assert kept.is_file()


def test_a_library_has_its_name_only_when_it_is_on_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_rename(*arguments: Any, **options: Any) -> None:
        events.append("rename")
        rename(*arguments, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    build.load()
    assert events == ["file", "rename", "folder"]


def test_a_full_disk_keeps_nothing_and_the_kernel_runs(
    fresh: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel, limits = build._compile, resource.getrlimit(resource.RLIMIT_FSIZE)

    def compile_and_fill(*arguments: Any) -> None:
        compile_kernel(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    monkeypatch.setattr(build, "_compile", compile_and_fill)
    try:
        library = build.load()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert library.handle.answer() == 42
    assert library.problems == (f"{build._NOT_KEPT}: {fresh}: File too large.",)
    assert [*fresh.iterdir(), *temporary.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(fresh / "file" / "below"))
    library = build.load()
    assert library.handle.answer() == 42
    assert "Not a directory" in library.problems[0]
    assert [path.name for path in fresh.iterdir()] == ["file"]


def test_what_killed_builds_have_left_is_removed_after_a_day(fresh: Path, temporary: Path) -> None:
    ages = {"old": 25 * 3600, "new": 23 * 3600}
    for name in ages:
        (fresh / f"cpu-avx2-{name}.tmp").write_text("")
        (temporary / f"hf_paged_cache-build-{name}").mkdir()
        (temporary / f"hf_paged_cache-build-{name}" / "a.o").write_text("")
        (temporary / f"of-another-program-{name}").mkdir()
    (fresh / "cpu-avx2-old.so").write_text("")
    now = fresh.stat().st_mtime
    for path in (*fresh.iterdir(), *temporary.iterdir()):
        age = ages[path.stem.rpartition("-")[2]]
        os.utime(path, (now - age, now - age))
    stem = build.load().stem
    left = sorted(path.name for path in fresh.iterdir() if not path.name.startswith(stem))
    assert left == ["cpu-avx2-new.tmp", "cpu-avx2-old.so"]
    assert sorted(path.name for path in temporary.iterdir()) == [
        "hf_paged_cache-build-new",
        "of-another-program-new",
        "of-another-program-old",
    ]


# --- what is said -------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> LayerBlocks:
    """Blocks for which no backend has been chosen yet."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    return build_problem(CASES[0]).blocks


def test_where_nothing_works_one_warning_says_all(
    blocks: LayerBlocks, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.chmod(0o777)
    monkeypatch.setenv("CXX", "false")
    assert [dispatch.backend_name(blocks) for _ in range(2)] == ["torch"] * 2
    (warning,) = caplog.records
    assert "'false' failed with status 1" in warning.message


def test_a_kernel_that_is_not_kept_is_said_once(
    blocks: LayerBlocks, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.chmod(0o777)
    monkeypatch.setattr(cpp, "_declare", lambda handle: None)
    assert [dispatch.backend_name(blocks) for _ in range(2)] == ["cpp"] * 2
    (warning,) = caplog.records
    assert f"{build._NOT_KEPT}: other users may write to {fresh} (`chmod go-w` it" in warning.message
