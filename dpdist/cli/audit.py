"""``dpdist attack`` and ``dpdist audit``: measure a model against adversaries.

attack: accuracy of a run's model under attack, and attacks on its certificates. audit: a lower
bound of epsilon, measured; how well an adversary can tell which records the models of a recipe were
trained with; or the number of poisoned training records that cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from dpdist.cli.options import (
    DEFAULT_RUNS,
    MeasuringWorkers,
    Output,
    PublishableJson,
    RunArgument,
    Runs,
    changes_by_section,
    executor_name,
    flag,
    load_trained_recipe,
    option,
    require_labels,
)
from dpdist.core import console
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import ExitCode, UserError
from dpdist.core.fields import (
    Count,
    CountOrZero,
    HexKey,
    ModelCount,
    OneOrMore,
    PositiveOrZero,
    Probability,
    Section,
)
from dpdist.core.files import read_json, write_result

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings
    from dpdist.audits.membership import Membership
    from dpdist.audits.membership_findings import MembershipAttack, MembershipFindings
    from dpdist.poisoning.certificates import PoisoningBound, PoisoningCertificates, Votes
    from dpdist.poisoning.evaluation import Poisoning
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe

# --- dpdist attack ----------------------------------------------------------------------------


_Set = Annotated[
    list[str] | None,
    option(
        "Change a setting: attack.norm=l2, or 'attack.sizes=[0.5, 1]'. May be repeated.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]
_Check = Annotated[
    bool,
    flag(
        "--check-certificates",
        "Attack the run's certificates within their radii instead; exit code 1 when more are "
        "contradicted than alpha allows.",
    ),
]


def attack_command(
    run: RunArgument,
    changes: _Set = None,
    check_certificates: _Check = False,
    runs: Runs = DEFAULT_RUNS,
    workers: MeasuringWorkers = None,
    output: Output = None,
    as_json: PublishableJson = False,
) -> None:
    """Attack the test split on all CPUs, white-box; continues what was interrupted.

    Shows how many inputs stay right, abstain or go wrong, and how many are certified. With
    attack.sigma it attacks the classifier smoothed by that noise. Section attack of --set takes
    norm, sizes, attacks, steps, restarts, step_scale, sigma, samples, n, alpha, labels, start,
    every, max_inputs and seed; with --check-certificates also certificates and claim.
    """
    from dpdist.attacks.settings import AttackSettings
    from dpdist.runs.folder import open_run
    from dpdist.runs.recipe import parse_section

    folder = open_run(run, runs)
    sections = changes_by_section(changes, {"attack": None, "data": ("root",)})
    changed = {f"data.{key}": value for key, value in sections["data"].items()}
    recipe = load_trained_recipe(folder, "attack", changed)
    asked = {key: value for key, value in sections["attack"].items() if value is not None}
    about = {name: asked.pop(name, None) for name in ("certificates", "claim")}
    usual = {"attacks": ("pgd",)} if check_certificates else {}
    settings = parse_section(AttackSettings, usual | asked, "attack")
    how = (output, workers, as_json)
    if check_certificates:
        useless = [n for n in ("norm", "sizes", "n", "alpha", "labels", "sigma") if n in asked]
        if useless:
            raise UserError(
                f"attack.{', attack.'.join(useless)}: not with --check-certificates, which takes "
                "norm, sizes, noise and samples from the certificates"
            )
        _attack_certificates(recipe, folder, settings, about, *how)
        return
    if any(value is not None for value in about.values()):
        raise UserError("attack.certificates, attack.claim: only with --check-certificates")
    _run_attack(recipe, folder, settings, *how)


def _run_attack(
    recipe: Recipe,
    folder: RunFolder,
    settings: AttackSettings,
    output: Path | None,
    workers: int | None,
    as_json: bool,
) -> None:
    from dpdist import pipeline
    from dpdist.reports.charts import attack_outcome_table
    from dpdist.reports.results import load_results

    with pipeline.run_session(folder, executor=executor_name()):
        path = pipeline.evaluation_stage(recipe, folder, settings, output, workers)
    table = settings.read(path)
    shown = attack_outcome_table(table, load_results(folder).tables)
    pipeline.report_stage(folder)
    if as_json:
        rows = [dict(zip(shown.header, row, strict=True)) for row in shown.rows]
        console.print_json(
            {
                "run": folder.name,
                "attacked": table.description,
                "inputs": table.inputs,
                "percent": rows,
                "notes": shown.notes,
                "table": str(path),
            }
        )
        return
    typer.echo(f"under attack, % of {table.inputs:,} inputs ({table.description})")
    typer.echo(console.format_columns(shown.header, shown.rows))
    for note in shown.notes:
        typer.echo(note)
    typer.echo(f"table: {path}")


def _attack_certificates(
    recipe: Recipe,
    folder: RunFolder,
    settings: AttackSettings,
    about: dict[str, Any],
    output: Path | None,
    workers: int | None,
    as_json: bool,
) -> None:
    from dpdist import pipeline
    from dpdist.attacks.settings import CheckSettings
    from dpdist.attacks.table import check_line

    tables = _tables_to_attack(folder, about["certificates"])
    if not tables:
        raise UserError(f"{folder.path}: no L2 or L-infinity certificates to attack")
    if output is not None and len(tables) > 1:
        names = ", ".join(path.parent.name for path in tables)
        raise UserError(f"--output: holds one check; set attack.certificates to one of {names}")
    found = []
    with pipeline.run_session(folder, executor=executor_name()):
        for path in tables:
            check = CheckSettings(path, settings, about["claim"])
            place = pipeline.evaluation_stage(recipe, folder, check, output, workers)
            found.append(check.read(place))
    pipeline.report_stage(folder)
    if as_json:
        console.print_json({"run": folder.name, "checks": found})
    else:
        rows = [(each["certificates"], check_line(each)) for each in found]
        typer.echo(console.format_table(rows, title="certificates under attack"))
    if not all(each["plausible"] for each in found):
        raise typer.Exit(ExitCode.REFUTED)


def _tables_to_attack(folder: RunFolder, name: str | None) -> list[Path]:
    from dpdist.core.fields import NORMS
    from dpdist.reports.results import load_results

    if name is None:
        found = load_results(folder).tables
        if not found:
            raise UserError(f"{folder.path}: no certificates yet; `dpdist certify` makes them")
        for table in found:
            if table.norm not in NORMS:
                console.log(f"{table.name}: {table.norm} certificates cannot be attacked, left out")
        return [table.path for table in found if table.norm in NORMS]
    for path in (folder.certificates / name / "certificates.parquet", Path(name)):
        if path.is_file():
            return [path]
    raise UserError(f"attack.certificates: {name}: no such table in {folder.certificates}")


# --- dpdist audit -----------------------------------------------------------------------------


_Name = Annotated[
    str,
    typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a trained run (by name or path)."),
]
_Kind = Annotated[
    str | None,
    option(
        "mechanism (default, or that of the recipe's audit section), canaries, many-runs, "
        "membership or poison.",
        Literal["mechanism", "canaries", "many-runs", "membership", "poison"],
    ),
]
_AuditSet = Annotated[
    list[str] | None,
    option(
        "Change a setting of the audit: audit.releases=2000, membership.models=16 or "
        "poison.models=66; or a key of the recipe: training.steps=50. May be repeated.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]


@dataclass(frozen=True)
class _Asked:
    """Hold the arguments of an audit beside the settings of its kind.

    folder: of a run, existing or new.
    """

    recipe: Recipe
    folder: RunFolder
    context: str
    output: Path | None
    workers: int | None
    as_json: bool


def audit_command(
    name: _Name,
    kind: _Kind = None,
    changes: _AuditSet = None,
    runs: Runs = DEFAULT_RUNS,
    workers: MeasuringWorkers = None,
    output: Output = None,
    as_json: PublishableJson = False,
) -> None:
    """Measure how much leaks at least, or how many poisoned records cannot change an answer.

    mechanism, canaries and many-runs measure a lower bound of epsilon. membership trains a bank of
    shadow models and attacks all of them. poison trains many models and certifies their votes.
    All of them continue what was interrupted; results of many trainings stay in private/.

    Section audit of --set takes alpha, audits and exploratory; of mechanism also releases, workers
    and seed; of canaries also canaries, canary, view and guesses; of many-runs also trainings,
    canary, copies and seed. Section membership takes models, attacks, game, passes and seed.
    Section poison takes models, select, alpha, sigma, radii, changes, partitions, bag, start,
    every, max_inputs and seed.

    Exit code 1 when what is measured exceeds what is proved, and code or proof is wrong, or what is
    claimed.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output: {output}: must be a folder")
    section = kind if kind in ("membership", "poison") else "audit"
    own = [each for each in changes or () if each.strip().startswith(f"{section}.")]
    of_recipe = [each for each in changes or () if each not in own]
    of_audit = changes_by_section(own, {section: None})[section]
    recipe, folder = _open_run_or_recipe(name, runs, of_recipe)
    if kind not in ("membership", "poison"):
        if workers is not None:
            raise UserError("--workers: only applies to membership and poison")
        _audit_epsilon(recipe, folder, name, kind, of_audit, runs, output, as_json)
        return
    require_labels(recipe, "audit")
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_section

    asked = _Asked(recipe, folder or RunFolder(runs / recipe.name), name, output, workers, as_json)
    if kind == "membership":
        _audit_membership(asked, parse_section(MembershipKeys, of_audit, section))
    else:
        from dpdist.poisoning.evaluation import Poisoning

        read = {key: of_audit.pop(key) for key in VoteKeys.model_fields if key in of_audit}
        votes = parse_section(VoteKeys, read, section)
        _audit_poison(asked, parse_section(Poisoning, of_audit, section), votes)


