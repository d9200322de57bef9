"""Everything that is checked of a search before it is drawn; nothing is written until all holds."""

from __future__ import annotations

from functools import cache

from dpdist.base.binomial import clopper_pearson_lower
from dpdist.base.errors import UserError
from dpdist.certification.radii import gaussian_l2_radius
from dpdist.data import Dataset
from dpdist.data.overlap import refuse_common
from dpdist.runs.folder import OtherRun, RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.sections.search import ScoreRecipe
from dpdist.training.job import check_groups, check_records, check_trainable
from dpdist.training.records import private_data, source_of
from dpdist.tuning.cost import SearchCost, Sizes, kept_out
from dpdist.tuning.search import Search, records_of
from dpdist.tuning.space import check_space, probes, with_values
from dpdist.tuning.trial import scoring_data


def prepare(recipe: Recipe, folder: RunFolder, where: str, *, only_resume: bool = False) -> Search:
    """Check as `check` does, then draw the search, or read it back. Raises UserError, and then
    nothing was written."""
    return check(recipe, folder, where, only_resume=only_resume).begin()


def check(recipe: Recipe, folder: RunFolder, where: str, *, only_resume: bool = False) -> Search:
    """Check all that can be checked, account the search, and write nothing.

    only_resume: refuse to begin. Raises UserError.
    """
    assert recipe.tune is not None
    continued = _check_same_search(recipe, folder)
    if only_resume and not continued:
        raise UserError(f"{folder.path}: no search to resume; without --resume one is begun")
    check_space(recipe, where)
    hold_out = kept_out(recipe)
    dataset = records_of(recipe, hold_out, recipe.data.fraction)
    check_records(recipe, source_of(recipe), where)
    check_groups(recipe, dataset, where)
    _check_scoring(recipe, dataset, where)

    @cache
    def counted(fraction: float) -> int:
        return len(records_of(recipe, hold_out, fraction))

    sizes = Sizes(len(records_of(recipe, 0.0, 1.0)), hold_out, counted)
    cost = SearchCost(recipe, sizes, recipe.tune.law, where)
    everything = private_data(recipe, source_of(recipe))  # what is scored on is among it
    search = Search(recipe, folder, cost, everything.fingerprint)
    if not (continued and search.folder.terms.exists()):
        cost.plan  # noqa: B018  (refused here, if no theorem covers it)
        parts = [check_trainable(search.planned(v)[0], where)[1] for v in probes(recipe.tune)]
        search.assumed = sorted({part["assumed"] for part in parts if part and part["assumed"]})
    search.check_begun()
    return search


def _check_same_search(recipe: Recipe, folder: RunFolder) -> bool:
    """Whether this search was begun before. Raises UserError when the folder holds another run."""
    if not folder.asked.exists():
        # Between the two files of a beginning there is nothing else.
        if folder.check_same_recipe(recipe) and folder.plan.exists():
            raise OtherRun(f"{folder.path}: holds a run without a search; choose another --name")
        return False
    folder.check_format()
    different = folder.read_asked().same_experiment(recipe)
    if different:
        raise OtherRun(
            f"{folder.path}: a search of that name exists with a different recipe "
            f"({', '.join(different)} differ); choose another --name, or repeat the recipe to "
            "continue it"
        )
    return True


def _check_scoring(recipe: Recipe, dataset: Dataset, where: str) -> None:
    """Raise UserError when the records or the objective of the scores cannot be used."""
    assert recipe.tune is not None
    score = recipe.tune.score
    records = scoring_data(recipe)
    if not len(records):
        raise UserError(f"{where}: tune.score: there are no records to score on")
    if score.public is not None:
        if records.input_shape != dataset.input_shape:
            raise UserError(
                f"{where}: tune.score.public: inputs of shape {records.input_shape}, the training "
                f"records have {dataset.input_shape}"
            )
        why = (
            f"are in {records.name}, and scores on them would be used as if they were public; "
            "leave public out to score on a held-out part, with noise"
        )
        private = private_data(recipe, source_of(recipe))
        refuse_common(private, records, f"{where}: tune.score.public", why)
    if not score.certifies:
        return
    for values in probes(recipe.tune):
        _check_certified(with_values(recipe, values, where), score, where)


def _check_certified(trial: Recipe, score: ScoreRecipe, where: str) -> None:
    """Raise UserError when a trial cannot be scored by what is certified."""
    certify = trial.certify
    if certify is None or certify.sigma is None or certify.noise != "gaussian":
        raise UserError(
            f"{where}: tune.score.objectives: certified objectives need certify.sigma and Gaussian "
            "noise in the recipe"
        )
    p_lower = clopper_pearson_lower(score.draws, score.draws, score.alpha)
    reach = float(gaussian_l2_radius(p_lower, certify.sigma))
    if score.radius is not None and score.radius > reach:
        raise UserError(
            f"{where}: tune.score.radius: {score.draws} draws at alpha {score.alpha:g} never "
            f"certify more than {reach:.3g} with certify.sigma {certify.sigma:g}: give more draws "
            "or a larger sigma"
        )
