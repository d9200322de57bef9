"""Faults in membership inference and in the audit of many runs."""

from __future__ import annotations

from mutants.fault import Fault, group

MANY = "audits/test_many_runs"

FAULTS: list[Fault] = [
    *group(
        "dpdist/audits/scores.py", "audits/test_membership_scores",
        ("    np.put_along_axis(values, y, -np.inf, 1)\n", "",
         "the label's own logit is among the others"),
        ("others = (np.arange(len(phi)) != target)[:, None]",
         "others = (np.arange(len(phi)) >= 0)[:, None]",
         "the target is among its own references"),
        ("side=\"right\") / len(ratio_z)", "side=\"left\") / len(phi)",
         "the share of the population is of the models"),
    ),
    *group(
        "dpdist/audits/roc.py", "audits/test_roc",
        ("math.floor(false_positives * len(self.others) + 1e-9)",
         "math.ceil(false_positives * len(self.others) + 1)",
         "more false positives than asked for"),
        ("variance = sum(x.var(ddof=1) / len(x) if len(x) > 1",
         "variance = sum(x.var(ddof=1) / len(x) ** 2 if len(x) > 1",
         "the interval of the AUC is too narrow"),
    ),
    *group(
        "dpdist/audits/ceilings.py", "audits/test_roc",
        ("of_plan(replace(plan, neighbours=game))", "of_plan(plan)",
         "a replacement has the ceiling of an addition"),
        ("if true.low > float(self.at(false.high))", "if true.value > float(self.at(false.value))",
         "a point above the ceiling by chance is told"),
    ),
    *group(
        "dpdist/audits/games.py", "audits/test_membership_scores",
        ("words(derive_key(key, \"coins\", model), 0, records)",
         "words(derive_key(key, \"coins\"), 0, records)",
         "all models share their coins"),
    ),
    *group(
        "dpdist/audits/membership.py", "audits/test_membership",
        ("    private: ClassVar[bool] = True\n", "    private: ClassVar[bool] = False\n",
         "who was in a model may be published"),
        ("**_flat(recipe.model_dump", "**_flat({} and recipe.model_dump",
         "a bank of another recipe is continued"),
    ),
    *group(
        "dpdist/audits/vectorised.py", MANY,
        ("weights = (factors * finite)[0] * real", "weights = (factors * finite)[0]",
         "padding counts as records"),
        ("noise_key = derive_key(key, \"noise\", attempt, step)",
         "noise_key = derive_key(key, \"sample\", attempt, step)",
         "other noise than the loop's"),
    ),
]  # fmt: skip
