import os
import threading
import time

import pytest

from hf_hybrid.data.cache import cache_root, cached_folder


def test_cache_root_follows_the_argument_and_the_cache_of_datasets(tmp_path):
    from datasets import config

    assert cache_root(str(tmp_path)) == tmp_path / "hf_hybrid"
    assert str(cache_root()) == os.path.join(config.HF_DATASETS_CACHE, "hf_hybrid")


def test_builds_once_and_reuses(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "x").write_text("done")

    for _ in range(2):
        assert (cached_folder(tmp_path / "a" / "b", build) / "x").read_text() == "done"
    assert len(calls) == 1


def test_a_failed_build_leaves_nothing_behind_and_can_be_repeated(tmp_path):
    def fail(folder):
        (folder / "x").write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cached_folder(tmp_path / "b", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert cached_folder(tmp_path / "b", lambda folder: None).is_dir()


def test_others_wait_for_the_first_and_never_see_half_a_folder(tmp_path):
    calls, seen = [], []

    def build(folder):
        calls.append(1)
        (folder / "x").write_text("half")
        time.sleep(0.3)
        (folder / "x").write_text("whole")

    def work():
        seen.append((cached_folder(tmp_path / "b", build) / "x").read_text())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), seen) == (1, ["whole"] * 4)


def test_a_place_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_dir must be a writable folder; got .*file"):
        cached_folder(tmp_path / "file" / "b", lambda folder: None)
