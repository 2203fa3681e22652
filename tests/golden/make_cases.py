"""Makes the JSON files of `tests/golden/`, once: the files are committed and read by the tests.

    python -m tests.golden.make_cases

Nothing of megarl is used. What is written by hand: the rendered prompts (text, and ids of special
tokens where the template puts them), the ids the engine is offered one by one, how many of them
are the response, how it ended, and what a scorer reads. Sentencepiece itself gives the ids of plain
text, and a loop lays sequences behind each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

HERE = Path(__file__).parent
BOS, EOS, END, NEWLINE = 1, 2, 3, 4
PIECES = SentencePieceProcessor(model_file=str(HERE / "tokenizer" / "tokenizer.model"))
ASSISTANT = "\n<|assistant|>\n"
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "[INST] {{ message['content'] }} [/INST]{% endfor %}"
)


def ids_of(*parts: str | int) -> list[int]:
    """Plain text by sentencepiece, ids as they are."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else PIECES.encode(part)
    return ids


def asked(*parts: str | int) -> list[int]:
    """One question under Zephyr's template; BOS is the tokenizer's."""
    return ids_of(BOS, "<|user|>\n", *parts, EOS, ASSISTANT)


def sample(
    prompt: Any,
    prompt_ids: list[int],
    offered: list[int],
    kept: int,
    end: tuple[str, str],
    text: str | None,
    **more: Any,
) -> dict[str, Any]:
    """`kept` of the `offered` ids are the response. `text` None: no scorer may be asked."""
    return {
        "prompt": prompt,
        **more,
        "prompt_ids": prompt_ids,
        "engine_offered": offered,
        "response_ids": offered[:kept],
        "end": end[0],
        "end_reason": end[1],
        "scorer": None if text is None else {"text": text, "finished": end[0] == "terminated"},
    }


def laid_out(samples: list[dict[str, Any]], pad_to: int | None) -> dict[str, Any]:
    """What actor, reference and critic see of all samples in one pack, by a plain loop."""
    pack: dict[str, Any] = {
        name: []
        for name in ("token_ids", "positions", "predictors", "targets", "action_mask", "sequence")
    }
    pack["cu_seqlens"] = [0]
    critic: dict[str, Any] = {"value_positions": [], "bootstrap_positions": []}
    for number, one in enumerate(samples):
        prompt, response = one["prompt_ids"], one["response_ids"]
        start = len(pack["token_ids"])
        for position, id_ in enumerate(prompt + response):
            if position >= len(prompt):
                pack["predictors"].append(start + position - 1)
                pack["targets"].append(id_)
                pack["action_mask"].append(True)
                pack["sequence"].append(number)
            pack["token_ids"].append(id_)
            pack["positions"].append(position)
        pack["cu_seqlens"].append(len(pack["token_ids"]))
        terminal = one["end"] == "terminated"
        critic["bootstrap_positions"].append(None if terminal else len(pack["token_ids"]) - 1)
    critic["value_positions"] = list(pack["predictors"])
    longest = max(len(one["prompt_ids"] + one["response_ids"]) for one in samples)
    while pad_to is not None and len(pack["token_ids"]) < pad_to:
        pack["positions"].append(
            (len(pack["token_ids"]) - pack["cu_seqlens"][len(samples)]) % longest
        )
        pack["token_ids"].append(0)
    if pad_to is not None and pad_to > pack["cu_seqlens"][-1]:
        pack["cu_seqlens"].append(pad_to)
    return {"pack": pack, "critic": critic}


def case(name: str, about: str, samples: list[dict[str, Any]], **more: Any) -> None:
    """Writes one file; every list of numbers on a line of its own."""
    pad_to = more.get("pad_to")
    whole = {"about": about, **more, "samples": samples, **laid_out(samples, pad_to)}
    (HERE / f"{name}.json").write_text(_text(whole) + "\n", encoding="utf-8")


