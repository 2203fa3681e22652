"""`python -m megarl.data`, through its `main`, on files and a tokenizer of their own.

Not covered: each check that it makes (their own tests).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.__main__ import main
from tests.contracts.tokenizer_folders import character_folder
from tests.data.prompt_files import write

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
TEMPLATE = "<s>{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}ai:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    """Two weighted sources, two reward names, a held-out row that is a training row."""
    sums = [{"prompt": text, "answer": "1"} for text in ("1+2", "1+3", "1+2", "x" * 40)]
    words = [{"prompt": text, "answer": "1", "kind": "talk"} for text in ("say</s>", "sing", "")]
    asked = [{"prompt": text, "answer": "1"} for text in ("1+2", "4+4")]
    train = write(tmp_path / "sums.jsonl", *sums), write(tmp_path / "words.jsonl", *words)
    held_out = write(tmp_path / "asked.jsonl", *asked)
    return [
        str(QUICKSTART),
        f"model.path={model}",
        f"data.train=[{{path: {train[0]}, weight: 3, reward: number}}, "
        f"{{path: {train[1]}, weight: 1, reward_key: kind}}]",
        f"data.eval=[{{path: {held_out}, reward: number}}]",
        "data.max_refused_share=0.5",
        "data.max_overlap=0.5",
        "rollout.prompts_per_iteration=4",
        "reward.scorers=[{name: exact_match, only: [number]}, "
        "{name: format, pattern: a, component: form, only: [talk]}, "
        "{name: length, most: 9, weight: 0}]",
        "eval.probes=[{name: format, pattern: b, component: probe}]",
    ]


def lines_of(text: str, start: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


def test_a_report_tells_each_source(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert lines_of(out, "data.") == [
        "data.train: 5 prompts, 1 with the text of an earlier one; template model",
        "data.eval: 2 prompts, 0 with the text of an earlier one; template model",
    ]
    assert lines_of(out, "rows") == [
        "rows     3 usable, 1 refused",
        "rows     2 usable, 1 refused",
        "rows     2 usable, 0 refused",
    ]
    assert lines_of(out, "refused") == [
        "refused  too_long 1: rows 4",
        "refused  empty_prompt 1: rows 3",
    ]
    assert "prompt of 50 tokens, data.max_prompt_tokens is 32" in out
    tokens = lines_of(out, "tokens")
    assert tokens[0] == "tokens   min 13, median 13, max 13; data.max_prompt_tokens is 32"
    assert tokens[1] == "tokens   min 14, median 14, max 14; data.max_prompt_tokens is 32"
    scored = lines_of(out, "reward")
    assert scored[0] == "reward   number (3 rows): scored by exact_match, length (weight 0)"
    assert scored[1] == "reward   talk (2 rows): scored by form, length (weight 0)"
    assert scored[2].endswith("(2 rows): scored by exact_match, length (weight 0), probe")
    drawn = lines_of(out, "drawn")
    assert drawn[0].startswith(
        "drawn    weight 3, 75.0% of the prompts: 3 of 4 prompts an iteration, 1 epochs; 40 epochs"
    )
    assert (
        drawn[1].startswith("drawn    weight 1, 25.0% of the prompts: 1 of 4") and len(drawn) == 2
    )
    assert "overlap: 1 of 2 held-out prompts are training prompts" in out
    assert f"as it runs (13 tokens): {tmp_path}/sums.jsonl:1\n  | <s>user:1+2\n  | ai:\n" in out
    notes = lines_of(err, "note: ")
    assert len(notes) == 3 and "special tokens written in their own text" in notes[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.max_refused_share=0.3", r"words.jsonl: 1 of 3 rows refused"),
        ("data.max_overlap=0", "data.max_overlap is 0"),
        ("rollout.prompts_per_iteration=100", "rollout.prompts_per_iteration is 100"),
        ("reward.scorers=[{name: exact_match, only: [number]}]", "words.jsonl:1: the row's reward"),
        ("eval.probes=[{name: format, pattern: b, only: [none]}]", "eval.probes.0.only: no usable"),
        ("data.template=nowhere.jinja", "nowhere.jinja does not exist"),
        ("data.trian=x", "data.trian"),
        ("--what", "unknown option --what"),
        ("model.path=/nowhere", "/nowhere"),
    ],
)
def test_what_a_run_would_refuse_is_one_line_and_code_2(arguments, capsys, change, says):
    assert main([*arguments, change]) == 2
    out, err = capsys.readouterr()
    (line,) = lines_of(err, "megarl: error: ")
    assert says in line and not out and "Traceback" not in err


def test_help_teaches_and_nothing_asked_is_an_error(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "python -m megarl.data RECIPE" in told and "Exit codes" in told
    assert main([]) == 2


def test_no_trainer_or_generator_is_loaded():
    """The tokenizer's library may load torch; ranks, megatron and SGLang are a run's."""
    code = (
        "import sys, megarl.data.__main__, megarl.data.report; "
        "sys.exit(', '.join({'torch', 'megatron', 'sglang', 'megarl.world'} & set(sys.modules)) "
        "or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
