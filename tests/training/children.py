"""Training scripts in processes that can be killed: forked at once from a server that has imported everything."""

import contextlib
import gc
import io
import multiprocessing
import os
import resource
import signal
import socket
import time

import torch
from transformers import TrainerCallback, modeling_utils

from hf_hybrid import SpadeStack
from hf_hybrid.context_parallel import faults
from hf_hybrid.training import clm, glue, summarization
from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.processes import Agreement
from hf_hybrid.training.trainer import script_trainer
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

SCRIPTS = {"clm": clm, "glue": glue, "summarization": summarization}
PAUSE = 0.05
"""Seconds for which a file is half-written, or a checkpoint without its marker."""
SAVING = ("weights", "optimizer", "marker")
"""Events after which a checkpoint is being written for at least `PAUSE`."""


class Child:
    """A script in a process of its own."""

    def __init__(self, script, argv, log, **options):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.log = log
        self.events, sender = context.Pipe(False)
        self.process = context.Process(target=_work, args=(script, argv, str(log), sender), kwargs=options)
        self.process.start()
        sender.close()

    def read(self, enough=lambda event: False):
        """Events, pairs of a name and a step, up to one that is enough or the last one."""
        seen = []
        with contextlib.suppress(EOFError):
            while not seen or not enough(seen[-1]):
                seen.append(self.events.recv())
        return seen

    def wait(self, timeout=120):
        """Read on to the end; the exit code, negative after a signal, and what was printed."""
        self.read()
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the process does not end"
        return self.process.exitcode, self.log.read_text(encoding="utf-8")


def pair(script, argv, folder, **options):
    """A script in two processes that know of each other, with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    return [
        Child(
            script,
            argv,
            folder / f"log{rank}",
            environment=world | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": f"{folder}/error{rank}"},
            **options,
        )
        for rank in "01"
    ]


def _work(script, argv, log, events, *, slow=False, file_limit=None, environment=None, fault=None):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup leaves ignored
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported
    _report(events, file_limit)
    if slow:
        _save_slowly(events)
    if fault is not None:
        _fail(*fault)
    run_command_line(lambda: SCRIPTS[script].main(argv))


def _report(events, file_limit):
    class Steps(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            events.send(("resumed", state.global_step))
            if file_limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        def on_step_begin(self, args, state, control, **kwargs):
            events.send(("step", state.global_step))

    create = ScriptTrainer.__init__

    def with_callback(self, *args, **kwargs):
        create(self, *args, **kwargs)
        self.add_callback(Steps())

    ScriptTrainer.__init__ = with_callback


def _fail(kind, rank, step):
    """End, hang or stop, or get shorter batches; the others wait a second for answers.

    A process ends or hangs in a forward, or in reading a batch, and stops where others wait as long as it takes.
    """
    faults.ROLL_CALL = 1.0
    if os.environ["RANK"] != rank:
        return
    calls = [0]

    def failing(function):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == step and kind.startswith("hangs"):
                time.sleep(120)
            if calls[0] == step and kind == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if calls[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    collate = clm._collate
    if kind == "stops":
        Agreement.any = failing(Agreement.any)
    elif kind == "reads less":
        clm._collate = lambda rows: {name: x[:, :-1] for name, x in collate(rows).items()}
    elif kind.endswith("reading"):
        clm._collate = failing(collate)
    else:
        SpadeStack.forward = failing(SpadeStack.forward)


def _save_slowly(events):
    """Tell where saving is, and rest there: inside a file, before and after the marker, and while deleting."""
    step = [0]

    def write_in_halves(path, content, name):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            events.send((name, step[0]))
            time.sleep(PAUSE)
            file.write(content[len(content) // 2 :])

    save_checkpoint, save_tensors, save = (
        ScriptTrainer._save_checkpoint,
        modeling_utils.safe_save_file,
        torch.save,
    )
    mark, rotate = script_trainer.mark_complete, script_trainer.rotate_checkpoints

    def counted(self, *args, **kwargs):
        step[0] = self.state.global_step
        save_checkpoint(self, *args, **kwargs)

    def slow_tensors(tensors, path, metadata=None):
        save_tensors(tensors, path, metadata=metadata)
        with open(path, "rb") as file:
            content = file.read()
        write_in_halves(path, content, "weights")

    def slow_save(content, path, *args, **kwargs):
        if not str(path).endswith("optimizer.pt"):
            return save(content, path, *args, **kwargs)
        buffer = io.BytesIO()
        save(content, buffer, *args, **kwargs)
        return write_in_halves(path, buffer.getvalue(), "optimizer")

    def slow_mark(folder):
        events.send(("marker", step[0]))
        time.sleep(PAUSE)
        mark(folder)
        events.send(("marked", step[0]))

    def slow_rotation(*args, **kwargs):
        unlink = os.unlink

        def slow_unlink(*args, **kwargs):
            unlink(*args, **kwargs)
            events.send(("deleting", step[0]))
            time.sleep(PAUSE / 5)

        os.unlink = slow_unlink
        try:
            rotate(*args, **kwargs)
        finally:
            os.unlink = unlink

    ScriptTrainer._save_checkpoint = counted
    modeling_utils.safe_save_file = slow_tensors
    torch.save = slow_save
    script_trainer.mark_complete = slow_mark
    script_trainer.rotate_checkpoints = slow_rotation
