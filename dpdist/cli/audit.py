"""``dpdist attack``, ``poison``, ``audit`` and ``membership``: measure a model against adversaries.

attack: accuracy of a run's model under attack, and attacks on its certificates. poison: the number
of poisoned training records that cannot change an answer. audit: a lower bound of epsilon,
measured. membership: how well an adversary can tell which records the models of a recipe were
trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from dpdist.cli.options import (
    DEFAULT_RUNS,
    FIGURE_PATH,
    Actors,
    Changes,
    DataRoot,
    Every,
    Local,
    MaxInputs,
    Name,
    Output,
    PrivateSeed,
    RecipeArgument,
    RunArgument,
    Runs,
    Start,
    executor_name,
    flag,
    load_trained_recipe,
    option,
    parse_numbers,
    path_callback,
    path_option,
    require_labels,
)
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import ExitCode, UserError
from dpdist.core.fields import Count, CountOrZero, ModelCount, Positive, Probability, Text
from dpdist.core.files import write_result

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings
    from dpdist.audits.membership import Membership
    from dpdist.audits.membership_findings import MembershipAttack, MembershipFindings
    from dpdist.audits.target import AuditResult, Target
    from dpdist.poisoning.certificates import PoisoningBound, PoisoningCertificates, Votes
    from dpdist.poisoning.evaluation import Poisoning
    from dpdist.privacy.card import AuditFinding
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe


# --- dpdist attack ----------------------------------------------------------------------------


_Steps = Annotated[int | None, option("Steps of i-fgsm, mim and pgd (10).", Count)]
_Restarts = Annotated[int | None, option("Random starts of pgd (1).", Count)]
_Scale = Annotated[float | None, option("pgd steps by this times size / steps (2.5).", Positive)]
_AttackSigma = Annotated[
    float | None, option("Attack the classifier smoothed by this noise.", Positive)
]
_Draws = Annotated[int | None, option("Draws of the noise for each gradient (16).", Count)]
_N = Annotated[int | None, option("Draws per answer of a randomised classifier (1000).", Count)]
_AnswerAlpha = Annotated[float | None, option("Error of each such answer (0.001).", Probability)]
_Seed = Annotated[str | None, option("Of all random numbers (default: secret, stored).", Text)]
_Norm = Annotated[str | None, option("linf (default) or l2.")]
_Sizes = Annotated[str | None, option("Sizes in input units: 0.05,0.1 (default: by the norm).")]
_Attacks = Annotated[str | None, option("Out of fgsm,i-fgsm,mim,pgd (default: all; check: pgd).")]
_Labels = Annotated[str | None, option("Lead away from the true (default) or predicted class.")]
_Table = Annotated[str | None, option("The table to check, by name or path (default: each).")]
_Claim = Annotated[
    str | None, option("Attack this column of sizes in place of the radius: as_printed_linf.")
]
_Smoothed = Annotated[bool, flag("--smoothed", "As --sigma with the recipe's certify.sigma.")]
_Check = Annotated[
    bool,
    flag(
        "--check-certificates",
        "Attack the run's L2 certificates within their radii instead; exit code 1 when more "
        "are contradicted than alpha allows.",
    ),
]


def attack_command(
    run: RunArgument,
    runs: Runs = DEFAULT_RUNS,
    data_root: DataRoot = None,
    norm: _Norm = None,
    sizes: _Sizes = None,
    attacks: _Attacks = None,
    steps: _Steps = None,
    restarts: _Restarts = None,
    step_scale: _Scale = None,
    sigma: _AttackSigma = None,
    smoothed: _Smoothed = False,
    draws: _Draws = None,
    n: _N = None,
    alpha: _AnswerAlpha = None,
    labels: _Labels = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    seed: _Seed = None,
    actors: Actors = None,
    local: Local = None,
    output: Output = None,
    check_certificates: _Check = False,
    certificates: _Table = None,
    claim: _Claim = None,
) -> None:
    """Attack the test split on all CPUs, white-box; continues what was interrupted.

    Shows how many inputs stay right, abstain or go wrong, and how many are certified.
    """
    from dpdist.runs.folder import open_run

    folder = open_run(run, runs)
    recipe = load_trained_recipe(folder, data_root, "attack")
    given: dict[str, Any] = {
        "steps": steps, "restarts": restarts, "step_scale": step_scale, "draws": draws,
        "start": start, "every": every, "max_inputs": max_inputs, "seed": seed,
        "attacks": tuple(attacks.split(",")) if attacks is not None else None,
    }  # fmt: skip
    own = {
        "norm": norm, "sizes": parse_numbers(sizes, "--sizes"), "n": n, "alpha": alpha,
        "labels": labels,
        "sigma": _resolve_sigma(recipe, folder, sigma, smoothed),
    }  # fmt: skip
    about = {"certificates": certificates, "claim": claim}
    _refuse_unrelated_options(check_certificates, own, about)
    if check_certificates:
        _attack_certificates(recipe, folder, given, certificates, claim, output, actors, local)
    else:
        _run_attack(recipe, folder, given | own, output, actors, local)


def _refuse_unrelated_options(
    check: bool, attack_options: dict[str, Any], check_options: dict[str, Any]
) -> None:
    """Options of an attack with a check, or those of a check without it."""
    useless = [f"--{name}" for name, value in attack_options.items() if value is not None]
    if check and useless:
        raise UserError(
            f"{', '.join(useless)}: not with --check-certificates, which takes norm, sizes, noise "
            "and draws from the certificates"
        )
    if not check and any(value is not None for value in check_options.values()):
        raise UserError("--certificates, --claim: only with --check-certificates")


def _run_attack(
    recipe: Recipe,
    folder: RunFolder,
    options: dict[str, Any],
    output: Path | None,
    actors: int | None,
    local: bool | None,
) -> None:
    from dpdist import pipeline
    from dpdist.core import console
    from dpdist.reports.charts import attack_outcome_table
    from dpdist.reports.facts import read_facts

    settings = _attack_settings(options)
    _refuse_noise_options(recipe, folder, settings, options)
    with pipeline.run_session(folder, executor=executor_name(local)):
        path = pipeline.evaluation_stage(recipe, folder, settings, output, actors)
    table = settings.read(path)
    shown = attack_outcome_table(table, read_facts(folder).tables)
    widths = [
        max(len(row[place]) for row in (shown.header, *shown.rows))
        for place in range(len(shown.header))
    ]
    lines = [
        (
            row[0],
            "  ".join(value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)),
        )
        for row in (shown.header, *shown.rows)
    ]
    title = f"under attack, % of {table.inputs:,} inputs ({table.description})"
    typer.echo(console.format_table(lines, title=title))
    for note in shown.notes:
        typer.echo(note)
    typer.echo(f"table: {path}")
    pipeline.report_stage(folder)


def _attack_settings(options: dict[str, Any]) -> AttackSettings:
    """Return the attack that is asked for. Raises UserError for an option that it has not."""
    from dpdist.attacks.settings import AttackSettings

    said = {name: value for name, value in options.items() if value is not None}
    settings = AttackSettings(**said)
    settings.refuse_unused(said)
    return settings


def _refuse_noise_options(
    recipe: Recipe, folder: RunFolder, settings: AttackSettings, options: dict[str, Any]
) -> None:
    """Raise UserError for options of noise where the attacked classifier has none."""
    useless = [f"--{name}" for name in ("draws", "n", "alpha") if options[name] is not None]
    if not useless or settings.sigma is not None:
        return
    from dpdist.evaluation import load_model
    from dpdist.randomness.noise_location import find_noise_location

    if not find_noise_location(load_model(recipe, folder)).is_random:
        raise UserError(
            f"{', '.join(useless)}: must be left out: the model has no noise, so nothing is drawn; "
            "give --sigma or --smoothed to attack it smoothed"
        )


def _attack_certificates(
    recipe: Recipe,
    folder: RunFolder,
    options: dict[str, Any],
    certificates: str | None,
    claim: str | None,
    output: Path | None,
    actors: int | None,
    local: bool | None,
) -> None:
    from dpdist import pipeline
    from dpdist.attacks.settings import CheckSettings
    from dpdist.attacks.table import check_line
    from dpdist.core import console

    if options["attacks"] is None:
        options["attacks"] = ("pgd",)
    settings = _attack_settings(options)
    tables = _tables_to_attack(folder, certificates)
    if not tables:
        raise UserError(f"{folder.path}: no L2 or L-infinity certificates to attack")
    if output is not None and len(tables) > 1:
        names = ", ".join(path.parent.name for path in tables)
        raise UserError(f"--output: holds one check; name one with --certificates: {names}")
    rows, held = [], True
    with pipeline.run_session(folder, executor=executor_name(local)):
        for path in tables:
            check = CheckSettings(path, settings, claim)
            found = check.read(pipeline.evaluation_stage(recipe, folder, check, output, actors))
            held = held and found["plausible"]
            rows.append((found["certificates"], check_line(found)))
    typer.echo(console.format_table(rows, title="certificates under attack"))
    pipeline.report_stage(folder)
    if not held:
        raise typer.Exit(ExitCode.REFUTED)


def _tables_to_attack(folder: RunFolder, name: str | None) -> list[Path]:
    from dpdist.core import console
    from dpdist.core.fields import NORMS
    from dpdist.reports.facts import read_facts

    if name is None:
        found = read_facts(folder).tables
        if not found:
            raise UserError(f"{folder.path}: no certificates yet; `dpdist certify` makes them")
        for table in found:
            if table.norm not in NORMS:
                console.log(f"{table.name}: {table.norm} certificates cannot be attacked, left out")
        return [table.path for table in found if table.norm in NORMS]
    for path in (folder.certificates / name / "certificates.parquet", Path(name)):
        if path.is_file():
            return [path]
    raise UserError(f"--certificates: {name}: no such table in {folder.certificates}")


def _resolve_sigma(
    recipe: Recipe, folder: RunFolder, sigma: float | None, smoothed: bool
) -> float | None:
    if not smoothed:
        return sigma
    if sigma is not None:
        raise UserError("give --sigma or --smoothed, not both")
    if recipe.certify is None or recipe.certify.sigma is None:
        raise UserError(
            f"{folder.path}: the recipe does not certify with input noise; give --sigma"
        )
    return recipe.certify.sigma


# --- dpdist poison ----------------------------------------------------------------------------


_SELECT, _ALPHA = 6, 0.001
_DEFAULT_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


_VotingModels = Annotated[int, option("Models that vote.", ModelCount)]
_Select = Annotated[int | None, option("Of them, those that choose the class: 6.", Count)]
_VoteAlpha = Annotated[float | None, option("Error of each certificate: 0.001.", Probability)]
_VoteSigma = Annotated[float | None, option("Noise on each vote's input.", Positive)]
_Radii = Annotated[str | None, option("L2 changes of the input besides, with --sigma: 0.1,0.25.")]
_Counts = Annotated[str | None, option("Numbers of changed records to show: 1,10,50.")]
_Partitions = Annotated[bool, flag("--partitions", "Plain models on disjoint shards instead.")]
_Bag = Annotated[int | None, option("Plain models on so many random records instead.", Count)]
_Csv = Annotated[
    Path | None, path_option("Each input's result.", callback=path_callback(for_writing=True))
]


def poison_command(
    recipe: RecipeArgument,
    changed: Changes = None,
    models: _VotingModels = 66,
    select: _Select = None,
    alpha: _VoteAlpha = None,
    sigma: _VoteSigma = None,
    radii: _Radii = None,
    changes: _Counts = None,
    partitions: _Partitions = False,
    bag: _Bag = None,
    seed: PrivateSeed = None,
    csv: _Csv = None,
    name: Name = None,
    runs: Runs = DEFAULT_RUNS,
    data_root: DataRoot = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    actors: Actors = None,
    local: Local = None,
    output: Output = None,
) -> None:
    """Certify answers against poisoned training records: trains many models, resumable.

    A differentially private recipe, trained many times with keys of its own, cannot change its
    answer by much when few records change. Private: votes and results stay in the run's private/
    folder.
    """
    from dpdist import pipeline
    from dpdist.poisoning.evaluation import Poisoning
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_changes, refuse_unused, resolve_recipe
    from dpdist.training.job import check_trainable
    from dpdist.training.records import data_source, load_test_records

    resolved = resolve_recipe(
        recipe, changes=parse_changes(changed), name=name, data_root=data_root
    )
    require_labels(resolved, "poison")
    folder = RunFolder(runs / resolved.name)
    at = (0.0, *[r for r in parse_numbers(radii, "--radii") or () if r])
    if partitions:
        _refuse_sampling_options(select=select, alpha=alpha, radii=radii)
    rule = _VoteSettings(models, select or _SELECT, alpha or _ALPHA, at, sigma)
    shown = [int(k) for k in parse_numbers(changes, "--changes", CountOrZero) or ()]
    settings = Poisoning(models, partitions, sigma, start or 0, every or 1, max_inputs, seed, bag)
    _check_output_paths(settings, folder, output, csv)
    if not folder.check_same_recipe(resolved):
        refuse_unused(resolved, recipe)
    trained = settings.data_recipe(resolved)
    records = len(check_trainable(trained, recipe)[0])
    settings.choose_inputs(len(load_test_records(trained, data_source(trained))), recipe)
    _, plan = settings.training_plan(trained, records)
    poisoned = None if partitions else rule.poisoning_effect(settings, plan, records)
    folder.create_or_open(resolved)
    with pipeline.run_session(folder, executor=executor_name(local)):
        path = pipeline.evaluation_stage(resolved, folder, settings, output, actors)
    votes = settings.read(path)
    found = rule.certify_votes(votes, poisoned)
    _print_votes(votes, found, plan, shown, path)
    if csv is not None:
        _write_csv(csv, votes, found[0])


@dataclass(frozen=True)
class _VoteSettings:
    """How votes are read: how many models choose the class, error, input radii, input noise."""

    models: int
    select: int
    alpha: float
    radii: tuple[float, ...]
    sigma: float | None

    def poisoning_effect(
        self, settings: Poisoning, plan: PrivacyPlan, records: int
    ) -> PoisoningBound:
        """Return the effect of changed records on one training, before it is trained.

        Raises UserError.
        """
        from dpdist.poisoning import certificates
        from dpdist.poisoning.certificates import BaggingPoisoningBound, check_options

        check_options(self.models, self.select, self.radii, self.sigma)
        if settings.bag is not None:
            return BaggingPoisoningBound(records, settings.bag)
        try:
            return certificates.PrivatePoisoningBound(plan)
        except ValueError as error:
            raise UserError(str(error)) from None

    def certify_votes(
        self, votes: Votes, effect: PoisoningBound | None
    ) -> list[PoisoningCertificates]:
        """Return the statements: one of partitions; two of keys.

        Those of keys are each input's by itself, and one with which none of the whole set
        is false.
        """
        from dpdist.certification.statistics import ERROR
        from dpdist.poisoning.certificates import certify_partitioned_models, certify_random_models

        if effect is None:
            return [certify_partitioned_models(votes)]
        how: dict[str, Any] = {"select": self.select, "radii": self.radii, "sigma": self.sigma}
        errors = (self.alpha, ERROR / len(votes.index))
        return [certify_random_models(votes, effect, alpha=each, **how) for each in errors]


def _check_output_paths(
    settings: Poisoning, folder: RunFolder, output: Path | None, csv: Path | None
) -> None:
    """Raise UserError where private results would lie in a run folder's public part."""
    for path in (output, csv):
        settings.output_folder(folder, path)
    if csv is not None and folder.enclosing_run(csv) is not None and csv.suffix.lower() != ".csv":
        raise UserError(f"--csv: in a run folder the file must end in .csv, got {str(csv)!r}")


