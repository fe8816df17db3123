"""What a run of Long Range Arena starts from: weights of another run, which has been trained to its end.

Either its self-pretraining on the same data, so that several seeds share one (`--from`), or its trained model, so that
a hard task is learned after an easier one of the same kind (`--after`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nystromformer.files import CHECKSUMS, damage_of, read_object
from nystromformer.models.lra import LongRangeArenaConfig, NystromformerForLongRangeArena
from nystromformer.models.model import quiet_transformers
from nystromformer.records import read_config, result_in
from nystromformer.training.run import MODEL
from nystromformer.training.self_pretraining import FOLDER

ENCODER = ("task", "attention", "max_length", "positions", "conv_kernel_size", "embedding_start")
"""What a run must share with the one that it starts from."""

COUNTED = ("step", "examples_seen", "tokens")
"""What training costs."""


@dataclass(frozen=True)
class Start:
    """The weights of a finished run, and what they cost."""

    option: str
    """By which it was given."""
    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    """Its last record."""
    weights: str
    """The first digits of their checksum."""

    @classmethod
    def self_pretrained(cls, run: str | Path) -> "Start":
        """The self-pretraining of the run in the folder `run`, or in that folder itself."""
        folder = Path(run, FOLDER) if Path(run, FOLDER).is_dir() else Path(run)
        config = read_config(folder)
        if config is None or "masked" not in config:
            raise ValueError(f"--from {run}: holds no self-pretraining; give a run made with --self-pretrain STEPS.")
        return cls._finished("--from", run, folder, config, "self-pretraining")

    @classmethod
    def trained(cls, run: str | Path) -> "Start":
        """The model of the run in the folder `run`, which was best on its development part."""
        config = read_config(Path(run))
        if config is None or "legacy" not in config:
            raise ValueError(f"--after {run}: holds no run of lra; give the folder of a single one.")
        return cls._finished("--after", run, Path(run), config, "training")

    @classmethod
    def _finished(cls, option: str, run: str | Path, folder: Path, config: dict[str, Any], part: str) -> "Start":
        result = result_in(folder)
        if result is None or (damage := damage_of(folder / MODEL)) is not None:
            state = "not finished" if result is None else f"damaged ({damage})"
            raise ValueError(f"{option} {run}: its {part} is {state}; train it to its end with --resume.")
        untold = [name for name in COUNTED if not isinstance(result.get(name), int)]
        if untold:
            raise ValueError(f"{option} {run}: its result does not tell {' and '.join(untold)}; train it again.")
        checksum = read_object(folder / MODEL / CHECKSUMS)["model.safetensors"]
        return cls(option, folder, config, result, checksum[:16])

    @property
    def is_trained(self) -> bool:
        """With a classifier, that is; otherwise it has told masked tokens."""
        return "masked" not in self.config

    def noted(self) -> dict[str, str]:
        """As it stands in `config.json` of the run that starts from it."""
        return {"after" if self.is_trained else "pretrained": self.weights}

    def budget(self) -> dict[str, dict[str, Any]]:
        """What it cost, as the record of the run that starts from it tells: all runs that led here, self-pretraining
        by itself."""
        own = {name: self.result[name] for name in COUNTED}
        if not self.is_trained:
            return {"pretraining": own | {"masked_accuracy": self.result["value"]}}
        earlier = self.result.get("after", {})
        own = {name: own[name] + earlier.get(name, 0) for name in COUNTED}
        inherited = {name: self.result[name] for name in ("pretraining",) if name in self.result}
        return inherited | {"after": own | {"accuracy": self.result["value"]}}

    def check_model(self, config: dict[str, Any]) -> None:
        """Raise `ValueError` for a run of another model."""
        for name in ENCODER + ("normalize_pooled",) * self.is_trained:
            has, wants = self.config.get(name), config.get(name)
            if has != wants:
                raise ValueError(
                    f"{self.option} {self.folder}: trained with {name}={has!r}, but this run has {name}={wants!r}; "
                    f"give the same, or leave {self.option} out."
                )

    def check_data(self, fingerprint: str) -> None:
        """Raise `ValueError` for a self-pretraining on other examples: those of the test part could be among them."""
        if not self.is_trained and self.config["data"] != fingerprint:
            raise ValueError(
                f"{self.option} {self.folder}: pretrained on other data (fingerprint {self.config['data']}, here "
                f"{fingerprint}); give the same --data, or leave {self.option} out."
            )

    def classifier(self, config: LongRangeArenaConfig) -> NystromformerForLongRangeArena:
        """The task's model with these weights: those of the encoder, and of the classifier where there is one."""
        with quiet_transformers():  # after self-pretraining the heads differ, as they should
            return NystromformerForLongRangeArena.from_pretrained(self.folder / MODEL, config=config)
