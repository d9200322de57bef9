"""Answer single inputs and texts by a released model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.certification.predict import Predictor, to_model_input
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    PADDING,
)
from dpdist.core.files import (
    read_text,
)

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

    label: index of the class, -1 for ABSTAIN. name: of the class, None for ABSTAIN. radius: no
    change of the input below it in `norm` changes the answer of the smoothed classifier; wrong
    with probability at most `alpha`, over the noise drawn for this answer. sigma: of noise on
    the input; None where the model's own noise certifies.
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
    """Answers by one certificate, with fresh secret noise for each call.

    Not to be shared by threads.
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

        image: of the model's input shape, uint8 or numbers in [0, 1]; of a script's run, numbers as
        its training had them. A record is a dict of its cells by column, or an array of numbers in
        the order of the features. Raises ValueError for anything else, UserError for a record.
        """
        shape = self._shape
        rules = self._about.data.columns.feature_rules
        if rules or isinstance(image, Mapping):  # raw features, as their files hold them
            from dpdist.core.preprocessing import ColumnPreprocessing
            from dpdist.data.preprocessing import Preprocessing

            plain = dict.fromkeys(self._about.data.columns.features, ColumnPreprocessing())
            image = Preprocessing(rules or plain).transform_record(image)
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


_SHOWN = 5  # continuations, of all tokens
_DRAWS = 16  # of a model with noise of its own


@dataclass(frozen=True)
class TextAnswer:
    """The answer to one text.

    label, name: the class and its name; -1 and None where the model says none, or where outputs are
    no classes. likely: of the classes, or of the next tokens, names and probabilities by softmax,
    the most probable first. outputs: where they are no classes, the numbers; else ().
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
    """Answers to texts, by a model in evaluation mode.

    A model with noise of its own answers by its mean scores over 16 fresh draws, as its clean
    accuracy is measured.

    Args:
        model: float32 tokens (B, length) to logits (B, classes), or (B, length, tokens) of what
            comes next.
        column: makes tokens of texts.
        classes: names, in the order of the logits; those of next tokens are `column`'s.
        targets: data.targets of the recipe.
    """

    def __init__(
        self, model: nn.Module, column: TextColumn, classes: Sequence[str], targets: str
    ) -> None:
        self._model, self._column = model, column
        self._classes, self._targets = tuple(classes), targets

    def __call__(self, text: str) -> TextAnswer:
        """Return the answer to one text. Raises UserError for a text that cannot be continued."""
        import torch

        if self._column.predicts_next_token:
            scores = self.next_scores(self._column.tokenize_beginning(text))
            return self._class(scores, self._column.token_name)
        outputs = self._scores(torch.from_numpy(self._column.tokenize_one(text)))[0]
        if self._targets != "class":
            return TextAnswer(-1, None, (), tuple(outputs.tolist()))
        return self._class(outputs, self._classes.__getitem__)

    @property
    def column(self) -> TextColumn:
        """Return what makes tokens of texts."""
        return self._column

    def next_scores(self, tokens: np.ndarray) -> Tensor:
        """Return the scores (classes,) of the token that comes after 1 to `length` tokens."""
        import torch

        row = np.full((1, self._column.length), PADDING, dtype=np.float32)
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
    """Raise UserError unless a model of this description reads the tokens that `column` makes."""
    if spec.input_shape != (column.length,):
        raise UserError(
            f"{context}: text.length must be {spec.input_shape[0]}, the tokens that its model "
            f"reads, got {column.length}"
        )
    if spec.following != column.predicts_next_token:
        raise UserError(
            f"{context}: text.predict must be {'next' if spec.following else 'label'}, as its "
            "model answers"
        )
    if column.words is not None:
        lines = len(read_text(column.words.file).splitlines())
        if lines != len(column.words.token_ids):
            raise UserError(
                f"{context}: text.words must be {lines:,}, the words of {column.words.file.name}, "
                f"got {column.words.count:,}"
            )
    if spec.following and column.vocabulary_size > spec.classes:
        raise UserError(
            f"{context}: its tokenizer must have at most {spec.classes:,} tokens, those that its "
            f"model tells, got {column.vocabulary_size:,}"
        )