def _refuse_sampling_options(**options: object) -> None:
    """Raise UserError for an option that says something of models that draw at random."""
    for name, value in options.items():
        if value is not None:
            raise UserError(
                f"--{name}: goes with models that draw at random, not with --partitions, whose "
                "votes are exact"
            )


def _print_votes(
    votes: Votes,
    certificates: list[PoisoningCertificates],
    plan: PrivacyPlan,
    shown: list[int],
    path: Path,
) -> None:
    from dpdist.core import console

    each = certificates[0]
    counts = shown or [k for k in _DEFAULT_COUNTS if k <= max(2, each.largest_changes)]
    rows = [("inputs", f"{len(votes.index):,}"), ("models", _describe_models(votes, each))]
    rows.append(("right", f"{format_percent((each.prediction == votes.label).mean())} %"))
    for one, what in zip(certificates, ("", ", of all inputs together"), strict=False):
        for radius in one.max_changes:
            shares = ", ".join(
                f"{format_percent(one.certified_accuracy(votes.label, k, radius))} % at {k}"
                for k in counts
            )
            moved = f" and an L2 change below {format_exact(radius)}" if radius else ""
            rows.append((f"changed records withstood{moved}{what}", shares))
    rows += _assumption_rows(votes, certificates, plan)
    rows.append(("votes, private", str(path)))
    typer.echo(console.format_table(rows, title="against poisoned training records"))


