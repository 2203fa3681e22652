"""Jinja files as chat templates. The oracle is a model folder that has the same one as its own.

BOS rules of a model's own template are in `tests/known_faults/test_data.py`. Not covered: tools and
documents in messages.
"""

from __future__ import annotations

import pytest

from megarl.contracts.tokens import Tokens, TokensError
from tests.contracts.tokenizer_folders import character_folder
from tests.data.prompt_files import TEMPLATE, load, write

JINJA = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
JINJA += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def test_a_jinja_file_renders_as_a_models_own_template_does(tokens, tmp_path):
    """The oracle is a folder that has the same template as its own."""
    file = tmp_path / "chat.jinja"
    file.write_text(JINJA)
    own = Tokens.load(character_folder(tmp_path / "own", JINJA))
    path = write(tmp_path / "rows.jsonl", {"prompt": "hi", "answer": "1"})
    keys = {"system_prompt": "be", "max_prompt_tokens": 100}
    ours, theirs = load(path, tokens, template=str(file), **keys), load(path, own, **keys)
    assert ours.rows == theirs.rows and ours.fingerprint == theirs.fingerprint
    assert tokens.decode(ours.rows[0].token_ids) == "[system]be[user]hi[assistant]"
    assert ours.rows[0].token_ids[0] == 0 and ours.rows[0].token_ids.count(0) == 1
    assert ours.template_hash == theirs.template_hash
    assert ours.template_hash != load(path, tokens).template_hash
    assert tokens.render("hi", str(file)) == tokens.render("hi", tokens.template(str(file)))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (None, "nowhere.jinja does not exist; give the path of a Jinja file"),
        (b"  \n", "is empty; for plain text set data.template"),
        (b"{{ x }}\xff", r"is not UTF-8 \(byte 7\); save it"),
        (b"fine\n{% for m in messages %}\n{{ m.content }}", r"jinja:3: .*for.*; correct it"),
        (b"{{ a b }}", r"jinja:1: .*; correct it"),
    ],
)
def test_a_template_that_is_none_is_one_line(tokens, tmp_path, body, says):
    path = write(tmp_path / "rows.jsonl", {"prompt": "hi", "answer": "1"})
    file = tmp_path / "nowhere.jinja"
    if body is not None:
        file.write_bytes(body)
    with pytest.raises(TokensError, match=says) as caught:
        load(path, tokens, template=str(file))
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_template_folder_cannot_be_read(tokens, tmp_path):
    with pytest.raises(TokensError, match="cannot be read: Is a directory"):
        tokens.template(str(tmp_path))


@pytest.mark.parametrize(
    "expression", ["raise_exception('no')", "1 / 0", "'a' + 1", "messages[7].x"]
)
def test_what_a_template_refuses_is_the_rows_refusal(tokens, tmp_path, expression):
    """Whatever way it fails in; other rows pass."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% if messages[0].content == 'bad' %}{{ " + expression + " }}{% endif %}ok")
    rows = [{"prompt": text, "answer": "1"} for text in ("bad", "good")]
    loaded = load(write(tmp_path / "rows.jsonl", *rows), tokens, template=str(file))
    assert [row.text for row in loaded.rows] == ["good"] and loaded.refused == {"template": 1}
    assert "the chat template refuses these messages" in loaded.refusals[0].why


def test_the_date_in_a_template_is_one_and_the_same_on_all_days(tmp_path):
    """Llama 3.2's way to ask for it; of the folder's own template and of a file."""
    text = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'none' }}:"
    (tmp_path / "chat.jinja").write_text(text)
    tokens = Tokens.load(character_folder(tmp_path / "own", text))
    for name in ("model", str(tmp_path / "chat.jinja")):
        assert tokens.decode(tokens.render("hi", name)) == "26 Jul 2024:"