def _audit_epsilon(
    recipe: Recipe,
    folder: RunFolder | None,
    name: str,
    kind: str | None,
    overrides: dict[str, Any],
    runs: Path,
    output: Path | None,
    as_json: bool,
) -> None:
    from dpdist.audits import registry
    from dpdist.audits.canaries import audited_recipe
    from dpdist.audits.target import audit_result_of, target_of_recipe, target_of_run
    from dpdist.privacy.card import CONSISTENT
    from dpdist.reports.results import load_results
    from dpdist.runs.folder import RunFolder

    asked = registry.resolve_audit_options(recipe, kind, overrides)
    result = audit_result_of(asked)
    from dpdist import pipeline

    if folder is None and asked.canary_audit is not None:
        planted = audited_recipe(recipe, asked, name)
        folder = pipeline.train_only(planted, runs=runs, context=name)
    target = (
        target_of_recipe(recipe, name)
        if folder is None
        else target_of_run(folder, load_results(folder).guarantee)
    )
    if folder is not None or output is not None:
        output = result.output_folder(folder or RunFolder(runs / recipe.name), output)
    output = output or runs / f"{recipe.name}.audit" / asked.folder_name
    with console.progress(f"audit, {result.folder_name}", "trials", "trials") as show:
        found = registry.run_audit(
            asked, target, output, lambda done, total: show(done, total, 0.0)
        )
    if as_json:
        console.print_json(read_json(output / result.file))
    else:
        rows = [("epsilon", found.comparison_line), ("audited", found.summary_line)]
        rows += [("it rests on", line) for line in found.assumptions]
        rows += [(key.replace("_", " "), str(value)) for key, value in found.details.items()]
        typer.echo(console.format_table(rows, title=f"audit of {name}"))
        kept = ", which stays private: it is made of many trainings" * result.private
        typer.echo(f"result{kept}: {output / result.file}")
    if folder is not None:
        pipeline.report_stage(folder)
    if found.verdict != CONSISTENT:
        raise typer.Exit(ExitCode.REFUTED)


