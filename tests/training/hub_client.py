"""Runs of the scripts with a Hub: `python -m tests.training.hub_client PLAN.json FOUND.json`, a client of its own.

The plan is a list of runs: ``name``, ``script``, ``argv`` and, where it is not the environment's, the ``token`` (null
for none) or the ``endpoint``. Of each run the exit code, the metrics and what it said to the user are recorded.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

import huggingface_hub

import hf_hybrid  # noqa: F401
from hf_hybrid.training.errors import run_command_line


def run(script, argv):
    """The exit code, the metrics and the standard error of a script; a traceback has no exit code."""
    metrics, said, code = {}, io.StringIO(), None
    handler = logging.StreamHandler(said)  # what is set up for a script's first run writes to that one's stream
    logging.getLogger("hf_hybrid").addHandler(handler)
    main = importlib.import_module(f"hf_hybrid.training.{script}").main
    try:
        with contextlib.redirect_stderr(said):
            run_command_line(lambda: metrics.update(main(argv)))
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        said.write(traceback.format_exc())
    logging.getLogger("hf_hybrid").removeHandler(handler)
    return {"code": code, "metrics": metrics, "said": said.getvalue()}


def main(plan, found):
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.01))  # a failing server is given up after half a minute
    token, client = os.environ["HF_TOKEN"], huggingface_hub.hf_api.api
    endpoint, results = client.endpoint, {}
    for step in json.loads(plan.read_text(encoding="utf-8")):
        os.environ["HF_TOKEN"] = step.get("token", token) or ""
        client.endpoint = step.get("endpoint", endpoint)
        results[step["name"]] = run(step["script"], step["argv"])
    found.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
