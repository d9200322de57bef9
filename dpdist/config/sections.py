"""Sections of a recipe (model, privacy, public, audit), and the rules between sections.

The options of a method are its class in `dpdist.methods`. A kind of audit is one class with its
options and description; `dpdist.audits.registry` lists its function. To add a kind, add a class
here and an entry there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from dpdist.certification.registry import AnyCertificate
from dpdist.config.data import DataRecipe
from dpdist.config.search import TuneRecipe
from dpdist.config.statistics import StatisticsRecipe
from dpdist.config.training import ResourcesRecipe, TrainingRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    MAX_SHIFT,
    Count,
    FilePath,
    Finite,
    HexKey,
    JsonObject,
    NoiseMultiplier,
    OptionCondition,
    Positive,
    Probability,
    RejectBool,
    Rule,
    RunName,
    Section,
    Text,
    describe_averaging,
    iter_errors,
    key_error,
    text_as,
    validation_message,
)
from dpdist.core.files import quoted

# --- audits -----------------------------------------------------------------------------------


_EVERY_STEP_VIEW = "every noisy sum, knowing the records and which of them joined each step"


class AuditOptions(Section):
    """Options that every kind of audit has.

    Attributes:
        kind: The kind of audit.
        alpha: Error probability of all `audits` audits of one run together.
        audits: Number of audits of this run that share alpha.
        exploratory: Run an audit in addition to `audits`, which states no bound.
    """

    kind: str
    alpha: Probability = 0.05
    audits: Count = 1
    exploratory: bool = False

    @property
    def folder_name(self) -> str:
        """Return the default folder of the result, which differs between kinds of audits."""
        return self.kind

    @property
    def adversary_view(self) -> str:
        """Return the adversary's view of the run, in words."""
        raise NotImplementedError

    @property
    def result_is_private(self) -> bool:
        """Return whether the result reveals more of the records than the run's guarantee covers.

        Reports, cards, releases, fetches and archives without private state omit such a result.
        """
        return False

    @property
    def audits_users(self) -> bool:
        """Return whether canaries may be users, with privacy.unit: user."""
        return False

    @property
    def canary_audit(self) -> CanaryAudit | None:
        """Return the canaries that a training with this section adds to its records, or None."""
        return None

    def check_recipe(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a recipe that does not support this audit."""


class MechanismAudit(AuditOptions):
    """An audit of the parts of a training step with canaries.

    The parts are sampling, clipped sum, reduction, noise, rounding and division. No record of the
    run is read. With privacy.unit: user a canary is a user.

    Attributes:
        releases: Number of releases with the canary, and the same number without it.
        workers: Number of workers that compute the sum.
        seed: Seed of the keys.
    """

    kind: Literal["mechanism"] = "mechanism"
    releases: Annotated[int, RejectBool, Field(ge=100, le=10_000_000)] = 20_000
    workers: Annotated[int, RejectBool, Field(ge=1, le=64)] = 2
    seed: Text = "0"

    @property
    def audits_users(self) -> bool:
        return True

    @property
    def adversary_view(self) -> str:
        return "single releases"


class ManyRunsAudit(AuditOptions):
    """An audit by many trainings of the recipe, with a canary and without; for small models.

    Its counts depend on all these models of the private records, and stay private.

    Attributes:
        trainings: Total number of trainings, every second one with the canary.
        canary: An input unlike all others (the adversary sees the model), or a gradient of the
            clip's norm along one coordinate (the adversary sees every noisy sum, and knows the
            records and which of them joined each step).
        copies: Number of copies of the canary.
        seed: Seed of the trainings, 64 hex digits; null draws a secret one.
    """

    kind: Literal["many-runs"] = "many-runs"
    trainings: Annotated[int, RejectBool, Field(ge=8, le=1_000_000)] = 1000
    canary: Literal["input", "gradient"] = "input"
    copies: Annotated[int, RejectBool, Field(ge=1, le=64)] = 1
    seed: HexKey | None = None

    @property
    def sees_every_step(self) -> bool:
        """Return whether the adversary sees every step, and the plan predicts the scores."""
        return self.canary == "gradient"

    @property
    def adversary_view(self) -> str:
        return _EVERY_STEP_VIEW if self.sees_every_step else "the final model"

    @property
    def result_is_private(self) -> bool:
        return True

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{self.canary}-{self.copies}"


class CanaryAudit(AuditOptions):
    """An audit by one training with canaries in addition to its records.

    A separate secret coin decides whether each canary is in or out, and the adversary guesses
    coins. The trained model is never released. All settings are fixed before the training. With
    privacy.unit: user a gradient canary represents a user; other canaries are records, and are not
    supported.

    Attributes:
        canaries: Number of canaries.
        canary: gradient (white box: of the clip's norm, on a separate coordinate), mislabeled (a
            public input with a wrong label), blank (a constant input), or pair (a random input with
            label 0 or label 1: its coin replaces a record).
        view: The adversary's view: every-step, all noisy sums, with knowledge of the records and
            which of them joined each step (only for gradient canaries); or final, the trained
            model.
        guesses: Number of guessed coins, half of them as in (default: 8 % of the canaries).
    """

    kind: Literal["canaries"] = "canaries"
    canaries: Annotated[int, RejectBool, Field(ge=20, le=1_000_000)] = 1000
    canary: Literal["gradient", "mislabeled", "blank", "pair"] = "gradient"
    view: Literal["every-step", "final"] | None = None
    guesses: Annotated[int, RejectBool, Field(ge=2)] | None = None

    def rules(self) -> Iterator[Rule]:
        beyond = self.num_guesses > self.canaries
        yield Rule(beyond, f"must be <= canaries ({self.canaries})", "guesses")
        every = self.view == "every-step" and not self.inserts_gradients
        yield Rule(every, "must not be every-step without canary: gradient", "view")

    @property
    def num_guesses(self) -> int:
        """Return the even number of guessed coins."""
        return 2 * round(0.04 * self.canaries) if self.guesses is None else self.guesses // 2 * 2

    @property
    def inserts_gradients(self) -> bool:
        """Return whether the canaries are gradients in the clipped sums rather than records."""
        return self.canary == "gradient"

    @property
    def replaces_record(self) -> bool:
        """Return whether a coin replaces a record, or its gradient, under replace-one."""
        return self.inserts_gradients or self.canary == "pair"

    @property
    def sees_every_step(self) -> bool:
        """Return whether the adversary sees every step, by default for canaries in the sums."""
        return self.inserts_gradients and self.view != "final"

    @property
    def adversary_view(self) -> str:
        if self.sees_every_step:
            return _EVERY_STEP_VIEW
        return "the trained model" if self.replaces_record else "the trained model's answers"

    @property
    def audits_users(self) -> bool:
        return self.inserts_gradients

    @property
    def folder_name(self) -> str:
        return f"canaries-{'every-step' if self.sees_every_step else 'final'}"

    @property
    def canary_audit(self) -> CanaryAudit:
        return self

    def report_note(self, records: int, counted: str) -> str:
        """Return the mark of the run in a report.

        records: number of records of the plan. counted: "records" or "users".
        """
        coin = "under label 0 or 1" if self.canary == "pair" else "in or out"
        return (
            f"not for release: {self.canaries:,} of its {records:,} {counted} are {self.canary} "
            f"canaries, each {coin} by a secret coin"
        )

    def check_recipe(self, recipe: BaseRecipe) -> None:
        if recipe.tune is not None:
            raise ValueError(
                "audit.kind: canaries must not be used with tune; audit the best values in a "
                "recipe without tune"
            )
        if self.canary == "pair" and recipe.privacy.adjacency != "replace-one":
            raise ValueError(
                "audit.canary: pair replaces a record, which is two steps of add-or-remove-one; "
                "give privacy.adjacency: replace-one"
            )
        if self.inserts_gradients and recipe.privacy.noise_multiplier == 0:
            raise ValueError(
                "audit.canary: gradient must not be used without noise, as such sums have no "
                "guarantee to audit; give privacy.noise_multiplier"
            )


def _audit_kind(section: Any) -> str:
    """Return the kind of a section, by default `mechanism`."""
    if isinstance(section, AuditOptions):
        return section.kind
    return str(section.get("kind", "mechanism")) if isinstance(section, Mapping) else "mechanism"


AnyAudit = Annotated[
    Annotated[MechanismAudit, Tag("mechanism")]
    | Annotated[CanaryAudit, Tag("canaries")]
    | Annotated[ManyRunsAudit, Tag("many-runs")],
    Discriminator(_audit_kind),
]
"""The recipe's ``audit`` section."""


