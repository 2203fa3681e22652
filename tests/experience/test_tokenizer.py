"""A run's copy of its tokenizer means the same ids, and another contract is refused.

Not covered: tokenizers with code of their own (never loaded), slow ones without a file listed in
`TOKENIZER_FILES`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.contracts.samples import SamplingContract
from megarl.contracts.tokens import Tokens, TokensError
from megarl.experience.store import SealHeader
from megarl.experience.tokenizer import check_same_contract, differing_files, keep_tokenizer
from tests.contracts.tokenizer_folders import (
    character_folder,
    metaspace_folder,
    sentencepiece_folder,
    write_config,
)

MAKE = {
    "sentencepiece": sentencepiece_folder,
    "tokenizer.json": lambda folder: character_folder(folder, "{{ messages[0]['content'] }}"),
    "metaspace": metaspace_folder,
}


def _header(tokenizer_hash: str) -> SealHeader:
    return SealHeader(
        run_id="old",
        iteration=4,
        producers={"rollout": "aaa", "old": "aaa"},
        tokenizer_hash=tokenizer_hash,
        recipe_hash="sha256:r",
        sampling=SamplingContract(4, 1.0, 16, (2,), 1, "float32", "torch_native"),
        scorer_version="s",
        samples=8,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = sentencepiece_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2], "top_p": 0.9}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    keep_tokenizer(Tokens.load(folder), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("kind", list(MAKE))
def test_the_copy_is_the_same_contract(kind: str, tmp_path: Path) -> None:
    tokens = Tokens.load(MAKE[kind](tmp_path / "model"))
    (tmp_path / "run").mkdir()
    keep_tokenizer(tokens, tmp_path / "run")
    copy = Tokens.load(tmp_path / "run" / "tokenizer")
    assert copy.hash == tokens.hash
    assert copy.render("What is 23 + 45?") == tokens.render("What is 23 + 45?")
    check_same_contract(_header(tokens.hash), copy)


def test_the_copy_is_read_only_whole_and_without_weights(run: Path, folder: Path) -> None:
    kept = {path.name: path for path in (run / "tokenizer").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.model"} <= kept.keys()
    assert "model.safetensors" not in kept
    for name, path in kept.items():
        assert path.stat().st_mode & 0o777 == 0o444
        assert path.read_bytes() == (folder / name).read_bytes()
    assert [path.name for path in run.iterdir()] == ["tokenizer"]


def test_a_run_goes_on_with_the_same_tokenizer_wherever_it_lies(
    run: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "moved" / "generation_config.json").write_text('{"eos_token_id": [2]}')
    keep_tokenizer(Tokens.load(tmp_path / "moved"), run)


def _template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("Q: ", "Question: "))


def _eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')


def _added(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


CHANGES: dict[str, Callable[[Path], object]] = {
    "tokenizer_config.json differs": _template,
    "generation_config.json has eos_token_id [2, 3], it was [2]": _eos,
    "chat_template.jinja is only in": _added,
    "config.json has vocab_size 320, it was 304": lambda f: write_config(f, vocab_size=320),
}


@pytest.mark.parametrize("told", list(CHANGES))
def test_another_contract_is_refused_and_the_file_named(told: str, run: Path, folder: Path) -> None:
    before = Tokens.load(folder)
    CHANGES[told](folder)
    after = Tokens.load(folder)
    assert after.hash != before.hash
    with pytest.raises(TokensError, match="begun with another tokenizer") as error:
        keep_tokenizer(after, run)
    assert told in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(TokensError) as error:
        check_same_contract(_header(before.hash), after, run)
    message = str(error.value)
    assert "iteration 4 of old" in message and before.hash in message and after.hash in message
    assert told in message
    with pytest.raises(TokensError, match=f"{before.hash}, .* is {after.hash}: its ids"):
        check_same_contract(_header(before.hash), after)


def test_a_hash_that_no_file_explains_says_so(run: Path, folder: Path) -> None:
    with pytest.raises(TokensError, match="yet .*tokenizer has the same files"):
        check_same_contract(_header("sha256:x"), Tokens.load(folder), run)


def test_a_file_that_is_gone_is_named(run: Path, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert f"tokenizer_config.json is missing in {folder}" in differing_files(
        run / "tokenizer", folder
    )


def test_a_copy_that_was_interrupted_is_made_again(folder: Path, tmp_path: Path) -> None:
    tokens, run = Tokens.load(folder), tmp_path / "run"
    (run / "tokenizer.tmp").mkdir(parents=True)
    (run / "tokenizer.tmp" / "config.json").write_text(json.dumps({"half": 1}))
    (run / "tokenizer.tmp" / "config.json").chmod(0o444)
    keep_tokenizer(tokens, run)
    assert Tokens.load(run / "tokenizer").hash == tokens.hash
