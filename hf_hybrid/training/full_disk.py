"""Disks that are full, by whatever error a library says so."""

import errno
import os
import re

__all__ = ["is_full_disk", "no_room"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TORCH = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos")


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that there is no more room on the disk for this user or this file."""
    return no_room(error) is not None


def no_room(error: BaseException | None) -> tuple[str, BaseException] | None:
    """The operating system's words, and who spoke them; torch's writer of archives has none, nor another reason."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if match := re.search(r"os error (\d+)", str(error)):  # libraries in Rust: safetensors, tokenizers
            number = int(match[1])
        if number in _NO_ROOM:
            return os.strerror(number), error
        if isinstance(error, RuntimeError) and _TORCH.search(str(error)):
            return "the disk is full, or a limit is reached", error
        error = error.__cause__ or error.__context__
    return None
