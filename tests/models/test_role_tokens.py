"""A critic and a reference read the actor's token ids: whatever kind of tokenizer tells them.

Not covered: that the weights fit the tokenizer beside them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sentencepiece import sentencepiece_model_pb2

from megarl.contracts.errors import InputError
from megarl.contracts.pieces import read_pieces
from megarl.contracts.tokens import Tokens
from megarl.models.critic_spec import refuse_other_tokens
from megarl.process import main
from tests.models.support import write_hf_model

GOLDEN = Path("tests/golden/tokenizer")


def _like(folder: Path, to: Path) -> Path:
    """A copy of the tokenizer files in `folder`, beside what is in `to`."""
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, to)
    return to


def _swapped(folder: Path, a: str = "1", b: str = "2") -> tuple[int, int]:
    """Exchange two pieces of the folder's tokenizer.model; returns their ids, rising."""
    path = folder / "tokenizer.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    number = {piece.piece: at for at, piece in enumerate(model.pieces)}
    model.pieces[number[a]].piece, model.pieces[number[b]].piece = b, a
    path.write_bytes(model.SerializeToString())
    return tuple(sorted((number[a], number[b])))


def _words(folder: Path, vocab: dict[str, int]) -> Path:
    from tokenizers import Tokenizer, models

    folder.mkdir()
    Tokenizer(models.WordLevel(vocab, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def _refused(key: str, folder: Path, actor: Path) -> str:
    with pytest.raises(InputError) as error:
        refuse_other_tokens(key, folder, actor)
    text = str(error.value)
    assert text.startswith(f"{key}: ") and str(folder) in text and "\n" not in text, text
    return text


def test_pieces_are_those_of_transformers(tmp_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    told = {number: token for token, number in tokenizer.get_vocab().items()}
    assert read_pieces(GOLDEN).by_id == told
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path)
    pieces = read_pieces(tmp_path)
    assert pieces.by_id == told | {len(told): "<tool>"}
    # The same tokenizer in another format, and with a token more, has the actor's ids.
    assert pieces.file.name == "tokenizer.json"
    assert refuse_other_tokens("critic.path", tmp_path, GOLDEN)
    shutil.copy(GOLDEN / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(GOLDEN / "tokenizer_config.json", tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": len(told)}))
    assert read_pieces(tmp_path).by_id == told | {len(told): "<tool>"}
    again = AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert {number: token for token, number in again.items()} == read_pieces(tmp_path).by_id


@pytest.mark.parametrize("key", ["critic.path", "reference.path"])
def test_swapped_pieces_of_sentencepiece_are_refused(tmp_path, key) -> None:
    (tmp_path / "other").mkdir()
    other = _like(GOLDEN, tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ 1 }}"}))
    assert refuse_other_tokens(key, other, GOLDEN)
    first, _ = _swapped(other)
    piece = read_pieces(GOLDEN).by_id[first]
    text = _refused(key, other, GOLDEN)
    assert (
        f"id {first} is {'2' if piece == '1' else '1'!r}, " in text and f"it is {piece!r};" in text
    )


def test_other_ids_in_a_tokenizer_json_are_refused(tmp_path) -> None:
    from tokenizers import Tokenizer, models

    actor = _words(tmp_path / "actor", {"a": 0, "b": 1, "c": 2})
    more = _words(tmp_path / "more", {"a": 0, "b": 1, "c": 2, "d": 3})
    other = _words(tmp_path / "other", {"a": 0, "b": 2, "c": 1, "d": 3})
    assert refuse_other_tokens("critic.path", more, actor)
    assert refuse_other_tokens("critic.path", actor, more)
    assert "id 1 is 'c', " in _refused("critic.path", other, actor)
    (tmp_path / "none").mkdir()
    assert not refuse_other_tokens("critic.path", tmp_path / "none", actor)
    pieces = Tokenizer(models.Unigram([("a", 0.0), ("c", -1.0)], unk_id=0))
    pieces.add_special_tokens(["b"])
    pieces.save(str(tmp_path / "none" / "tokenizer.json"))
    assert "id 1 is 'c', " in _refused("critic.path", tmp_path / "none", actor)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_files_that_are_no_tokenizer_are_named(tmp_path, name) -> None:
    (tmp_path / name).write_text("[3]" if name != "tokenizer.model" else "aGk= 0\n")
    assert f"{name}: not a" in _refused("reference.path", tmp_path, GOLDEN)


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("actor")
    write_hf_model(folder, "llama", vocab_size=Tokens.load(GOLDEN).vocab_size)
    return _like(GOLDEN, folder)


@pytest.mark.parametrize(
    "key, more",
    [
        ("critic.path", ["algorithm.name=ppo"]),
        ("reference.path", ["algorithm.kl.beta=0.1"]),
    ],
)
def test_a_launch_refuses_them_before_there_are_weights(
    tmp_path, actor, capsys, monkeypatch, key, more
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    role = tmp_path / "role"
    shutil.copytree(actor, role)
    _swapped(role)
    start = ["recipes/quickstart.yaml", f"model.path={actor}", f"run.folder={tmp_path}"]
    start += ["world.ranks=1", "actor.tp=1", "rollout.tp=1", f"{key}={role}", *more]
    assert main(start) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{key}: in {role / 'tokenizer.model'} id " in line
    # Without a tokenizer its ids are taken for the actor's, which is said.
    for path in role.glob("tokenizer*"):
        path.unlink()
    (tmp_path / "quickstart-s1").write_text("in the way: the launch ends behind this check")
    assert main(start) == 2
    note, line = capsys.readouterr().err.splitlines()
    assert note.startswith(f"megarl: {key}: {role} has no tokenizer; ")
    assert "error" in line and key not in line
