"""The last good policies over a restart: a folder that broke meanwhile stops nobody, and says so."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from policies import last_good
from policies.load import load
from policies.watch import PolicyStore, Reload
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import EVERYBODY, policy, write

BROKEN = EVERYBODY.replace("routes:", "rouets:")
STRICT = f"""{EVERYBODY}examples_must_pass: true
examples:
  - {{name: short, text: Hello, expect: {{tier: small}}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "policies", a=EVERYBODY, b=policy("team", applies_to="{teams: [t]}"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def files(kept: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in last_good.place(kept).iterdir()}


def test_a_broken_folder_at_the_start_leaves_the_last_good_set_in_force(folder: Path, kept: Path) -> None:
    before = PolicyStore(folder, last_good=kept).version
    write(folder, a=BROKEN)
    told: list[Reload] = []
    store = PolicyStore(folder, on_reload=told.append, last_good=kept)
    assert store.version == before
    assert store.current.named("team")
    assert [(problem.file, problem.suggestion) for problem in store.problems] == [(str(folder / "a.yaml"), "routes")]
    assert [reload.problems for reload in told] == [store.problems]
    assert store.reload() is None, "nothing was edited since"

    write(folder, a=EVERYBODY.replace("6000", "7000"))
    assert store.reload()
    assert not store.problems
    assert store.version != before
    shutil.rmtree(folder)
    assert PolicyStore(folder, last_good=kept).version == store.version, "the last one, not the first"


def test_a_refused_edit_is_not_kept(folder: Path, kept: Path) -> None:
    store = PolicyStore(folder, last_good=kept)
    write(folder, a=BROKEN)
    assert store.reload()
    assert store.problems
    assert files(kept)["a.yaml"] == EVERYBODY


@pytest.mark.parametrize("damage", ["none was kept", "broken", "empty", "no file of policies"])
def test_without_a_last_good_set_the_start_is_refused_for_the_folders_faults(
    folder: Path, kept: Path, damage: str
) -> None:
    if damage != "none was kept":
        PolicyStore(folder, last_good=kept)
        for path in last_good.place(kept).iterdir():
            path.unlink()
            if damage != "no file of policies":
                path.write_text("" if damage == "empty" else BROKEN)
    write(folder, a=BROKEN)
    with pytest.raises(InvalidFile, match="rouets") as raised:
        PolicyStore(folder, last_good=kept)
    assert str(kept) not in str(raised.value)
    write(folder, a=EVERYBODY)
    PolicyStore(folder, last_good=kept)
    assert load(last_good.place(kept)).version == load(folder).version, "damage is mended by the next good start"


def test_an_edit_that_fails_its_examples_stays_refused(
    folder: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = PolicyStore(write(folder, a=STRICT), last_good=kept).version
    write(folder, a=STRICT.replace("tier: small}", "tier: large}"))
    store = PolicyStore(folder, last_good=kept)
    assert store.version == before
    assert "example 'short' fails" in store.problems[0].message
    # Nobody has edited what was in force when only the program was upgraded: it starts, and says so.
    last_good.keep(kept, load(folder))
    store = PolicyStore(folder, last_good=kept)
    assert store.version == load(folder).version
    assert not store.problems
    assert "example 'short' fails" in caplog.text


def test_what_is_kept_is_the_text_to_the_byte_and_private(folder: Path, kept: Path) -> None:
    (folder / "ü n.yml").write_text(policy("other", "description: 'é 漢'\n", "{teams: [o]}"), encoding="utf-8")
    PolicyStore(folder, last_good=kept)
    assert files(kept) == {path.name: path.read_text() for path in folder.iterdir()}
    assert {path.stat().st_mode & 0o077 for path in [kept, *kept.rglob("*")]} == {0}


def test_the_same_content_is_written_once_and_old_content_goes(folder: Path, kept: Path) -> None:
    PolicyStore(folder, last_good=kept)
    written = last_good.place(kept).resolve().stat()
    PolicyStore(folder, last_good=kept)
    assert last_good.place(kept).resolve().stat() == written
    (kept / ".new-killed").mkdir()
    write(folder, a=EVERYBODY.replace("6000", "7000"))
    PolicyStore(folder, last_good=kept)
    assert sorted(path.name for path in kept.iterdir()) == sorted(
        [".lock", "now", last_good.place(kept).resolve().name]
    )


def test_a_copy_restored_without_links_is_read_and_replaced(folder: Path, kept: Path) -> None:
    PolicyStore(folder, last_good=kept)
    shutil.copytree(kept, kept.with_name("copy"), symlinks=False)
    shutil.rmtree(kept)
    kept.with_name("copy").rename(kept)
    write(folder, a=BROKEN)
    store = PolicyStore(folder, last_good=kept)
    assert store.problems
    write(folder, a=EVERYBODY.replace("6000", "7000"))
    assert store.reload()
    assert load(last_good.place(kept)).version == store.version


def test_what_cannot_be_kept_is_a_warning(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    store = PolicyStore(folder, last_good=tmp_path / "file")
    assert store.current.named("everybody")
    write(folder, a=EVERYBODY.replace("6000", "7000"))
    assert store.reload()
    assert not store.problems
    assert caplog.text.count("could not be kept for the next start") == 2


def _keep_in_turn(kept: Path, folders: list[Path], times: int) -> None:
    sets = [load(folder) for folder in folders]
    for turn in range(times):
        last_good.keep(kept, sets[turn % len(sets)])


def test_processes_that_write_at_once_and_are_killed_leave_a_whole_set(
    folder: Path, kept: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", a=EVERYBODY.replace("6000", "7000"))
    whole = {load(folder).version, load(other).version}
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_keep_in_turn, args=(kept, [folder, other], 10_000)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not last_good.place(kept).exists():
        assert any(writer.is_alive() for writer in writers)
        os.sched_yield()
    for looked in range(30):
        with last_good.locked(kept):
            assert load(last_good.place(kept)).version in whole
        if looked == 15:
            writers[0].kill()
    for writer in writers:
        writer.kill()
        writer.join()
    with last_good.locked(kept):
        assert load(last_good.place(kept)).version in whole
    last_good.keep(kept, load(folder))
    assert load(last_good.place(kept)).version == load(folder).version
