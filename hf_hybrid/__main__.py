"""``python -m hf_hybrid``, which is the program ``hf-hybrid``."""

from hf_hybrid.commands.program import main, run

__all__ = ["main"]

if __name__ == "__main__":
    run()
