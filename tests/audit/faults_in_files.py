"""Faults in the bytes of sealed files, with nothing above them made right, but where it says so."""

from __future__ import annotations

import json
import shutil

from megarl.experience.manifest import experience_hash_of
from tests.audit.fault import fault
from tests.audit.forge import Forger


@fault("parts", "rollout_0")
def a_flipped_bit_in_tokens(forger: Forger) -> None:
    forger.flip(1, "rollout_0", "response_ids")


@fault("parts", "rollout_1")
def a_flipped_bit_in_a_generator_log_prob(forger: Forger) -> None:
    forger.flip(1, "rollout_1", "rollout_log_probs")


@fault("parts", "scored_0")
def a_flipped_bit_in_a_trainer_log_prob(forger: Forger) -> None:
    forger.flip(0, "scored_0", "old_log_probs")


@fault("parts", "rollout_0")
def a_flipped_bit_in_a_reward(forger: Forger) -> None:
    forger.flip(2, "rollout_0", "reward.total")


@fault("parts", "rollout_0")
def a_flipped_bit_in_a_mask(forger: Forger) -> None:
    forger.flip(2, "rollout_0", "action_mask")


@fault("parts", "rollout_0")
def a_flipped_bit_in_a_clock(forger: Forger) -> None:
    forger.flip(2, "rollout_0", "started")


@fault("parts", "derived_0")
def a_flipped_bit_in_an_advantage(forger: Forger) -> None:
    forger.flip(2, "derived_0", "advantages")


@fault("manifest chain", "experience_hash")
def a_changed_word_in_a_manifest(forger: Forger) -> None:
    forger.manifest(1, lambda told: told.update(samples=told["samples"] + 1))


@fault("chain", "previous")
def a_manifest_sealed_at_another_time(forger: Forger) -> None:
    forger.manifest(1, lambda told: told.update(sealed_at=told["sealed_at"] + 1e-3))


@fault("parts", "rollout_1")
def a_deleted_part(forger: Forger) -> None:
    (forger.folder(1) / "rollout_1.safetensors").unlink()


@fault("parts", "bytes")
def a_truncated_part(forger: Forger) -> None:
    path = forger.folder(1) / "scored_0.safetensors"
    forger.write(path, path.read_bytes()[:-100])


@fault("parts", "rollout_0")
def part_files_that_changed_places(forger: Forger) -> None:
    _swap_files(forger)


@fault("parts", "index")
def part_files_that_changed_places_and_a_manifest_that_follows(forger: Forger) -> None:
    _swap_files(forger)

    def follow(told: dict) -> None:
        parts = {part["file"]: part for part in told["parts"]}
        one, other = (parts[f"rollout_{index}.safetensors"] for index in (0, 1))
        for key in ("blake3", "bytes", "content", "rows", "tokens"):
            one[key], other[key] = other[key], one[key]

    forger.manifest(1, follow)
    contents = json.loads((forger.folder(1) / "manifest.json").read_text())["parts"]
    forger.manifest(1, lambda t: t.update(contents={p["file"]: p["content"] for p in contents}))
    _rehash(forger, 1)
    forger.rechain()


def _swap_files(forger: Forger) -> None:
    one, other = (forger.folder(1) / f"rollout_{index}.safetensors" for index in (0, 1))
    spare = forger.folder(1) / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def _rehash(forger: Forger, iteration: int) -> None:
    forger.manifest(iteration, lambda t: t.update(experience_hash=experience_hash_of(t)))
    sealed = json.loads((forger.folder(iteration) / "manifest.json").read_text())
    path = forger.folder(iteration) / "derived.json"
    forger.json(path, lambda t: t.update(experience_hash=sealed["experience_hash"]))


@fault("parts", "no manifest lists it")
def a_file_that_nobody_sealed(forger: Forger) -> None:
    shutil.copy(forger.folder(1) / "rollout_0.safetensors", forger.folder(1) / "rollout_7")


@fault("manifest", "lists 0 drawn parts", maybe="joins")
def a_manifest_without_how_samples_were_drawn(forger: Forger) -> None:
    def leave_out(told: dict) -> None:
        told["parts"] = [part for part in told["parts"] if part["kind"] != "drawn"]

    (forger.folder(1) / "drawn.json").unlink()
    forger.manifest(1, leave_out)
    forger.all_hashes(1)


@fault("strays", "iter_1: is no iteration's folder")
def a_twin_of_an_iteration(forger: Forger) -> None:
    shutil.copytree(forger.folder(1), forger.run / "experience" / "iter_1")


@fault("strays", "iter_0000001: is no iteration's folder")
def a_twin_with_more_zeros(forger: Forger) -> None:
    shutil.copytree(forger.folder(1), forger.run / "experience" / "iter_0000001")


@fault("strays", "iter_abc: is no iteration's folder")
def a_folder_of_no_iteration(forger: Forger) -> None:
    (forger.run / "experience" / "iter_abc").mkdir()


@fault("parts", "derived.json: not JSON")
def a_derived_list_that_is_empty(forger: Forger) -> None:
    forger.write(forger.folder(1) / "derived.json", "")


@fault("parts", "derived.json: no format, not format 2")
def a_derived_list_that_is_no_object(forger: Forger) -> None:
    forger.write(forger.folder(1) / "derived.json", "[]")


@fault("parts", "derived.json: not a list of derived parts: a value in it is of another kind")
def a_derived_list_of_nothing(forger: Forger) -> None:
    forger.json(forger.folder(1) / "derived.json", lambda told: told.update(parts=None))


@fault("parts", "derived.json: not JSON")
def a_derived_list_without_end(forger: Forger) -> None:
    forger.write(forger.folder(1) / "derived.json", "[" * 100_000)


@fault("manifest", "manifest.json: not JSON")
def a_manifest_without_end(forger: Forger) -> None:
    forger.write(forger.folder(2) / "manifest.json", "[" * 100_000)


@fault("manifest", "manifest.json: cannot be read: Is a directory")
def a_manifest_that_is_a_folder(forger: Forger) -> None:
    (forger.folder(1) / "manifest.json").unlink()
    (forger.folder(1) / "manifest.json").mkdir()


@fault("manifest", "parts: rows is 'many'")
def a_manifest_with_a_word_for_a_number(forger: Forger) -> None:
    forger.manifest(2, lambda told: told["parts"][0].update(rows="many"))


@fault("setting", "data.json: is missing")
def no_word_about_the_data(forger: Forger) -> None:
    (forger.run / "data.json").unlink()


@fault("setting", "environment.json: is not JSON")
def no_word_about_the_machine(forger: Forger) -> None:
    forger.write(forger.run / "environment.json", "{")


@fault("export", "holds no weights")
def no_exported_model(forger: Forger) -> None:
    shutil.rmtree(forger.run / "hf")


@fault("export", "is not what versions.jsonl:")
def an_exported_model_with_one_other_bit(forger: Forger) -> None:
    path = sorted((forger.run / "hf").glob("*.safetensors"))[0]
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    forger.write(path, bytes(body))
