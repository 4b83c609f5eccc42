"""Hot reload: good edits count within a second, bad ones keep the last good set, nothing is missed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from policies.watch import PolicyStore, Reload
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import EVERYBODY, policy, write


class Watched:
    """A store on a folder, and the reloads it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = write(folder, a=EVERYBODY)
        self.reloads: Queue[Reload] = Queue()
        self.store = PolicyStore(self.folder, ["small"], on_reload=self.reloads.put)

    def edit(self, text: str, name: str = "a") -> Reload:
        """Write a file and wait for the reload; fails after two seconds."""
        started = time.monotonic()
        write(self.folder, **{name: text})
        found = self.reloads.get(timeout=2)
        assert time.monotonic() - started < 2
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path / "policies")
    with found.store:
        yield found


def test_good_bad_good(watched: Watched) -> None:
    store = watched.store
    first = store.version
    assert watched.edit(EVERYBODY.replace("6000", "7000")).accepted
    second = store.version
    assert second != first
    assert not store.problems

    refused = watched.edit(EVERYBODY.replace("routes:", "rouets:"))
    assert not refused.accepted
    assert refused.policies is store.current
    assert store.version == second
    assert [(p.line, p.suggestion) for p in store.problems] == [(4, "routes")]

    assert watched.edit(EVERYBODY).accepted
    assert store.version == first
    assert not store.problems


def test_a_new_file_and_a_deleted_file(watched: Watched) -> None:
    assert watched.edit(policy("team", applies_to="{teams: [t]}"), "b").accepted
    assert {p.name for p in watched.store.current.policies} == {"everybody", "team"}
    (watched.folder / "b.yaml").unlink()
    assert watched.reloads.get(timeout=2).accepted
    assert {p.name for p in watched.store.current.policies} == {"everybody"}


def test_deleting_the_last_file_keeps_the_last_good_set(watched: Watched) -> None:
    (watched.folder / "a.yaml").unlink()
    assert not watched.reloads.get(timeout=2).accepted
    assert watched.store.current.named("everybody")
    assert "no policy here" in watched.store.problems[0].message


def test_the_folder_goes_and_comes_back(watched: Watched) -> None:
    version = watched.store.version
    shutil.rmtree(watched.folder)
    found = watched.reloads.get(timeout=2)
    while "no policy here" in found.problems[0].message:  # the file goes before the folder
        found = watched.reloads.get(timeout=2)
    assert "cannot be read" in watched.store.problems[0].message
    assert watched.store.version == version
    assert watched.edit(EVERYBODY.replace("6000", "8000")).accepted
    assert watched.store.version != version
    assert watched.edit(EVERYBODY.replace("6000", "9000")).accepted


def test_an_editor_that_replaces_the_file(watched: Watched) -> None:
    temporary = watched.folder / ".a.yaml.swp"
    temporary.write_text(EVERYBODY.replace("6000", "7000"))
    temporary.rename(watched.folder / "a.yaml")
    assert watched.reloads.get(timeout=2).accepted


def test_the_same_content_is_not_a_reload(watched: Watched) -> None:
    write(watched.folder, a=EVERYBODY)
    assert watched.edit(EVERYBODY.replace("6000", "7000")).accepted
    assert watched.reloads.empty()


def test_a_file_that_is_not_text(watched: Watched) -> None:
    (watched.folder / "b.yaml").write_bytes(b"\xff\xfe")
    assert not watched.reloads.get(timeout=2).accepted
    assert "UTF-8" in watched.store.problems[0].message


@pytest.mark.parametrize("scalar", ["!!int abc", "!!bool maybe", "!!timestamp foo", "9" * 6000, '"\\UFFFFFFFF"'])
def test_a_scalar_that_cannot_be_read_is_a_problem_and_the_watch_goes_on(watched: Watched, scalar: str) -> None:
    version = watched.store.version
    assert not watched.edit(f"{EVERYBODY}description: {scalar}\n").accepted
    assert [problem.line for problem in watched.store.problems] == [9]
    assert watched.store.version == version
    assert watched.edit(EVERYBODY.replace("6000", "7000")).accepted
    assert not watched.store.problems


def test_a_link_that_breaks_leaves_its_policy_in_force(watched: Watched, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", team=policy("team", applies_to="{teams: [a]}"))
    (watched.folder / "team.yaml").symlink_to(tmp_path / "elsewhere" / "team.yaml")
    assert watched.reloads.get(timeout=2).accepted
    (tmp_path / "elsewhere" / "team.yaml").unlink()
    refused = watched.reloads.get(timeout=2)
    assert not refused.accepted
    assert "a link to a file that is not there" in refused.problems[0].message
    assert watched.store.current.named("team")
    (watched.folder / "team.yaml").unlink()
    assert watched.reloads.get(timeout=2).accepted


def test_a_pipe_among_the_files_does_not_hold_the_watch_up(watched: Watched) -> None:
    os.mkfifo(watched.folder / "b.yaml")
    assert not watched.reloads.get(timeout=2).accepted
    (watched.folder / "b.yaml").unlink()
    assert watched.edit(EVERYBODY.replace("6000", "7000")).accepted


def test_a_file_name_that_is_no_text_is_a_problem(watched: Watched) -> None:
    (watched.folder / os.fsdecode(b"\xff.yaml")).write_text(EVERYBODY)
    assert not watched.reloads.get(timeout=2).accepted
    (problem,) = watched.store.problems
    assert "a file's name must be readable text" in str(problem).encode().decode()


def test_a_check_that_fails_itself_is_a_problem_and_the_watch_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("maybe")

    version = watched.store.version
    with monkeypatch.context() as patched:
        patched.setattr("policies.watch.load_passing", fails)
        assert not watched.edit(EVERYBODY.replace("6000", "7000")).accepted
    (problem,) = watched.store.problems
    assert "could not be checked: KeyError: 'maybe'" in problem.message
    assert "Traceback" in caplog.text
    assert watched.store.version == version
    assert watched.edit(EVERYBODY.replace("6000", "8000")).accepted
    assert not watched.store.problems


def test_an_edit_before_the_start_is_noticed(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "policies")
    write(watched.folder, a=EVERYBODY.replace("6000", "7000"))
    with watched.store:
        assert watched.reloads.get(timeout=2).accepted


def test_a_bad_folder_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="no policy here"):
        PolicyStore(tmp_path)
    with pytest.raises(InvalidFile, match="cannot be read"):
        PolicyStore(tmp_path / "none")


def test_a_failing_listener_does_not_stop_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "policies", a=EVERYBODY)
    reloads: Queue[Reload] = Queue()

    def listen(reload: Reload) -> None:
        reloads.put(reload)
        raise RuntimeError("the listener failed")

    with PolicyStore(folder, on_reload=listen):
        write(folder, a=EVERYBODY.replace("6000", "7000"))
        reloads.get(timeout=2)
        write(folder, a=EVERYBODY.replace("6000", "8000"))
        reloads.get(timeout=2)
    assert "the listener failed" in caplog.text


def test_close_is_prompt_and_may_be_repeated(tmp_path: Path) -> None:
    store = Watched(tmp_path / "policies").store
    store.start()
    store.start()
    started = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - started < 1
    assert store.current.named("everybody")