def _describe_models(votes: Votes, certificate: PoisoningCertificates) -> str:
    total = len(votes.vote)
    if certificate.alpha == 0:
        return f"{total}, each on its own shard of the records, without privacy"
    said = (
        f"{certificate.num_models} that vote, {total - certificate.num_models} others that "
        "chose the class"
    )
    bag = votes.settings.get("bag")
    return said + (f"; each on {bag:,} random records, without privacy" if bag else "")


def _assumption_rows(
    votes: Votes, certificates: list[PoisoningCertificates], plan: PrivacyPlan
) -> list[tuple[str, str]]:
    from dpdist.certification.statistics import ERROR
    from dpdist.poisoning.certificates import compose_vote_plans
    from dpdist.privacy.guarantee import format_epsilon

    bag = votes.settings.get("bag")
    public = [("left out", "records whose input is a test input (data.drop_test_records)")]
    if votes.settings.get("data.public"):
        public.append(("trusted", "data.public: whose hash lies there is no training record"))
    error = (
        "error",
        f"alpha {certificates[0].alpha:g} each; of all together: {ERROR:g} (union bound)",
    )
    certified = ("certified", "what the recipe says most often over its secret keys")
    if bag or certificates[0].alpha == 0:
        what = "a record inserted or removed"
        if votes.settings.get("data.max_train") is not None:
            what = "a record blanked out or filled in, N fixed (data.max_train is a share of it)"
        return [
            ("a change", f"{what}; another label is both"),
            *public,
            *([error, certified] if bag else []),
        ]
    one, all_of_them = plan.guarantee(), compose_vote_plans(plan, len(votes.vote)).guarantee()
    what = {
        "replace-one": "a record replaced by another",
        "add-or-remove-one": "a record inserted or removed; another label or image is both",
    }.get(
        one.relation, "a record blanked out or filled in, N fixed; another label or image is both"
    )
    return [
        ("a change", what),
        *public,
        error,
        certified,
        ("one training", str(one)),
        ("these votes, if published", f"epsilon = {format_epsilon(all_of_them.epsilon)}"),
    ]