# --- model, privacy and public data -----------------------------------------------------------


class PretrainedRecipe(Section):
    """Weights trained without this run's records.

    Attributes:
        folder: A model folder, such as that of `dpdist run --until pretrain` or a run's release/.
            As `initial` of model transformer also a base with config.json and safetensors.
        pretraining_data: Name of the data that the weights were trained on, for a folder that does
            not state it. It is declared, not checked.
    """

    folder: FilePath
    pretraining_data: Text | None = None


class ModelRecipe(Section):
    """The model: a name from the zoo or package.module:factory.

    Attributes:
        name: A name from the zoo, torchvision:NAME (without BatchNorm), or
            package.module:factory, a function that returns a torch module.
        options: Arguments of the model's factory.
        mean: Public constants, one per channel or one for all, that the model subtracts from its
            input.
        std: Public constants, one per channel or one for all, that the model divides its input by.
        vmap: Run each record alone through the model in private training, so that your own model
            cannot mix records. It is slower.
        initial: Public initial weights. The path of the folder is sufficient.
        classifier: A frozen public classifier after the model, which then is a denoiser.
        denoiser: A frozen public denoiser before the model, which then is a classifier.
        trained: Names of the modules that the run trains, including all modules inside. The others
            keep their public initial weights.
        shifts: Average the trained model over the image and moves of it by up to this many pixels:
            four more passes for each pixel.
        mirrored: Average the trained model also over mirror images: twice the passes.
    """

    name: Text
    options: JsonObject = Field(default={})
    mean: list[Finite] = Field(default=[], max_length=10_000)
    std: list[Positive] = Field(default=[], max_length=10_000)
    vmap: bool = False
    initial: Annotated[PretrainedRecipe | None, text_as("folder")] = None
    classifier: Annotated[PretrainedRecipe | None, text_as("folder")] = None
    denoiser: Annotated[PretrainedRecipe | None, text_as("folder")] = None
    trained: list[Text] = Field(default=[], max_length=1000)
    shifts: Annotated[int, RejectBool, Field(ge=0, le=MAX_SHIFT)] = 0
    mirrored: bool = False

    @model_validator(mode="before")
    @classmethod
    def _expand_torchvision(cls, values: Any) -> Any:
        """Replace torchvision:NAME by the zoo's torchvision network of that architecture."""
        name = values.get("name") if isinstance(values, Mapping) else None
        package, _, architecture = name.partition(":") if isinstance(name, str) else ("", "", "")
        if package != "torchvision" or not architecture:
            return values
        options = values.get("options", {})
        if isinstance(options, Mapping):  # else the field's own error follows
            options = {**options, "architecture": architecture}
        return {**values, "name": package, "options": options}

    @property
    def display_name(self) -> str:
        """Return a name of the model for display."""
        return describe_averaging(self.name, self.shifts, self.mirrored)

    @property
    def averaging_key(self) -> str | None:
        """Return the key that asks for an average over views, or None."""
        return "shifts" if self.shifts else "mirrored" if self.mirrored else None

    def rules(self) -> Iterator[Rule]:
        parts = [each is not None for each in (self.initial, self.classifier, self.denoiser)]
        yield Rule(
            sum(parts) > 1,
            "give only one of initial, classifier and denoiser: the run trains the whole model, or "
            "the part that is not frozen",
        )
        needs = "needs initial: the public weights of what is not trained"
        yield Rule(self.trained and self.initial is None, needs, "trained")

    @property
    def pretrained_part(
        self,
    ) -> tuple[Literal["initial", "classifier", "denoiser"], PretrainedRecipe] | None:
        """Return the name of the pretrained part and its weights, or None."""
        if self.initial is not None:
            return "initial", self.initial
        return self.frozen_part

    @property
    def frozen_part(self) -> tuple[Literal["classifier", "denoiser"], PretrainedRecipe] | None:
        """Return the name of the frozen part and its weights, or None."""
        if self.classifier is not None:
            return "classifier", self.classifier
        return None if self.denoiser is None else ("denoiser", self.denoiser)


