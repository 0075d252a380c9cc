"""Where exports go: folders that are new or empty, whole or not at all, on disks with room."""

import pytest

from mlxft.errors import GuardStop, InputError
from mlxft.export.folder import check_out, check_space, staged
from tests.permissions import as_nobody_in_a_folder


def test_what_is_written_is_there_when_the_block_ends_and_not_before(tmp_path):
    out = tmp_path / "new" / "out"
    with staged(out) as folder:
        (folder / "a").write_text("a")
        assert not out.exists() and folder.parent == out.parent
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "a").read_text() == "a"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with staged(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_block_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ValueError), staged(tmp_path / "new" / "out") as folder:
        (folder / "a").write_text("a")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_what_came_into_the_folder_meanwhile_stays(tmp_path):
    with pytest.raises(InputError, match="is not empty: it holds theirs"), staged(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_holds_something_a_file_and_a_dangling_link_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, message in (("full", "it holds a. Noth"), ("file", "is a file"), ("link", "leads nowhere")):
        with pytest.raises(InputError, match=f"out=.*{name}.*{message}"):
            check_out(tmp_path / name)


def test_a_folder_that_may_not_be_written_is_refused():
    with as_nobody_in_a_folder() as folder:
        folder.chmod(0o500)
        with pytest.raises(InputError, match="no permission to make files in"):
            check_out(folder / "new" / "out")


def test_more_than_the_disk_has_free_is_refused_before_it_is_written(tmp_path):
    check_space(tmp_path / "out", 1000)
    with pytest.raises(GuardStop, match=r"1000000.00 GB are to be written, and [\d.]+ GB are free there"):
        check_space(tmp_path / "out", 10**15)
