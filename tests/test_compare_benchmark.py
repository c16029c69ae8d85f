"""`make bench-compare` pairs two checkouts in one run, and its ratios say what differs."""

import subprocess

import pytest

from benchmarks import bench_compare
from benchmarks.bench_compare import Case, Worker, describe, interval
from benchmarks.record import read_csv

FEW = ["--models", "bst-sh-s4", "--lengths", "32", "--precisions", "fp32", "--threads", "1"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose only commit has another package of our name."""
    package = tmp_path / "clone" / "hf_hybrid"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the base is broken')\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"], ["tag", "whole"]):
        subprocess.run(["git", *words], cwd=package.parent, check=True)
    subprocess.run(["git", "rm", "-q", "-r", "hf_hybrid"], cwd=package.parent, check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "none"], cwd=package.parent, check=True)
    monkeypatch.setattr(bench_compare, "ROOT", package.parent)
    return package.parent


@pytest.mark.parametrize(
    ("base", "said"), [("nowhere", "must name a commit of"), ("HEAD", "must name a commit that has the package")]
)
def test_a_wrong_base_is_refused_at_once(repository, capsys, base, said):
    with pytest.raises(SystemExit):
        bench_compare.main(["--base", base])
    assert f"argument --base: {said}" in (error := capsys.readouterr().err).replace("\n", " ")
    assert f"got '{base}'" in error


def test_the_base_is_unpacked(repository, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    bench_compare.unpack(bench_compare.commit("whole"), folder)
    assert [path.name for path in folder.iterdir()] == ["hf_hybrid"]
    assert "broken" in (folder / "hf_hybrid" / "__init__.py").read_text()


def fake(folder, code):
    """Write a checkout whose package has only this code."""
    (folder / "hf_hybrid").mkdir(parents=True)
    (folder / "hf_hybrid" / "__init__.py").write_text(code)
    return folder


def test_each_side_has_its_own_package(tmp_path, monkeypatch):
    """The base's lacks what the step asks for; the import of the tree's is the slower one."""
    base, tree = fake(tmp_path / "base", ""), fake(tmp_path / "tree", "import time\ntime.sleep(0.3)\n")
    monkeypatch.setattr(bench_compare, "ROOT", tree)
    monkeypatch.setattr(bench_compare, "unpack", lambda sha, folder: base)
    monkeypatch.setattr(bench_compare, "commit", lambda name: "0" * 40)
    out = tmp_path / "compare.csv"
    assert bench_compare.main([*FEW, "--tasks", "step", "import", "--pairs", "1", "--out", str(out)]) == 1
    step, imported = read_csv(out)
    assert step["outcome"].startswith("failed: ImportError: cannot import name 'BstConfig'")
    assert imported["outcome"] == "failed: slower than 1.1 times the base"
    assert float(imported["base_s"]) < 0.3 < float(imported["tree_s"])
    monkeypatch.setattr(bench_compare, "serve", stay_away)
    with pytest.raises(RuntimeError, match=r"must come from .*base; got .*tree"):
        Worker(base, 1)


def test_a_base_that_cannot_be_imported_ends_the_comparison(tmp_path, monkeypatch):
    base, tree = fake(tmp_path / "base", "raise RuntimeError('no')\n"), fake(tmp_path / "tree", "")
    monkeypatch.setattr(bench_compare, "ROOT", tree)
    monkeypatch.setattr(bench_compare, "unpack", lambda sha, folder: base)
    monkeypatch.setattr(bench_compare, "commit", lambda name: "0" * 40)
    said = r"both packages must be there to compare: hf_hybrid of .*base cannot be imported: RuntimeError: no"
    with pytest.raises(SystemExit, match=said):
        bench_compare.main([*FEW, "--tasks", "step", "--out", str(tmp_path / "compare.csv")])


def test_a_dead_worker_costs_one_case(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_compare, "unpack", lambda sha, folder: bench_compare.ROOT)
    monkeypatch.setattr(bench_compare, "commit", lambda name: "0" * 40)
    asked, ask = [], Worker.ask

    def killed(self, word, *details):
        if word == "prepare" and not asked:
            asked.append(word)
            self.process.kill()
        return ask(self, word, *details)

    monkeypatch.setattr(Worker, "ask", killed)
    out = tmp_path / "compare.csv"
    flags = [*FEW, "--tasks", "step", "decode", "--rounds", "1", "--pairs", "1", "--out", str(out), "--allowed", "1e9"]
    assert bench_compare.main(flags) == 1
    step, decode = read_csv(out)
    assert step["outcome"] == "failed: the process ended with -9"
    assert decode["outcome"] == "ok"


def test_a_worker_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(bench_compare, "TIME_LIMIT", 0.2)
    monkeypatch.setattr(bench_compare, "serve", say_nothing)
    with pytest.raises(RuntimeError, match=r"no answer in 0\.2 s"):
        Worker(bench_compare.ROOT, 1)


def say_nothing(pipe, checkout, threads):
    pipe.recv()
    pipe.recv()


def stay_away(pipe, checkout, threads):
    pipe.recv()
    pipe.send((checkout.parent / "tree", ""))


def test_both_sides_are_measured_in_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_compare, "unpack", lambda sha, folder: bench_compare.ROOT)
    monkeypatch.setattr(bench_compare, "commit", lambda name: "0" * 40)
    out = tmp_path / "compare.csv"
    flags = [*FEW, "--tasks", "step", "decode", "generate", "--generators", "bst", "--sizes", "tiny"]
    flags += ["--rounds", "1", "--pairs", "2", "--out", str(out), "--allowed", "1e9"]
    assert bench_compare.main(flags) == 0
    rows = read_csv(out)
    assert [(row["task"], row["pairs"], row["outcome"]) for row in rows] == [
        ("step", "2", "ok"),
        ("decode", "2", "ok"),
        ("generate", "2", "ok"),
    ]
    assert all(float(row[name]) > 0 for row in rows for name in ("base_s", "tree_s", "ratio"))
    assert float(rows[0]["tree_mib"]) > 0
    assert "| step bst-sh-s4 32 fp32 |" in capsys.readouterr().out


def test_the_interval_is_that_of_the_median():
    assert interval(range(5)) is None  # the widest one covers 94 %
    assert interval(range(6)) == (0, 5)
    assert interval(range(20)) == (5, 14)  # of tables of the sign test


def rounds(factor, unit="s", count=6):
    """Rounds of two pairs; each has a speed of its own."""
    sides = (("tree", factor), ("base", 1))
    return [[(side, unit, share * (n + 1)) for _ in range(2) for side, share in sides] for n in range(count)]


def test_a_slower_case_fails():
    case = Case("step", "spade", 1024, "fp32")
    assert str(case) == "step spade 1024 fp32"
    same, slow = (describe(case, rounds(factor), "", allowed=1.1) for factor in (1.05, 1.2))
    assert (same["outcome"], same["ratio"], same["rounds"], same["pairs"]) == ("ok", "1.050", "6", "12")
    assert slow["outcome"] == "failed: slower than 1.1 times the base"
    assert describe(case, rounds(1.2, count=5), "", allowed=1.1)["outcome"] == "ok"  # too few say nothing
    assert describe(case, [], "failed: x", allowed=1.1)["outcome"] == "failed: x"
    large = describe(case, rounds(1.2, "mib"), "", allowed=1.1)
    assert (large["outcome"], large["mib_ratio"]) == ("failed: more memory than 1.1 times the base", "1.200")


def test_a_round_counts_once():
    """Five of six pairs of one process are slow, and the other rounds are not: that is a process, not the code."""
    found = [*rounds(1.0, count=5), [(side, "s", x) for _ in range(30) for side, x in (("tree", 2.0), ("base", 1.0))]]
    row = describe(Case("import"), found, "", allowed=1.1)
    assert (row["ratio"], row["low"], row["high"], row["outcome"]) == ("1.000", "1.000", "2.000", "ok")