# delta of a training without noise, which has no guarantee: it is never shown
_DELTA_WITHOUT_NOISE = 1e-9


class PrivacyRecipe(Section):
    """The privacy target: either epsilon or noise_multiplier.

    With epsilon the noise is calibrated so that the guarantee is never above the target. With
    noise_multiplier 0 there is no guarantee, and delta may be left out.

    Attributes:
        epsilon: Largest privacy cost of the run at `delta`, to which the noise is calibrated. Give
            either this or `noise_multiplier`.
        noise_multiplier: Standard deviation of the noise on each clipped sum, in units of
            `clip_norm`. The plan then states its epsilon; 0 is no privacy.
        delta: Probability with which the guarantee may fail, below one over the number of records.
        adjacency: The two data sets that the guarantee compares: one record more or less
            (zero-out, at a fixed number of records), or one record replaced, at about twice the
            privacy cost.
        allow_large_delta: Accept a delta of one over the number of records or more, under which a
            whole record may be published.
        clipping: The rule that bounds a record's gradient: flat, one norm over all parameters;
            automatic, scaled to norm 1; per-layer; or none, gradients as they are, without privacy.
        clip_norm: Largest L2 norm that a record adds to a sum. The word automatic sets clipping:
            automatic with norm 1.
        batch_cap: Hard cap on the number of records of a step: truncated Poisson sampling.
        budget: Folder of budgets. The run is added to the budget of its records.
        budget_composition: Composition of runs: filter is valid if runs are chosen by earlier
            results; non-adaptive is not.
        unit: The protected unit: one record, or the user of data.columns.user, which is then
            sampled, clipped and protected as one.
        max_records_per_user: Largest number of records of a user that count in one step.
        run_key: Fixed key (64 hex digits), for tests only: the run is then NOT private.
    """

    conditions = (
        OptionCondition(
            ("clip_norm",), "if gradients are clipped", lambda it: it.clipping != "none"
        ),
        OptionCondition(
            ("budget_composition",),
            "with budget_ceiling",
            lambda it: it.budget_ceiling is not None,
        ),
        OptionCondition(("max_records_per_user",), "with unit: user", lambda it: it.unit == "user"),
    )

    epsilon: Positive | None = None
    noise_multiplier: NoiseMultiplier | None = None
    delta: Probability
    clip_norm: Positive = 1.0
    clipping: Literal["flat", "automatic", "per-layer", "none"] = "flat"
    adjacency: Literal["add-or-remove-one", "replace-one"] = "add-or-remove-one"
    batch_cap: Count | None = None
    allow_large_delta: bool = False
    nominal_records: Count | None = Field(
        default=None,
        description="a declared number of records: rate, divisor and steps follow from it, and "
        "the true number stays private",
    )
    unit: Literal["record", "user"] = "record"
    max_records_per_user: Annotated[int, RejectBool, Field(ge=1, le=1000)] | None = None
    budget: FilePath | None = None
    budget_ceiling: Positive | None = Field(
        default=None,
        description="epsilon that all runs on the same records stay within; fixed by the first",
    )
    budget_delta: Probability | None = Field(
        default=None, description="delta of the ceiling (default: privacy.delta)"
    )
    budget_composition: Literal["filter", "non-adaptive"] = "filter"
    run_key: HexKey | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_automatic_clip(cls, values: Any) -> Any:
        """Replace `clip_norm: automatic` by the normalizing clip to norm 1."""
        if not isinstance(values, Mapping) or values.get("clip_norm") != "automatic":
            return values
        if (rule := values.get("clipping", "automatic")) != "automatic":
            text = f"must be a number with clipping: {quoted(rule)}, got automatic"
            raise key_error("clip_norm", f"{text}; leave clipping out")
        return {**values, "clipping": "automatic", "clip_norm": 1.0}

    @model_validator(mode="before")
    @classmethod
    def _ask_no_delta_without_noise(cls, values: Any) -> Any:
        """Accept a noise multiplier of 0 without a delta."""
        if not isinstance(values, Mapping) or "delta" in values:
            return values
        noise = values.get("noise_multiplier")
        if isinstance(noise, int | float) and not isinstance(noise, bool) and noise == 0:
            return {**values, "delta": _DELTA_WITHOUT_NOISE}
        return values

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options of this section; the first broken one is the error.

        Yields:
            A `Rule` each: `broken` (true if the settings break it), `text`, `key` and `see` (str).
        """
        yield Rule(
            (self.epsilon is None) == (self.noise_multiplier is None),
            "give exactly one of epsilon and noise_multiplier",
            see="explanation/privacy.md#cost-of-a-training-run",
        )
        ceiling = self.budget_ceiling is not None
        needs = "needs budget, the folder where runs are recorded"
        yield Rule(ceiling and self.budget is None, needs, "budget_ceiling")
        lone_delta = self.budget_delta is not None and not ceiling
        yield Rule(lone_delta, "needs budget_ceiling, the epsilon at this delta", "budget_delta")
        yield Rule(
            self.nominal_records is not None and self.batch_cap is not None,
            "nominal_records does not go with batch_cap: the cost of a capped batch depends on the "
            "true number of records",
            see="explanation/privacy.md#what-is-protected-against-what",
        )
        if self.unit == "record":
            return
        wanted: dict[str, tuple[bool, str]] = {
            "max_records_per_user": (self.max_records_per_user is None, "be given, such as 4"),
            "adjacency": (self.adjacency != "add-or-remove-one", "be add-or-remove-one"),
            "batch_cap": (self.batch_cap is not None, "be left out"),
            "nominal_records": (self.nominal_records is not None, "be left out"),
            "budget": (
                self.budget is not None,
                "be left out, as a budget counts single records and never mixes them with users",
            ),
        }
        for key, (broken, what) in wanted.items():
            yield Rule(
                broken,
                f"with unit: user it must {what}",
                key,
                see="explanation/privacy.md#a-person-as-the-unit",
            )

    @property
    def sensitivity(self) -> float:
        """Return the largest L2 norm that one record adds to a sum of gradients; or infinity."""
        return math.inf if self.clipping == "none" else self.clip_norm

    @property
    def clipping_description(self) -> str:
        """Return how a record's gradient g is bounded, a str; "" for the default, flat clip."""
        norm = f"{self.clip_norm:g}"
        return {
            "automatic": f"automatic: every gradient g becomes {norm} g / (|g| + 0.01) (Bu et al. "
            "2023)",
            "per-layer": f"per layer: all layers' clips together make L2 norm {norm}",
            "none": "none",
        }.get(self.clipping, "")


