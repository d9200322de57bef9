"""Membership inference against the models of a recipe: the evaluation and its settings.

Whether a record was trained on is private, so all of it lies in private/: no release, report,
public archive or fetch takes anything from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from dpdist.audits.membership_statistics import GAMES, TABLE, BankScores, Game, read_scores
from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.core.fields import Count, HexKey, ModelCount, OneOrMore, Section
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe

if TYPE_CHECKING:
    from dpdist.audits.trainings import ShadowBankJob

_Passes = Annotated[Count, Field(le=100_000)]


class Membership(Section, Evaluation):
    """A bank of shadow models of a recipe.

    game: assignment of records to models. models: their number. passes: numbers of passes over
    which the scores of a model with its own noise are averaged, in addition to one pass.
    population: test records that are scored like the training records. seed: of coins, trainings
    and noise (64 hex digits); None draws a secret one. With a given seed the assignment is known,
    and no guarantee bounds an attack.
    """

    game: Literal["coins", "halves", "quarters"] = "coins"
    models: ModelCount = 16
    passes: Annotated[tuple[_Passes, ...], OneOrMore, Field(min_length=1)] = (100,)
    population: Count = 5000
    seed: HexKey | None = None

    name: ClassVar[str] = "membership"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = True
    needs_trained_model: ClassVar[bool] = False
    progress_unit: ClassVar[str] = "models"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.game}-{self.models}"

    @property
    def game_rules(self) -> Game:
        """Return the rules of the game."""
        return GAMES[self.game](self.models)

    def job_spec(self, subject: EvaluatedModel) -> ShadowBankJob:
        """Return the job. Raises UserError for a recipe whose shadows cannot be trained."""
        from dpdist.audits.trainings import ShadowBankJob, ShadowSetup

        recipe, records = subject.recipe, subject.load_training_data()
        wanted = {
            "data": records.fingerprint,
            "population": subject.test_data.fingerprint,
            "settings": {
                "game": self.game,
                "models": self.models,
                "passes": list(self.passes),
                "outside": self.population,
                "seed_given": self.seed is not None,
                **recipe.experiment_settings,
            },
        }

        recipes, plans = zip(*self.plan_shadows(recipe, len(records)), strict=True)
        passes = tuple(sorted({1, *self.passes}))
        setup = ShadowSetup(self.game_rules, b"", recipes, plans, passes, self.population)
        return ShadowBankJob(wanted, self.seed, setup)

    def plan_shadows(self, recipe: Recipe, records: int) -> list[tuple[Recipe, PrivacyPlan]]:
        """Return recipe and plan of the recipe's own models, then of plain ones. Raises UserError.

        A shadow is trained like the recipe on fewer records. With coins their number is random:
        rate, divisor and steps follow from the expected number, as with privacy.nominal_records.
        """
        from dpdist.runs.recipe import make_plan, refuse_answers, training_only, without_privacy
        from dpdist.training.ensembles import refuse_ensemble

        refuse_ensemble(recipe, "no shadow models")
        size, found = self.game_rules.expected_members(records), []
        for own in (training_only(recipe), without_privacy(recipe)):
            planned = own
            if self.game_rules.has_random_size:
                privacy = own.privacy.model_copy(update={"nominal_records": size})
                planned = own.model_copy(update={"privacy": privacy})
            where = f"{recipe.name}, a shadow with {size:,} of {records:,} records"
            found.append((own, make_plan(planned, size, where)))
            refuse_answers(found[-1][1], recipe.name)
        return found

    @classmethod
    def read(cls, path: Path) -> tuple[dict[str, Any], dict[int, BankScores]]:
        return read_scores(path)

    @classmethod
    def summary_rows(cls, results: Sequence[Any]) -> list[tuple[str, str]]:
        """Return no rows: the results are private."""
        return []
