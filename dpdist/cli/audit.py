"""Attack a run's model or certificates (``dpdist attack``), and audit recipes (``dpdist audit``).

An audit measures a lower bound of epsilon, or how well an attacker identifies training records, or
certifies answers against poisoned training records.
"""

from __future__ import annotations

import math
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
        "Change a setting: attack.norm=l2, or 'attack.sizes=[0.5, 1]'. You can repeat it.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]
_Check = Annotated[
    bool,
    flag(
        "--check-certificates",
        "Attack the run's certificates within their radii instead; exit with code 1 if more are "
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
    """Attack the test split on all CPUs, white-box; repeat the command to resume.

    It prints the percentages of inputs that stay correct, are abstained on, and become incorrect,
    and of certified inputs. With attack.sigma, it attacks the classifier smoothed by that noise.
    The section attack of --set has the keys norm, sizes, attacks, steps, restarts, step_scale,
    sigma, samples, n, alpha, labels, start, every, max_inputs and seed; with --check-certificates
    also certificates and claim.
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
                f"attack.{', attack.'.join(useless)}: must be left out with --check-certificates, "
                "which takes norm, sizes, noise and samples from the certificates"
            )
        _attack_certificates(recipe, folder, settings, about, *how)
        return
    if any(value is not None for value in about.values()):
        raise UserError(
            "attack.certificates, attack.claim: must be left out without --check-certificates"
        )
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
    header, notes = shown.header, shown.notes
    if len(notes) > 1:  # a column for each table, too wide under its name
        first = len(header) - len(notes)
        header = [*header[:first], *(f"certified {n}" for n in range(1, len(notes) + 1))]
        notes = [f"{n}: {note}" for n, note in enumerate(notes, 1)]
    typer.echo(console.format_columns(header, shown.rows))
    for note in notes:
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
        raise UserError(f"{folder.path}: has no L2 or L-infinity certificates to attack")
    if output is not None and len(tables) > 1:
        names = ", ".join(path.parent.name for path in tables)
        raise UserError(
            f"--output: must be given for one table; set attack.certificates to one of {names}"
        )
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
        rows = [(f"table {each['certificates']}", check_line(each)) for each in found]
        typer.echo(console.format_table(rows, title="certificates under attack"))
    if not all(each["plausible"] for each in found):
        raise typer.Exit(ExitCode.REFUTED)


def _tables_to_attack(folder: RunFolder, name: str | None) -> list[Path]:
    from dpdist.core.fields import NORMS
    from dpdist.reports.results import load_results

    if name is None:
        found = load_results(folder).tables
        if not found:
            raise UserError(f"{folder.path}: has no certificates; run `dpdist certify` first")
        for table in found:
            if table.norm not in NORMS:
                console.log(f"{table.name}: skipped: {table.norm} certificates cannot be attacked")
        return [table.path for table in found if table.norm in NORMS]
    for path in (folder.certificates / name / "certificates.parquet", Path(name)):
        if path.is_file():
            return [path]
    raise UserError(f"attack.certificates: must be a table in {folder.certificates}, got {name}")


# --- dpdist audit -----------------------------------------------------------------------------


_Name = Annotated[
    str,
    typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a trained run (by name or path)."),
]
_Kind = Annotated[
    str | None,
    option(
        "Kind of audit: mechanism, canaries, many-runs, membership or poison (default: that of the "
        "recipe's audit section, or mechanism).",
        Literal["mechanism", "canaries", "many-runs", "membership", "poison"],
    ),
]
_AuditSet = Annotated[
    list[str] | None,
    option(
        "Change a setting of the audit, such as audit.releases=2000, membership.models=16 or "
        "poison.models=66; or a key of the recipe, such as training.steps=50. You can repeat it.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]


@dataclass(frozen=True)
class _Asked:
    """The arguments that all kinds of audits have. folder: that of an existing or a new run."""

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
    """Measure a lower bound of epsilon, attack membership, or certify against poisoning.

    The kinds mechanism, canaries and many-runs measure a lower bound of epsilon; membership trains
    shadow models and attacks them; poison trains many models and certifies their votes. Repeat the
    command to resume. Results of many trainings stay in private/.

    The section audit of --set has the keys alpha, audits and exploratory; for mechanism also
    releases, workers and seed; for canaries also canaries, canary, view and guesses; for many-runs
    also trainings, canary, copies and seed. The section membership has models, attacks, game,
    passes and seed. The section poison has models, select, alpha, sigma, radii, changes,
    partitions, bag, start, every, max_inputs and seed.

    The exit code is 1 if a measured epsilon exceeds the proved one, so that the code or the proof
    is wrong, or the claimed one.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output: must be a folder, got {output}")
    section = kind if kind in ("membership", "poison") else "audit"
    own = [each for each in changes or () if each.strip().startswith(f"{section}.")]
    of_recipe = [each for each in changes or () if each not in own]
    of_audit = changes_by_section(own, {section: None})[section]
    recipe, folder = _open_run_or_recipe(name, runs, of_recipe)
    if recipe.by_script is not None and kind not in (None, "mechanism"):
        raise UserError(
            f"--kind: must be mechanism for a run of a script, got {kind}, for which a command "
            "trains models again"
        )
    if kind not in ("membership", "poison"):
        if workers is not None:
            raise UserError("--workers: must be left out except with membership and poison")
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
        rows += [("meaning", found.meaning)]
        rows += [("assumed", line) for line in found.assumptions]
        rows += [
            (key.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
            for key, value in found.details.items()
            if value not in ([], None) and not isinstance(value, dict)  # the file has the counts
        ]
        typer.echo(console.format_table(rows, title=f"audit of {name}"))
        private = " (private, since it depends on many trainings)" * result.private
        typer.echo(f"result{private}: {output / result.file}")
    if folder is not None:
        pipeline.report_stage(folder)
    if found.verdict != CONSISTENT:
        raise typer.Exit(ExitCode.REFUTED)


def _open_run_or_recipe(
    name: str, runs: Path, assignments: list[str]
) -> tuple[Recipe, RunFolder | None]:
    """Return the recipe of a run and its folder, or a recipe with changed keys and None."""
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
        raise UserError(f"--set {assignments[0]}: must be left out: the recipe of a run is fixed")
    return folder.read_recipe(), folder


# --- membership -------------------------------------------------------------------------------


class MembershipKeys(Section):
    """The keys of `--kind membership`.

    models: number of shadow models. attacks: some of shadow, lira, lira-offline, rmia and
    rmia-offline. game: how records are assigned to models, coins or halves (shadow has its own).
    passes: numbers of passes to average for a model with its own noise. seed: 64 hex digits; null
    draws a secret seed, which is stored in private/.
    """

    models: ModelCount = 16
    attacks: Annotated[
        tuple[Literal["shadow", "lira", "lira-offline", "rmia", "rmia-offline"], ...],
        OneOrMore,
        Field(min_length=1),
    ] = ("shadow", "lira", "rmia")
    game: Literal["coins", "halves"] = "coins"
    passes: Annotated[tuple[Annotated[Count, Field(le=100_000)], ...], OneOrMore] = (100,)
    seed: HexKey | None = None


def _audit_membership(asked: _Asked, keys: MembershipKeys) -> None:
    """Train shadow models, attack all of them, and compare with the proved epsilon."""
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
    """Raise UserError for settings that would fail later, before anything is written."""
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.job import check_trainable

    if asked.output is not None and len(banks) > 1:
        raise UserError("--output: must be left out, or audit shadow and other attacks separately")
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
    """Train the missing models of a bank, attack it, and print the results."""
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
        typer.echo(f"scores, models and results, all private: {path.parent}")
    return found


# --- poison -----------------------------------------------------------------------------------


_DEFAULT_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class VoteKeys(Section):
    """The keys of `--kind poison` that certify votes, in addition to those of `Poisoning`.

    select: number of models that choose the class. alpha: error of each certificate. radii: L2
    radii of simultaneous changes of the input, with sigma. changes: numbers of changed records to
    show.
    """

    select: Count = 6
    alpha: Probability = 0.001
    radii: Annotated[tuple[PositiveOrZero, ...], OneOrMore] = ()
    changes: Annotated[tuple[CountOrZero, ...], OneOrMore] = ()

    @property
    def all_radii(self) -> tuple[float, ...]:
        """Return the radii, with 0 first."""
        return (0.0, *[radius for radius in self.radii if radius])


def _audit_poison(asked: _Asked, settings: Poisoning, keys: VoteKeys) -> None:
    """Certify answers against poisoned training records by the votes of many models."""
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
    rows = _vote_rows(votes, found, poisoned, plan, list(keys.changes), path)
    if asked.as_json:
        console.print_json(dict(rows))
    else:
        typer.echo(console.format_table(rows, title="against poisoned training records"))
    _write_csv(path.with_name("inputs.csv"), votes, found[0])


def _poisoning_effect(
    settings: Poisoning, keys: VoteKeys, plan: PrivacyPlan, records: int
) -> PoisoningBound:
    """Return the effect of changed records on one training. Raises UserError."""
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
    """Return the certificates of partitions; or of random models, with two errors.

    The first error is that of each input, the second one that of all inputs together.
    """
    from dpdist.certification.statistics import ERROR
    from dpdist.poisoning.certificates import certify_partitioned_models, certify_random_models

    if effect is None:
        return [certify_partitioned_models(votes)]
    return [
        certify_random_models(
            votes,
            effect,
            alpha=error,
            select=keys.select,
            radii=keys.all_radii,
            sigma=settings.sigma,
        )
        for error in (keys.alpha, ERROR / len(votes.index))
    ]


def _vote_rows(
    votes: Votes,
    certificates: list[PoisoningCertificates],
    effect: PoisoningBound | None,
    plan: PrivacyPlan,
    shown: list[int],
    path: Path,
) -> list[tuple[str, str]]:
    each = certificates[0]
    counts = shown or [k for k in _DEFAULT_COUNTS if k <= max(2, each.largest_changes)]
    rows = [("inputs", f"{len(votes.index):,}"), ("models", _describe_models(votes, each))]
    rows.append(("right", f"{format_percent((each.prediction == votes.label).mean())} %"))
    for one, scope in zip(certificates, ("", ", of all inputs together"), strict=False):
        for radius in one.max_changes:
            held = [(one.certified_accuracy(votes.label, k, radius), k) for k in counts]
            shares = ", ".join(f"{format_percent(at, round_down=True)} % at {k}" for at, k in held)
            moved = f" and an L2 change below {format_exact(radius)}" if radius else ""
            rows.append((f"changed records withstood{moved}{scope}", shares))
        rows += _few_votes_rows(one, effect, votes, scope)
    rows += _assumption_rows(votes, certificates, plan)
    return [*rows, ("votes, private", str(path))]


def _few_votes_rows(
    certificates: PoisoningCertificates, effect: PoisoningBound | None, votes: Votes, scope: str
) -> list[tuple[str, str]]:
    """Return a row if so few votes certify no changed record, whatever they are."""
    from dpdist.poisoning.certificates import min_votes

    counted = certificates.num_models
    if effect is None or certificates.largest_changes > 0:
        return []
    if (needed := min_votes(effect, certificates.alpha)) <= counted:
        return []
    models = f"{needed:,} would (--set poison.models={len(votes.vote) - counted + needed})"
    enough = models if math.isfinite(needed) else "with this training no number does"
    text = f"{counted:,} votes certify no changed record, even if all are equal; {enough}"
    return [(f"meaning{scope}", text)]


def _describe_models(votes: Votes, certificate: PoisoningCertificates) -> str:
    total = len(votes.vote)
    if certificate.alpha == 0:
        return f"{total}, each on its own shard of the records, without privacy"
    text = (
        f"{certificate.num_models} that vote, {total - certificate.num_models} others that "
        "chose the class"
    )
    bag = votes.settings.get("bag")
    return text + (f"; each on {bag:,} random records, without privacy" if bag else "")


def _assumption_rows(
    votes: Votes, certificates: list[PoisoningCertificates], plan: PrivacyPlan
) -> list[tuple[str, str]]:
    from dpdist.certification.statistics import ERROR
    from dpdist.poisoning.certificates import compose_vote_plans
    from dpdist.privacy.guarantee import format_epsilon

    bag = votes.settings.get("bag")
    public = [("left out", "records whose input is a test input (data.drop_test_records)")]
    if votes.settings.get("data.public"):
        public.append(("trusted", "data.public: records with its hashes are not trained on"))
    alpha = certificates[0].alpha
    error = ("error", f"alpha {alpha:g} each; all together: {ERROR:g} (union bound)")
    certified = ("certified", "the most frequent answer of the recipe over its secret keys")
    zero_out = "a record blanked out or filled in, N fixed"
    if bag or alpha == 0:
        change = "a record inserted or removed"
        if votes.settings.get("data.max_train") is not None:
            change = f"{zero_out} (data.max_train is a fraction of it)"
        return [
            ("a change", f"{change}; a different label counts as two"),
            *public,
            *([error, certified] if bag else []),
        ]
    one, total = plan.guarantee(), compose_vote_plans(plan, len(votes.vote)).guarantee()
    both = "; a different label or image counts as two"
    change = {
        "replace-one": "a record replaced by a different one",
        "add-or-remove-one": f"a record inserted or removed{both}",
    }.get(one.relation, f"{zero_out}{both}")
    return [
        ("a change", change),
        *public,
        error,
        certified,
        ("one training", str(one)),
        ("these votes, if published", f"epsilon = {format_epsilon(total.epsilon)}"),
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