def _text(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


EOS_END, STOP_END, CUT = ("terminated", "eos"), ("terminated", "stop"), ("truncated", "max_tokens")
SUM, SUM_IDS = "What is 23 + 45?", asked("What is 23 + 45?")
TIMES, TIMES_IDS = "What is 8 times 7?", asked("What is 8 times 7?")
SKY, SKY_IDS = "Name a colour of the sky.", asked("Name a colour of the sky.")


def main() -> None:
    lone = sample(TIMES, TIMES_IDS, ids_of(" 56", EOS, " and"), 4, EOS_END, " 56")
    sum_ = sample(SUM, SUM_IDS, ids_of("The answer is 68.", EOS), 8, EOS_END, "The answer is 68.")
    case(
        "padding_side",
        "Padding goes behind what was sampled, as a sequence of its own; nothing of it is scored.",
        [lone],
        pad_to=len(TIMES_IDS) + 4 + 6,
    )
    case(
        "packed",
        "Two sequences in one pack: positions begin anew, and the first prompt's neighbour is no "
        "target.",
        [lone, sum_],
    )
    case(
        "over_long",
        "A prompt of exactly max_prompt_tokens passes whole; one more is refused, never cut.",
        [sum_],
        max_prompt_tokens=len(SUM_IDS),
        refused=[{"prompt": SUM + "?", "kind": "too_long"}],
    )
    talk = [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": "The answer is 68."},
        {"role": "user", "content": "And what about 9 + 9?"},
    ]
    system = ids_of(BOS, "<|system|>\nYou are a careful assistant.", EOS, "\n")
    turns = system + ids_of("<|user|>\n" + SUM, EOS, ASSISTANT + "The answer is 68.", EOS)
    turns += ids_of("\n<|user|>\nAnd what about 9 + 9?", EOS, ASSISTANT)
    case(
        "multi_turn",
        "Earlier turns are prompt, the assistant's too: their EOS ids end nothing and nothing of "
        "them is an action. A recipe's system prompt comes first.",
        [
            sample(talk, turns, ids_of("It is 18.", EOS), 7, EOS_END, "It is 18."),
            sample(
                SUM,
                system + ids_of("<|user|>\n" + SUM, EOS, ASSISTANT),
                ids_of(" 68", EOS),
                4,
                EOS_END,
                " 68",
                system_prompt="You are a careful assistant.",
            ),
        ],
    )
    case(
        "several_eos",
        "Every declared end-of-sequence id ends a response, stays in it, and is an action.",
        [
            sample(SKY, SKY_IDS, ids_of(" blue", END, " or grey"), 3, EOS_END, " blue"),
            sample(SKY, SKY_IDS, ids_of(" grey", EOS, END), 3, EOS_END, " grey"),
        ],
        config={"eos_token_id": [EOS, END]},
    )
    case(
        "stop_token",
        "A stop text of one token ends a response, stays in it, is an action and is read by the "
        "scorer; the same id in a prompt ends nothing.",
        [sample(SUM, SUM_IDS, ids_of(" 68", NEWLINE, "<|user|>"), 4, STOP_END, " 68\n")],
        stop=["\n"],
    )
    long = ids_of("The answer is 68.", EOS)
    case(
        "truncated",
        "Cut at max_response_tokens: the ids stay the engine's, no EOS is put at the end. An EOS "
        "that comes exactly at the limit is an end.",
        [
            sample(SUM, SUM_IDS, long, 4, CUT, "The answer is "),
            sample(TIMES, TIMES_IDS, ids_of(" 56", EOS), 4, EOS_END, " 56"),
        ],
        max_response_tokens=4,
    )
    case(
        "pad_is_eos",
        "The tokenizer pads with EOS: the EOS that was sampled is trained on all the same, and "
        "padding is told by length, never by id.",
        [sample(TIMES, TIMES_IDS, ids_of(" 56", EOS), 4, EOS_END, " 56")],
        tokenizer={"pad_token": "</s>"},
        pad_to=len(TIMES_IDS) + 4 + 3,
    )
    case(
        "bos_once",
        "The template writes BOS and the tokenizer prepends another: there is one.",
        [
            sample(
                SKY,
                ids_of(BOS, "[INST] " + SKY + " [/INST]"),
                ids_of(" blue", EOS),
                3,
                EOS_END,
                " blue",
            )
        ],
        tokenizer={"chat_template": LLAMA_LIKE},
    )
    case(
        "special_middle",
        "Special ids that end nothing stay where they were sampled, as actions; scorers read the "
        "text without them. A special token that a user types is that token.",
        [
            sample(
                "What is</s> it?",
                asked("What is", EOS, " it?"),
                ids_of(" blue", END, BOS, " sky", EOS),
                6,
                EOS_END,
                " blue sky",
            )
        ],
    )
    case(
        "unknown_id",
        "The model has more rows than the tokenizer has pieces. Such an id is a fact as sampled, "
        "but no text: no scorer is asked, and the sample is refused for training.",
        [
            sample(
                SUM, SUM_IDS, ids_of(" 6", PIECES.get_piece_size() + 2, "8", EOS), 5, EOS_END, None
            ),
            sample(SUM, SUM_IDS, ids_of(" 68", EOS), 4, EOS_END, " 68"),
        ],
        config={"vocab_size": PIECES.get_piece_size() + 8},
    )
    case(
        "bytes",
        "A character outside the pieces is its bytes. Cut inside it, the scorer reads U+FFFD for "
        "each of its bytes, and the ids are what they were.",
        [
            sample(SKY, SKY_IDS, ids_of(" ☃", EOS), 5, EOS_END, " ☃"),
            sample(SKY, SKY_IDS, ids_of(" blue b☃"), 5, CUT, " blue b\ufffd\ufffd"),
        ],
        max_response_tokens=5,
    )


if __name__ == "__main__":
    main()
