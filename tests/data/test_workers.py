"""Processes that work for another end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from hf_hybrid.data.workers import worker_pool

from ..bare import BARE

PROGRAM = f"""
{BARE}
import signal, time
from hf_hybrid.data.workers import worker_pool

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with worker_pool(2) as pool:
        waiting = [pool.submit(time.sleep, 600) for _ in range(2)]
        pool.submit(print, "never") and print("begun", flush=True)
        waiting[0].result()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_program_that_started_them(number, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ran = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert ran.stdout.readline() == "begun\n"
    children = psutil.Process(ran.pid).children(recursive=True)
    while sum("spawn_main" in " ".join(child.cmdline()) for child in children) < 2:
        time.sleep(0.1)
        children = psutil.Process(ran.pid).children(recursive=True)
    time.sleep(1)  # they import
    os.kill(ran.pid, number)
    ran.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert "never" not in ran.stdout.read()


def test_the_pool_works_and_calls_what_it_is_given_first(tmp_path):
    with worker_pool(1, partial(os.chdir, tmp_path)) as pool:
        assert pool.submit(os.getcwd).result() == str(tmp_path)
