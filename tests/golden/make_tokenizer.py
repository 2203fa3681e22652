"""Makes `tests/golden/tokenizer/`, once: the files are committed, so that ids are fixed forever.

    python -m tests.golden.make_tokenizer

A sentencepiece BPE of 448 pieces, trained on the text below, in the layout of Llama folders, and
the chat template of Zephyr (also TinyLlama's), unchanged: it writes EOS behind every message and
leaves BOS to the tokenizer. The JSON files hold ids of this tokenizer: made anew, they must be too.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from sentencepiece import SentencePieceTrainer

FOLDER = Path(__file__).parent / "tokenizer"
PIECES = 448
EOS = 2

ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)

TEXT = """<|system|>
You are a careful assistant. Answer in one short line.
<|user|>
What is 23 + 45? What is 8 times 7? Which number is larger, 12 or 21? Name a colour of the sky.
<|assistant|>
The answer is 68. The answer is 56. The larger number is 21. The sky is blue, and grey on some days.
Let me think about it step by step: first add the tens, then add the ones, then add both numbers.
A careful person checks the answer once more before saying it. That is one line, and it is short.
Thank you, that was right. And what about 9 + 9? It is 18, because ten and eight are eighteen.
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 40),
        model_writer=model,
        vocab_size=PIECES,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n"],
        control_symbols=["<|end|>"],
        unk_id=0,
        bos_id=1,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (FOLDER / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": ZEPHYR,
    }
    _write("tokenizer_config.json", config)
    _write("config.json", {"model_type": "llama", "vocab_size": PIECES, "eos_token_id": EOS})


def _write(name: str, value: dict) -> None:
    (FOLDER / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
