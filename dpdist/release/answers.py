"""Answer single inputs and texts with a released model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.certification.predict import Predictor, to_model_input
from dpdist.core.errors import UserError
from dpdist.core.fields import PADDING
from dpdist.core.files import read_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.certification.certificate import Certificate
    from dpdist.certification.subject import Subject
    from dpdist.data.text import TextColumn
    from dpdist.models import ModelSpec
    from dpdist.release.description import ReleaseDescription


@dataclass(frozen=True)
class Answer:
    """The answer to one image.

    label: index of the class; -1 for ABSTAIN. name: that of the class; None for ABSTAIN. radius:
    changes of the input below it in `norm` do not change the answer of the smoothed classifier;
    incorrect with probability at most `alpha`, over the noise of this answer. sigma: standard
    deviation of the noise on the input; None if only the model's own noise certifies.
    """

    label: int
    name: str | None
    radius: float
    norm: str
    sigma: float | None
    alpha: float

    @property
    def abstain(self) -> bool:
        """Return whether the answer is ABSTAIN."""
        return self.label == -1

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        return asdict(self) | {"abstain": self.abstain}


class Answerer:
    """Answer inputs with one kind of certificate, with fresh secret noise for each call.

    It is not safe to share between threads.
    """

    def __init__(
        self,
        subject: Subject,
        description: ReleaseDescription,
        settings: Certificate,
        shape: tuple[int, ...],
    ) -> None:
        self._about, self._settings, self._shape = description, settings, shape
        try:
            self._predictor = Predictor(subject.model, settings, description.outputs, shape)
        except ValueError as error:
            raise UserError(f"{subject.where}: the model cannot be certified: {error}") from error

    def __call__(self, image: np.ndarray | Mapping[str, Any]) -> Answer:
        """Return the answer to one image, or one raw record of a table.

        image: an array of the model's input shape, uint8 or in [0, 1]; for a script's run, scaled
            as in its training. A record is a dict of its cells by column, or an array of numbers in
            the order of the features.

        Raises ValueError for an invalid image, and UserError for an invalid record.
        """
        shape = self._shape
        if self._about.data.columns.feature_rules or isinstance(image, Mapping):  # a raw record
            if (preprocessing := self._about.preprocessing()) is None:
                raise UserError("a record must be an array, as the model reads no columns")
            image = preprocessing.transform_record(image)
        bounded = not self._about.raw_inputs
        verdict = self._predictor.certify(to_model_input(image, shape, bounded=bounded))
        label = int(verdict.prediction)
        settings = self._settings
        return Answer(
            label,
            None if label == -1 else self._about.classes[label],
            float(verdict.radius),
            settings.norm,
            settings.sigma,
            settings.alpha,
        )


# --- answers to texts -------------------------------------------------------------------------


_SHOWN = 5  # most probable classes or tokens
_DRAWS = 16  # noise samples of a model with its own noise


@dataclass(frozen=True)
class TextAnswer:
    """The answer to one text.

    label, name: the class and its name; -1 and None for scores that are not finite, or if outputs
    are not classes. likely: names and softmax probabilities of the classes or next tokens, the most
    probable first. outputs: the outputs of a model without classes, else ().
    """

    label: int
    name: str | None
    likely: tuple[tuple[str, float], ...]
    outputs: tuple[float, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        if self.outputs:
            return {"outputs": list(self.outputs)}
        likely = [{"name": name, "probability": share} for name, share in self.likely]
        return {"label": self.label, "name": self.name, "likely": likely}


class TextAnswerer:
    """Answer texts with a model in evaluation mode.

    A model with its own noise answers with its mean scores over 16 noise samples, as for its clean
    accuracy.

    Args:
        model: maps float32 tokens (B, length) to logits (B, classes), or (B, length, tokens) for
            next tokens.
        column: turns texts into tokens; public as `column`.
        classes: names in the order of the logits; unused for next tokens.
        targets: data.targets of the recipe.
    """

    def __init__(
        self, model: nn.Module, column: TextColumn, classes: Sequence[str], targets: str
    ) -> None:
        self._model, self.column = model, column
        self._classes, self._targets = tuple(classes), targets

    def __call__(self, text: str) -> TextAnswer:
        """Return the answer to one text. Raises UserError for a text that cannot be continued."""
        import torch

        if self.column.predicts_next_token:
            scores = self.next_scores(self.column.tokenize_beginning(text))
            return self._class(scores, self.column.token_name)
        outputs = self._scores(torch.from_numpy(self.column.tokenize_one(text)))[0]
        if self._targets != "class":
            return TextAnswer(-1, None, (), tuple(outputs.tolist()))
        return self._class(outputs, self._classes.__getitem__)

    def next_scores(self, tokens: np.ndarray) -> Tensor:
        """Return the scores (tokens,) of the token after 1 to `length` tokens."""
        import torch

        row = np.full((1, self.column.length), PADDING, dtype=np.float32)
        row[0, : len(tokens)] = tokens
        return self._scores(torch.from_numpy(row))[0, len(tokens) - 1]

    def _scores(self, rows: Tensor) -> Tensor:
        import torch

        from dpdist.certification.worker import expected_log_scores
        from dpdist.randomness.noise_location import find_noise_location

        with torch.inference_mode():
            if find_noise_location(self._model).is_random:
                return expected_log_scores(self._model, rows, _DRAWS)
            found: Tensor = self._model(rows).double()
            return found

    def _class(self, scores: Tensor, name: Any) -> TextAnswer:
        from dpdist import models

        label = int(models.predicted_classes(scores))
        if label < 0:
            return TextAnswer(label, None, ())
        shares, places = scores.softmax(-1).topk(min(_SHOWN, len(scores)))
        likely = tuple(
            (name(place), share)
            for place, share in zip(places.tolist(), shares.tolist(), strict=True)
        )
        return TextAnswer(label, name(label), likely)


def check_text_column(column: TextColumn, spec: ModelSpec, context: Path) -> None:
    """Raise UserError unless a model of this description reads the tokens of `column`."""
    if spec.input_shape != (column.length,):
        raise UserError(
            f"{context}: text.length: must be {spec.input_shape[0]}, the input length of its "
            f"model, got {column.length}"
        )
    if spec.following != column.predicts_next_token:
        raise UserError(
            f"{context}: text.predict: must be {'next' if spec.following else 'label'}, as in its "
            "model"
        )
    if column.words is not None:
        lines = len(read_text(column.words.file).splitlines())
        if lines != len(column.words.token_ids):
            raise UserError(
                f"{context}: text.words: must be {lines:,}, the words in {column.words.file.name}, "
                f"got {column.words.count:,}"
            )
    if spec.following and column.vocabulary_size > spec.classes:
        raise UserError(
            f"{context}: its tokenizer must have at most the {spec.classes:,} tokens of its model, "
            f"got {column.vocabulary_size:,}"
        )
