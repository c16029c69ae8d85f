"""Train and evaluate a sequence-to-sequence model on summarization. Without data flags, data are built offline.

python run_summarization.py --model_type spade --do_train --do_eval --predict_with_generate --output_dir runs/spade

python run_summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \
    --train_file train.jsonl --validation_file dev.jsonl --do_train --do_eval --output_dir runs/t5

python run_summarization.py --model_name_or_path runs/spade --do_predict --predict_with_generate \
    --test_file test.csv --text_column article --summary_column abstract --output_dir runs/spade-test
"""

from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.summarization import main

if __name__ == "__main__":
    run_command_line(main)