def _write_csv(path: Path, votes: Votes, certificate: PoisoningCertificates) -> None:
    import csv
    import io

    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    names = [f"changes at {format_exact(radius)}" for radius in certificate.max_changes]
    writer.writerow(["index", "label", "answer", *names])
    columns = (votes.index, votes.label, certificate.prediction, *certificate.max_changes.values())
    writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    write_result(path, file.getvalue())
    typer.echo(f"each input: {path}")


# --- dpdist audit -----------------------------------------------------------------------------


_Name = Annotated[
    str,
    typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a trained run (by name or path)."),
]
_Kind = Annotated[str | None, option("mechanism (default), or that of the recipe's audit section.")]
_Set = Annotated[
    list[str] | None,
    option(
        "An option of the audit: releases=2000. With a dot, a key of the recipe: "
        "training.steps=50. May be repeated.",
        None,
        "--set",
        metavar="NAME=VALUE",
    ),
]


def audit_command(
    name: _Name,
    kind: _Kind = None,
    options: _Set = None,
    runs: Runs = DEFAULT_RUNS,
    data_root: DataRoot = None,
    output: Output = None,
) -> None:
    """Measure how much leaks at least: an empirical lower bound of epsilon, beside what is proved.

    Exit code 1 when it exceeds what is proved, and code or proof is wrong, or what is claimed.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output: {output}: must be a folder")
    of_audit = [each for each in options or () if "." not in each.partition("=")[0]]
    changed = [each for each in options or () if each not in of_audit]
    recipe, folder = _open_run_or_recipe(name, runs, data_root, changed)

    from dpdist.audits import registry
    from dpdist.audits.canaries import audited_recipe
    from dpdist.audits.target import audit_result_of
    from dpdist.core import console
    from dpdist.privacy.card import CONSISTENT
    from dpdist.runs.folder import RunFolder

    asked = registry.resolve_audit_options(recipe, kind, of_audit)
    result = audit_result_of(asked)
    from dpdist import pipeline

    if folder is None and asked.canary_audit is not None:
        planted = audited_recipe(recipe, asked, name)
        folder = pipeline.train_only(planted, runs=runs, context=name)
    target = _audit_target(recipe, folder, name)
    if folder is not None or output is not None:
        output = result.output_folder(folder or RunFolder(runs / recipe.name), output)
    output = output or runs / f"{recipe.name}.audit" / asked.folder_name
    found = _run_audit(result, target, output)
    typer.echo(console.format_table(_result_rows(found), title=f"audit of {name}"))
    kept = ", which stays private: it is made of many trainings" * result.private
    typer.echo(f"result{kept}: {output / result.file}")
    if folder is not None:
        pipeline.report_stage(folder)
    if found.verdict != CONSISTENT:
        raise typer.Exit(ExitCode.REFUTED)


def _open_run_or_recipe(
    name: str, runs: Path, data_root: Path | None, assignments: list[str]
) -> tuple[Recipe, RunFolder | None]:
    """A run of that name, or a recipe, with keys changed."""
    from dpdist.runs.folder import open_run
    from dpdist.runs.recipe import parse_changes, refuse_unused, resolve_recipe

    try:
        folder = open_run(name, runs)
    except UserError as no_run:
        try:
            changes = parse_changes(assignments)
            found = resolve_recipe(name, changes=changes, data_root=data_root)
            refuse_unused(found, name)
            return found, None
        except UserError as no_recipe:
            if "no such recipe" in str(no_recipe):
                raise UserError(f"{no_run}; {no_recipe}") from None
            raise
    if assignments:
        raise UserError(f"--set {assignments[0]}: {name} is a run, whose recipe is fixed")
    return folder.read_recipe(), folder


def _audit_target(recipe: Recipe, folder: RunFolder | None, name: str) -> Target:
    """Return the audited target: the run, or else the recipe."""
    from dpdist.audits.target import target_of_recipe, target_of_run
    from dpdist.reports.facts import read_facts

    if folder is None:
        return target_of_recipe(recipe, name)
    return target_of_run(folder, read_facts(folder).guarantee)


def _run_audit(result: AuditResult, target: Target, output: Path) -> AuditFinding:
    from dpdist.audits import registry
    from dpdist.core import console

    with console.progress(f"audit, {result.folder_name}", "trials", "trials") as show:
        return registry.run_audit(
            result.options, target, output, lambda done, total: show(done, total, 0.0)
        )


def _result_rows(result: AuditFinding) -> list[tuple[str, str]]:
    rows = [("epsilon", result.comparison_line), ("audited", result.summary_line)]
    rows += [("it rests on", line) for line in result.assumptions]
    return rows + [(key.replace("_", " "), str(value)) for key, value in result.details.items()]


# --- dpdist membership ------------------------------------------------------------------------


_PassCount = Annotated[Count, Field(le=100_000)]  # passes of one model
_ShadowModels = Annotated[int, option("Shadow models in the bank.", ModelCount)]
_Attack = Annotated[str, option("Out of shadow,lira,lira-offline,rmia,rmia-offline.")]
_Game = Annotated[str, option("Who is in a model: coins, or halves (shadow has its own).")]
_Passes = Annotated[str, option("Averaged, of a model with noise of its own: 100, or 10,100.")]
_Picture = Annotated[
    Path | None, path_option("The ROC curves with their ceilings.", callback=FIGURE_PATH)
]


def membership_command(
    recipe: RecipeArgument,
    changes: Changes = None,
    models: _ShadowModels = 16,
    attack: _Attack = "shadow,lira,rmia",
    game: _Game = "coins",
    passes: _Passes = "100",
    seed: PrivateSeed = None,
    picture: _Picture = None,
    name: Name = None,
    runs: Runs = DEFAULT_RUNS,
    data_root: DataRoot = None,
    actors: Actors = None,
    local: Local = None,
    output: Output = None,
) -> None:
    """Membership inference: trains a bank of shadow models, resumable, and attacks all of them.

    Private: results stay in the run's private/ folder. Exit code 1 when the one-run test exceeds
    the proved epsilon.
    """
    from dpdist import pipeline
    from dpdist.audits.membership import Membership
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_changes, resolve_recipe

    resolved = resolve_recipe(
        recipe, changes=parse_changes(changes), name=name, data_root=data_root
    )
    require_labels(resolved, "membership")
    folder, chosen = RunFolder(runs / resolved.name), _parse_attacks(attack)
    averaged = tuple(sorted({int(n) for n in parse_numbers(passes, "--passes", _PassCount) or ()}))
    banks: list[tuple[Membership, list[MembershipAttack]]] = []
    if quarters := [one for one in chosen if one.needs_quarters_game]:
        banks.append((Membership("quarters", 2, averaged, seed=seed), quarters))
    if others := [one for one in chosen if not one.needs_quarters_game]:
        banks.append((Membership(game, models, averaged, seed=seed), others))
    _check_banks(resolved, folder, banks, [output, picture], recipe)
    folder.create_or_open(resolved)
    with pipeline.run_session(folder, executor=executor_name(local)):
        found = [_run_membership_attacks(resolved, folder, *bank, output, actors) for bank in banks]
    if picture is not None:
        from dpdist.reports.figures import plot_roc_curves

        write_result(picture, plot_roc_curves([one.panel for one in found], picture.suffix[1:]))
        typer.echo(f"picture: {picture}")
    if not all(one.within_guarantee for one in found):
        raise typer.Exit(ExitCode.REFUTED)


def _check_banks(
    recipe: Recipe,
    folder: RunFolder,
    banks: Sequence[tuple[Membership, Sequence[MembershipAttack]]],
    outputs: Sequence[Path | None],
    context: str,
) -> None:
    """Raise UserError for whatever could go wrong later, before anything is written. outputs: the
    folder of a bank, and the picture."""
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.job import check_trainable

    if outputs[0] is not None and len(banks) > 1:
        raise UserError("--output: holds one bank; give shadow and the other attacks apart")
    for bank, attacks in banks:
        for one in attacks:
            one.check_game(bank.rules)
        for path in outputs:
            bank.output_folder(folder, path)
    if not folder.check_same_recipe(recipe):
        refuse_unused(recipe, context)
    dataset, _ = check_trainable(recipe, context)
    for bank, _ in banks:
        bank.plan_shadows(recipe, len(dataset))


def _parse_attacks(names: str) -> list[MembershipAttack]:
    from dpdist.audits.membership_findings import ATTACKS

    unknown = [name for name in names.split(",") if name not in ATTACKS]
    if unknown:
        raise UserError(f"--attack: must be out of {', '.join(ATTACKS)}, got {unknown[0]!r}")
    return [ATTACKS[name]() for name in dict.fromkeys(names.split(","))]


def _run_membership_attacks(
    recipe: Recipe,
    folder: RunFolder,
    settings: Membership,
    attacks: Sequence[MembershipAttack],
    output: Path | None,
    actors: int | None,
) -> MembershipFindings:
    """Train what is missing of a bank, attack it, print what was found."""
    from dpdist import pipeline
    from dpdist.audits.membership_findings import run_attacks
    from dpdist.core import console

    path = pipeline.evaluation_stage(recipe, folder, settings, output, actors)
    found = run_attacks(settings, recipe, path, attacks)
    for title, rows in found.tables():
        typer.echo(console.format_table(rows, title=title))
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"scores, models and numbers, all private: {path.parent}")
    return found
