"""Damaged checkpoints and models are noticed, whatever the damage; a run resumes from the last good one."""

import json
import shutil
from pathlib import Path

import pytest

from nystromformer.files import CHECKSUMS, damage_of, seal
from nystromformer.training.run import TRAINER_STATE, checkpoint_folder, last_checkpoint


def write_checkpoint(out: Path, step: int, best: int | None = None) -> Path:
    folder = checkpoint_folder(out, step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    (folder / "part").mkdir()
    (folder / "part" / "0.bin").write_bytes(b"a shard of it")
    (folder / TRAINER_STATE).write_text(json.dumps({"global_step": step, "best_global_step": best}))
    seal(folder)
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_state(folder: Path, text: str) -> None:
    """A state that is no state, with the right checksum."""
    (folder / TRAINER_STATE).write_text(text)
    seal(folder)


def become_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGES = {
    "a flipped bit": lambda folder: flip(folder / "model.safetensors"),
    "a flipped bit in a folder of it": lambda folder: flip(folder / "part" / "0.bin"),
    "a flipped bit in the checksums": lambda folder: flip(folder / CHECKSUMS),
    "cut short": lambda folder: (folder / "model.safetensors").write_bytes(b"\0"),
    "a missing file": lambda folder: (folder / "part" / "0.bin").unlink(),
    "no state": lambda folder: (folder / TRAINER_STATE).unlink(),
    "no checksums": lambda folder: (folder / CHECKSUMS).unlink(),
    "checksums of nothing": lambda folder: (folder / CHECKSUMS).write_text("{}"),
    "checksums that are a list": lambda folder: (folder / CHECKSUMS).write_text("[]"),
    "checksums that are numbers": lambda folder: (folder / CHECKSUMS).write_text('{"model.safetensors": 1}'),
    "a state of {}": lambda folder: (folder / TRAINER_STATE).write_text("{}"),
    "a state of {} with its checksum": lambda folder: write_state(folder, "{}"),
    "a state of [] with its checksum": lambda folder: write_state(folder, "[]"),
    "a state without JSON with its checksum": lambda folder: write_state(folder, "\0"),
    "an empty folder": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    "a file": become_file,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    good, last = write_checkpoint(tmp_path, 9), write_checkpoint(tmp_path, 39)
    assert last_checkpoint(tmp_path) == last
    damage(last)
    with pytest.warns(UserWarning, match=r"checkpoint-39 is damaged \(.+\): resuming from the one before"):
        assert last_checkpoint(tmp_path) == good


def test_a_checkpoint_whose_best_model_is_lost_is_passed_over(tmp_path):
    """Resuming from it would end with another model as the best one."""
    first, best, last = (write_checkpoint(tmp_path, step, best) for step, best in ((3, 3), (6, 6), (9, 6)))
    assert last_checkpoint(tmp_path) == last
    flip(best / "model.safetensors")
    with pytest.warns(UserWarning, match="the best model so far, that of step 6, is lost: model.safetensors is not"):
        assert last_checkpoint(tmp_path) == first


def test_files_that_came_later_are_no_damage(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    (folder / "notes.txt").write_text("mine")
    assert damage_of(folder) is None
