"""Train and evaluate a causal language model. Without data flags, on documentation that is there, offline.

python run_clm.py --model_type spade --do_train --do_eval --output_dir runs/lm

python run_clm.py --model_name_or_path openai-community/gpt2 --train_file train.txt --validation_file valid.txt \
    --do_train --do_eval --output_dir runs/gpt2

python run_clm.py --model_name_or_path runs/lm --do_predict --test_file test.txt \
    --eval_sequence_length 3072 --eval_context_window 400 --output_dir runs/lm-test
"""

from hf_hybrid.training.clm import main
from hf_hybrid.training.errors import run_command_line

if __name__ == "__main__":
    run_command_line(main)
