"""Train and evaluate a sentence classifier on GLUE or on other labelled sentences. Without data flags, offline.

python run_glue.py --model_type spade --do_train --do_eval --output_dir runs/docpairs

python run_glue.py --model_name_or_path google-bert/bert-base-cased --task_name mrpc \
    --do_train --do_eval --output_dir runs/mrpc

python run_glue.py --model_type spade --config_overrides preset=tiny --learning_rate 2e-3 --task_name cola \
    --do_train --do_eval --train_file CoLA/train.tsv --validation_file CoLA/dev.tsv --output_dir runs/cola
"""

from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.glue import main

if __name__ == "__main__":
    run_command_line(main)
