"""``python -m hf_hybrid``, which is the program ``hf-hybrid``."""

from hf_hybrid.commands.program import run

if __name__ == "__main__":
    run()