def _open_run_or_recipe(
    name: str, runs: Path, assignments: list[str]
) -> tuple[Recipe, RunFolder | None]:
    """A run of that name, or a recipe, with keys changed."""
    from dpdist.runs.folder import open_run
    from dpdist.runs.recipe import parse_changes, refuse_unused, resolve_recipe

    try:
        folder = open_run(name, runs)
    except UserError as no_run:
        try:
            changes = parse_changes(assignments)
            found = resolve_recipe(name, changes=changes)
            refuse_unused(found, name)
            return found, None
        except UserError as no_recipe:
            if "no such recipe" in str(no_recipe):
                raise UserError(f"{no_run}; {no_recipe}") from None
            raise
    if assignments:
        raise UserError(f"--set {assignments[0]}: {name} is a run, whose recipe is fixed")
    return folder.read_recipe(), folder


# --- membership -------------------------------------------------------------------------------


_MembershipAttack = Literal["shadow", "lira", "lira-offline", "rmia", "rmia-offline"]


class MembershipKeys(Section):
    """Keys of `--kind membership`.

    models: shadow models in the bank. attacks: out of shadow, lira, lira-offline, rmia and
    rmia-offline. game: who is in a model, coins or halves (shadow has its own). passes: of a model
    with noise of its own, over how many means are taken. seed: 64 hex digits; null draws a secret
    one, which is stored in private/.
    """

    models: ModelCount = 16
    attacks: Annotated[tuple[_MembershipAttack, ...], OneOrMore, Field(min_length=1)] = (
        "shadow",
        "lira",
        "rmia",
    )
    game: Literal["coins", "halves"] = "coins"
    passes: Annotated[tuple[Annotated[Count, Field(le=100_000)], ...], OneOrMore] = (100,)
    seed: HexKey | None = None