class Privacy(PrivacyRecipe):
    """Settings of the privacy of a training: `Privacy(epsilon=3, delta=1e-5)`.

    Guarantee: the privacy cost of a training is at most `epsilon` at `delta`, to which its noise is
    calibrated. With `noise_multiplier` instead of `epsilon`, the plan states its epsilon.

    It is the recipe's section `privacy`, built in Python; each field is an attribute.

    Args:
        values: fields of the section: epsilon or noise_multiplier, delta, clip_norm, clipping,
            adjacency, batch_cap, nominal_records, unit and max_records_per_user,
            run_key (for tests). `clip_norm="automatic"` scales every record's gradient g to
            g / (|g| + 0.01): one setting less to tune, and a record still adds at most L2 norm 1.

    Raises:
        UserError: one line for each field that is wrong.

    Source:
        Bu et al., "Automatic Clipping", NeurIPS 2023 (`clip_norm="automatic"`).

    Example:
        >>> from dpdist import Privacy
        >>> Privacy(epsilon=3, delta=1e-5).clip_norm
        1.0
        >>> Privacy(epsilon=3, delta=1e-5, clip_norm="automatic").clipping
        'automatic'
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError("\n".join(map(_complaint, iter_errors(error)))) from None


def as_privacy(privacy: PrivacyRecipe | Mapping[str, Any], context: str) -> PrivacyRecipe:
    """Return settings of privacy from an object or a dict. Raises UserError."""
    if isinstance(privacy, PrivacyRecipe):
        return privacy
    if not isinstance(privacy, Mapping):
        raise UserError(
            f"{context}: privacy: must be a dpdist.Privacy, or a dict of its fields, got "
            f"{type(privacy).__name__}"
        )
    return Privacy(**privacy)


# Names of the same settings in Opacus.
_ELSEWHERE = {"max_grad_norm": "clip_norm", "target_epsilon": "epsilon", "target_delta": "delta"}


def _complaint(item: Any) -> str:
    named = [item["ctx"]["key"]] if item["type"] == "of_key" else []
    key, rule = ".".join(["privacy", *map(str, item["loc"]), *named]), validation_message(item)
    if item["type"] == "extra_forbidden" and (ours := _ELSEWHERE.get(str(item["loc"][-1]))):
        return f"{key}: {rule}, take {ours}"
    told = item["type"] in ("extra_forbidden", "missing") or isinstance(item["input"], dict)
    return f"{key}: {rule}" if told else f"{key}: {rule}, got {quoted(item['input'])}"


class DenoiserRecipe(Section):
    """A network from images to images, from the zoo.

    Attributes:
        name: A name from the zoo.
        options: Arguments of its factory.
    """

    name: Text
    options: JsonObject = Field(default={})


class PublicRecipe(Section):
    """Settings of `dpdist run --until pretrain`, which trains WITHOUT privacy, on public records.

    It trains initial weights of the model, or its frozen part.

    Attributes:
        model: The network of the frozen part. Leave it out with model.initial, which is the model.
        training: Settings of the public training.
        sigma: Standard deviation of the input noise that a denoiser learns to remove, or that a
            classifier learns to tolerate.
        data: A different data set, whose training split is all public (images are resized); by
            default in the folder of the recipe's data. For initial weights its classes may differ:
            the head then keeps its random weights. By default, the records that data.public sets
            aside.
        augment: Deform each image at random.
        weights: Initial weights: a torchvision state dict in safetensors format, or torchvision to
            download the published ones.
        denoiser: With initial weights, a network that first learns to remove the noise by the same
            training. It is then frozen before the model, also in the run.
    """

    conditions = (
        OptionCondition(
            (
                "training.reproducible", "model.vmap", "model.initial", "model.classifier",
                "model.denoiser", "model.trained",
            ),
            "to the private training",
        ),
        OptionCondition(
            ("data.public", "data.private_eval_fraction", "data.fraction"),
            "to the private records (all of public.data is public; public.data.max_train takes "
            "some of them)",
        ),
    )  # fmt: skip

    model: Annotated[ModelRecipe | None, text_as("name")] = None
    training: TrainingRecipe
    sigma: Positive | None = None
    data: DataRecipe | None = None
    augment: Literal[True] | None = None
    weights: Literal["torchvision"] | FilePath | None = None
    denoiser: Annotated[DenoiserRecipe | None, text_as("name")] = None


class BaseRecipe(Section):
    """A whole recipe with any method, and everything that a method's rules may read.

    Attributes:
        name: Name of the run, and of its folder. By default the name of the recipe's file.
        data: The data set.
        model: The model.
        method: The training method: a name, or a section with `name` and its options.
        privacy: The privacy target.
        training: The training loop.
        public: Training on public records before the run, by `dpdist run --until pretrain`.
        certify: The certificate, and the inputs to certify, if any.
        audit: An audit of the run: a lower bound of epsilon by an attack.
        tune: A private search over keys of the recipe.
        statistics: Range and fill of columns without public constants, estimated with noise before
            the training.
        resources: Machines and processes; the only section that may change when a run continues.
    """

    name: RunName
    data: DataRecipe
    model: Annotated[ModelRecipe, text_as("name")]
    method: Any
    privacy: PrivacyRecipe
    training: TrainingRecipe
    public: PublicRecipe | None = None
    certify: AnyCertificate | None = None
    audit: AnyAudit | None = None
    tune: TuneRecipe | None = None
    statistics: StatisticsRecipe | None = None
    resources: ResourcesRecipe = ResourcesRecipe()

    @field_validator("privacy", mode="before")
    @classmethod
    def _expand_no_privacy(cls, value: Any) -> Any:
        """Replace `privacy: none` by a training without clip and noise."""
        if not isinstance(value, str | bool):
            return value
        if value != "none":  # off and no are false in YAML
            raise ValueError("must be a section, or none for a training without privacy")
        return {"noise_multiplier": 0.0, "clipping": "none"}

    @property
    def canary_audit(self) -> CanaryAudit | None:
        """Return the section `audit` if it adds canaries to the training, else None."""
        return None if self.audit is None else self.audit.canary_audit

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the sections of the recipe; the first broken one is the error.

        Yields:
            A `Rule` each: `broken` (true if the settings break it), `text`, `key` and `see` (str).
        """
        if self.public is not None:
            yield from self._public_rules(self.public)
        yield from self._method_rules()
        yield from self._input_rules()
        if self.statistics is not None:
            yield from self._statistics_rules(self.statistics)
        yield from self._loss_rules()
        if self.audit is not None:
            self.audit.check_recipe(self)
        yield from self._count_rules()

    def _public_rules(self, public: PublicRecipe) -> Iterator[Rule]:
        part = (self.model.pretrained_part or ("",))[0]
        yield Rule(
            not part,
            "public needs model.initial, model.classifier or model.denoiser, the folder that "
            "pretrain writes",
        )
        both = public.denoiser is not None
        noise = "is required, the noise that the denoiser removes"
        lacks_sigma = public.sigma is None and (part == "denoiser" or both)
        yield Rule(lacks_sigma, noise, "public.sigma")
        itself = "must be left out with model.initial, which is the model itself"
        yield Rule(part == "initial" and public.model is not None, itself, "public.model")
        frozen = "is required, the network of the frozen part"
        yield Rule(part != "initial" and public.model is None, frozen, "public.model")
        key = public.model and public.model.averaging_key
        yield Rule(key, "must be left out; only the trained model averages", f"public.model.{key}")
        if not both:
            return
        yield Rule(
            self.model.initial is None,
            "needs model.initial; for only a denoiser, give model.denoiser and public.model",
            "public.denoiser",
        )
        out = "must be left out with public.denoiser"
        yield Rule(public.weights is not None, out, "public.weights")
        yield Rule(self.model.trained, out, "model.trained")

    def _method_rules(self) -> Iterator[Rule]:
        method = self.method
        before = {
            "model.denoiser": self.model.denoiser,
            "public.denoiser": self.public and self.public.denoiser,
        }
        for key, denoiser in before.items():
            yield Rule(
                denoiser is not None and not method.capabilities.supports_frozen_denoiser,
                f"must be left out with method {method.name}, which changes the inputs or the "
                "first layer, and they would be the frozen denoiser's; or use a different method",
                key,
            )
        averaged = self.model.averaging_key
        yield Rule(
            averaged and method.capabilities.has_prediction_noise,
            f"must be left out with method {method.name}, which leaves noise inside the model that "
            "several passes would not share",
            f"model.{averaged}",
        )

    def _input_rules(self) -> Iterator[Rule]:
        asked = {
            "certify": self.certify is not None,
            "model.shifts": self.model.shifts > 0,
            "model.mirrored": self.model.mirrored,
            "training.crop, flip": self.training.has_augmentation,
            f"method {self.method.name}": not self.method.capabilities.supports_tokens,
        }
        scored = self.tune is not None and self.tune.score.function is None
        of_labels = {"tune": scored, "audit": self.audit is not None}
        if self.data.targets != "class":
            of_labels |= {"certify": self.certify is not None, "public": self.public is not None}
        why = [self.data.numeric_input_error(what) for what, given in asked.items() if given]
        why += [self.data.single_label_error(what) for what, given in of_labels.items() if given]
        yield from (Rule(found, f"{found}: leave it out") for found in why)

    def _statistics_rules(self, statistics: StatisticsRecipe) -> Iterator[Rule]:
        columns = self.data.columns
        for name in statistics.columns:
            rule = columns.preprocessing.get(name)
            words = rule is None or bool(rule.categories) or rule.drop or name == columns.label
            needs = "must be a feature of numbers or dates"
            yield Rule(words, needs, f"statistics.columns.{name}")
        yield Rule(
            self.privacy.noise_multiplier == 0,
            "statistics: must be left out of a training without privacy",
        )
        yield Rule(
            self.privacy.budget is not None,
            "statistics: must be left out with privacy.budget, which is charged after them",
        )
        yield Rule(
            self.public is not None,
            "statistics: must be left out with public, which trains before they are known",
        )

    def _loss_rules(self) -> Iterator[Rule]:
        loss, targets = self.training.loss, self.data.targets
        if loss == "cross-entropy" and targets == "class":
            return
        yield Rule(
            not self.method.capabilities.plain_steps,
            f"training.loss: must be cross-entropy with method {self.method.name}, which defines "
            "its own loss; leave it out, or use method dp-sgd",
        )
        yield Rule(
            self.audit is not None,
            "audit: must be left out unless training.loss is cross-entropy, for which its canaries "
            "are designed",
        )
        losses = {"class": "cross-entropy", "number": "mse huber", "labels": "bce multi-label-bce"}
        fitting = losses[targets].split()
        named = " or ".join((*fitting, "your own function"))
        yield Rule(
            not self.training.own_loss and loss not in fitting,
            f"training.loss: must be {named} with data.targets: {targets}, got {loss}",
        )
        one = "data.classes: must be 1 with training.loss bce; or use multi-label-bce"
        yield Rule(loss == "bce" and self.data.classes != 1, one)

    def _count_rules(self) -> Iterator[Rule]:
        elastic, nominal = self.resources.is_elastic, self.privacy.nominal_records is not None
        yield Rule(
            elastic and not self.training.reproducible and self.privacy.budget_ceiling is not None,
            "resources.workers: must be a number with privacy.budget_ceiling, unless "
            "training.reproducible: steps that a change repeats would exceed the ceiling",
            see="how-to/cluster.md#more-or-fewer-workers",
        )
        yield Rule(
            nominal and self.data.max_train is not None,
            "privacy.nominal_records does not go with data.max_train, a fraction of the true "
            "number of records; use data.fraction",
        )
        if self.tune is None:
            return
        yield Rule(
            nominal,
            "privacy.nominal_records does not go with tune, which counts records; search without "
            "it, and train with the best values",
        )
        yield Rule(
            elastic,
            "resources.workers: must be a number with tune, as the number of concurrent trials "
            "depends on it",
        )
        yield Rule(
            self.resources.archive_private,
            "resources.archive_private: must be left out with tune, as an archive does not have "
            "all releases of the trials; keep the run folder",
        )