def _audit_membership(asked: _Asked, keys: MembershipKeys) -> None:
    """Train a bank of shadow models, attack all of them, and compare with what is proved."""
    from dpdist import pipeline
    from dpdist.audits.membership import Membership
    from dpdist.audits.membership_findings import ATTACKS

    chosen = [ATTACKS[name] for name in dict.fromkeys(keys.attacks)]
    averaged = tuple(sorted(set(keys.passes)))
    banks: list[tuple[Membership, list[MembershipAttack]]] = []
    if quarters := [one for one in chosen if one.needs_quarters_game]:
        bank = Membership(game="quarters", models=2, passes=averaged, seed=keys.seed)
        banks.append((bank, quarters))
    if others := [one for one in chosen if not one.needs_quarters_game]:
        bank = Membership(game=keys.game, models=keys.models, passes=averaged, seed=keys.seed)
        banks.append((bank, others))
    _check_banks(asked, banks)
    asked.folder.create_or_open(asked.recipe)
    with pipeline.run_session(asked.folder, executor=executor_name()):
        found = [_run_membership_attacks(asked, *bank) for bank in banks]
    if asked.as_json:
        console.print_json({title: dict(rows) for one in found for title, rows in one.tables()})
    if not all(one.within_guarantee for one in found):
        raise typer.Exit(ExitCode.REFUTED)


def _check_banks(
    asked: _Asked,
    banks: Sequence[tuple[Membership, Sequence[MembershipAttack]]],
) -> None:
    """Raise UserError for whatever could go wrong later, before anything is written."""
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.job import check_trainable

    if asked.output is not None and len(banks) > 1:
        raise UserError("--output: holds one bank; give shadow and the other attacks apart")
    for bank, attacks in banks:
        for one in attacks:
            one.check_game(bank.game_rules)
        bank.output_folder(asked.folder, asked.output)
    if not asked.folder.check_same_recipe(asked.recipe):
        refuse_unused(asked.recipe, asked.context)
    dataset, _ = check_trainable(asked.recipe, asked.context)
    for bank, _ in banks:
        bank.plan_shadows(asked.recipe, len(dataset))


def _run_membership_attacks(
    asked: _Asked, settings: Membership, attacks: Sequence[MembershipAttack]
) -> MembershipFindings:
    """Train what is missing of a bank, attack it, print what was found."""
    from dpdist import pipeline
    from dpdist.audits.membership_findings import run_attacks
    from dpdist.reports.figures import plot_roc_curves

    path = pipeline.evaluation_stage(
        asked.recipe, asked.folder, settings, asked.output, asked.workers
    )
    found = run_attacks(settings, asked.recipe, path, attacks)
    write_result(path.with_name("roc.png"), plot_roc_curves(*found.panel))
    if not asked.as_json:
        for title, rows in found.tables():
            typer.echo(console.format_table(rows, title=title))
        for note in found.notes:
            typer.echo(note)
        typer.echo(f"scores, models and numbers, all private: {path.parent}")
    return found


# --- poison -----------------------------------------------------------------------------------


_DEFAULT_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class VoteKeys(Section):
    """Keys of `--kind poison` beside those of `Poisoning`: how votes are read.

    select: of the models, those that choose the class. alpha: error of each certificate. radii: L2
    changes of the input besides, with sigma. changes: numbers of changed records to show.
    """

    select: Count = 6
    alpha: Probability = 0.001
    radii: Annotated[tuple[PositiveOrZero, ...], OneOrMore] = ()
    changes: Annotated[tuple[CountOrZero, ...], OneOrMore] = ()

    @property
    def all_radii(self) -> tuple[float, ...]:
        """Return the radii, 0 first."""
        return (0.0, *[radius for radius in self.radii if radius])


def _audit_poison(asked: _Asked, settings: Poisoning, keys: VoteKeys) -> None:
    """Certify answers against poisoned training records, by the votes of many models."""
    from dpdist import pipeline
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.job import check_trainable
    from dpdist.training.records import data_source, load_test_records

    recipe, folder = asked.recipe, asked.folder
    settings.output_folder(folder, asked.output)
    if not folder.check_same_recipe(recipe):
        refuse_unused(recipe, asked.context)
    trained = settings.data_recipe(recipe)
    records = len(check_trainable(trained, asked.context)[0])
    settings.choose_inputs(len(load_test_records(trained, data_source(trained))), asked.context)
    _, plan = settings.training_plan(trained, records)
    poisoned = None if settings.partitions else _poisoning_effect(settings, keys, plan, records)
    folder.create_or_open(recipe)
    with pipeline.run_session(folder, executor=executor_name()):
        path = pipeline.evaluation_stage(recipe, folder, settings, asked.output, asked.workers)
    votes = settings.read(path)
    found = _certify_votes(votes, poisoned, settings, keys)
    rows = _vote_rows(votes, found, plan, list(keys.changes), path)
    if asked.as_json:
        console.print_json(dict(rows))
    else:
        typer.echo(console.format_table(rows, title="against poisoned training records"))
    _write_csv(path.with_name("inputs.csv"), votes, found[0])


def _poisoning_effect(
    settings: Poisoning, keys: VoteKeys, plan: PrivacyPlan, records: int
) -> PoisoningBound:
    """Return the effect of changed records on one training, before it is trained.

    Raises UserError.
    """
    from dpdist.poisoning import certificates

    certificates.check_options(settings.models, keys.select, keys.all_radii, settings.sigma)
    if settings.bag is not None:
        return certificates.BaggingPoisoningBound(records, settings.bag)
    try:
        return certificates.PrivatePoisoningBound(plan)
    except ValueError as error:
        raise UserError(str(error)) from None


def _certify_votes(
    votes: Votes, effect: PoisoningBound | None, settings: Poisoning, keys: VoteKeys
) -> list[PoisoningCertificates]:
    """Return the statements: one of partitions; two of keys.

    Those of keys are each input's by itself, and one with which none of the whole set is false.
    """
    from dpdist.certification.statistics import ERROR
    from dpdist.poisoning.certificates import certify_partitioned_models, certify_random_models

    if effect is None:
        return [certify_partitioned_models(votes)]
    how: dict[str, Any] = {
        "select": keys.select, "radii": keys.all_radii, "sigma": settings.sigma
    }  # fmt: skip
    errors = (keys.alpha, ERROR / len(votes.index))
    return [certify_random_models(votes, effect, alpha=each, **how) for each in errors]


def _vote_rows(
    votes: Votes,
    certificates: list[PoisoningCertificates],
    plan: PrivacyPlan,
    shown: list[int],
    path: Path,
) -> list[tuple[str, str]]:
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
    return [*rows, ("votes, private", str(path))]


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
    console.log(f"each input: {path}")
