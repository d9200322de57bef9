"""Public ranges of common clinical and census columns, by the names of columns.

Ranges are limits of scales, top codes of surveys, and wide limits of adult physiology, and do not
come from private records. Values beyond are cut, so a narrow range costs accuracy, not privacy.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SCALE = "the scale's definition"
CENSUS = "the US Current Population Survey and its extract Adult (UCI)"
MEASURED = (
    "inside the valid ranges of the MIMIC-III benchmark (Harutyunyan et al. 2019, Scientific Data "
    "6:96)"
)
WIDE = "wide limits of adults, chosen here"


class PublicRange(NamedTuple):
    """A public range of a column. names: in lower case, without blanks and signs.

    typical: an ordinary adult's value, which replaces a missing cell. log1p: whether to take
    log(1 + x), for amounts of several orders of magnitude.
    """

    names: str
    low: float
    high: float
    typical: float
    unit: str
    source: str
    log1p: bool = False


PUBLIC_RANGES = (
    PublicRange("age ageyears ageatadmission patientage anchorage", 0, 120, 50, "years", WIDE),
    PublicRange("sysbp sbp systolic systolicbp systolicbloodpressure aphi trestbps restingbp",
                60, 260, 120, "mmHg", MEASURED),
    PublicRange("diabp dbp diastolic diastolicbp diastolicbloodpressure aplo",
                30, 160, 75, "mmHg", MEASURED),
    PublicRange("map meanbp meanarterialpressure meanbloodpressure", 30, 200, 85, "mmHg", MEASURED),
    PublicRange("bp bloodpressure", 0, 260, 100, "mmHg", WIDE),
    PublicRange("heartrate hr pulse pulserate restingheartrate thalach maxhr",
                30, 220, 80, "per minute", MEASURED),
    PublicRange("resprate rr respiratoryrate respirationrate", 0, 60, 18, "per minute", MEASURED),
    PublicRange("spo2 o2sat sao2 oxygensaturation", 50, 100, 97, "%", MEASURED),
    PublicRange("temp temperature bodytemperature tempc", 30, 43, 37, "degrees Celsius", MEASURED),
    PublicRange("bmi bodymassindex", 10, 70, 26, "kg/m2", WIDE),
    PublicRange("height heightcm", 100, 220, 170, "cm", MEASURED),
    PublicRange("weight weightkg", 20, 250, 75, "kg", MEASURED),
    PublicRange("waist waistcircumference", 40, 200, 95, "cm", WIDE),
    PublicRange("glucose bloodglucose fastingglucose avgglucoselevel bgr plasglucose",
                33, 500, 100, "mg/dL", MEASURED),
    PublicRange("hba1c a1c glycatedhemoglobin hba1clevel", 3, 20, 5.5, "%", WIDE),
    PublicRange("cholesterol chol totchol totalcholesterol serumcholesterol",
                32, 600, 195, "mg/dL", MEASURED),
    PublicRange("hdl hdlc hdlcholesterol", 5, 150, 50, "mg/dL", WIDE),
    PublicRange("ldl ldlc ldlcholesterol", 5, 400, 120, "mg/dL", WIDE),
    PublicRange("triglycerides trig", 0, 1500, 130, "mg/dL", WIDE, True),
    PublicRange("creatinine serumcreatinine creat", 0.1, 20, 1, "mg/dL", MEASURED),
    PublicRange("bun bloodureanitrogen", 0, 150, 15, "mg/dL", MEASURED),
    PublicRange("sodium serumsodium", 100, 180, 140, "mmol/L", MEASURED),
    PublicRange("potassium serumpotassium", 1, 10, 4.2, "mmol/L", MEASURED),
    PublicRange("chloride", 60, 150, 104, "mmol/L", MEASURED),
    PublicRange("bicarbonate hco3", 0, 60, 24, "mmol/L", MEASURED),
    PublicRange("lactate", 0.4, 30, 1.8, "mmol/L", MEASURED),
    PublicRange("hemoglobin haemoglobin hgb hb hemo", 2, 25, 14, "g/dL", MEASURED),
    PublicRange("hematocrit haematocrit hct pcv", 5, 75, 42, "%", MEASURED),
    PublicRange("wbc whitebloodcellcount wbccount leukocytes", 0, 200, 8, "10^9/L", MEASURED, True),
    PublicRange("platelets plateletcount plt", 0, 2000, 250, "10^9/L", MEASURED, True),
    PublicRange("albumin serumalbumin", 0.6, 6, 4, "g/dL", MEASURED),
    PublicRange("bilirubin totalbilirubin", 0.1, 60, 0.9, "mg/dL", MEASURED, True),
    PublicRange("alt alanineaminotransferase sgpt", 2, 10_000, 34, "U/L", MEASURED, True),
    PublicRange("ast aspartateaminotransferase sgot", 6, 20_000, 40, "U/L", MEASURED, True),
    PublicRange("alp alkalinephosphatase alkphos", 20, 3625, 80, "U/L", MEASURED, True),
    PublicRange("tsh", 0, 500, 2, "mIU/L", WIDE, True),
    PublicRange("tt4 totalt4", 0, 400, 105, "nmol/L", WIDE),
    PublicRange("tt3 totalt3", 0, 15, 1.9, "nmol/L", WIDE),
    PublicRange("t4u thyroxineuptake", 0, 3, 1, "ratio", WIDE),
    PublicRange("fti freethyroxineindex freet4index", 0, 400, 108, "index", WIDE),
    PublicRange("gcs glasgowcomascale gcstotal", 3, 15, 15, "points", SCALE),
    PublicRange("ejectionfraction lvef ef", 0, 100, 60, "%", SCALE),
    PublicRange("cigsperday cigarettesperday", 0, 100, 0, "cigarettes", WIDE),
    PublicRange("packyears", 0, 200, 0, "pack-years", WIDE),
    PublicRange("pregnancies parity numpregnancies", 0, 20, 1, "times", WIDE),
    PublicRange("lengthofstay los losdays timeinhospital", 0, 365, 4, "days", WIDE, True),
    PublicRange("hoursperweek hoursworked weeklyhours", 0, 99, 40, "hours", CENSUS),
    PublicRange("educationnum educnum", 1, 16, 9, "the survey's levels", CENSUS),
    PublicRange("educationyears yearsofeducation eduyears", 0, 25, 12, "years", WIDE),
    PublicRange("capitalgain", 0, 99_999, 0, "dollars", CENSUS, True),
    PublicRange("capitalloss", 0, 5000, 0, "dollars", CENSUS, True),
    PublicRange("income annualincome householdincome salary wage",
                0, 1_000_000, 40000, "per year", WIDE, True),
    PublicRange("householdsize familysize hhsize", 0, 20, 3, "persons", WIDE),
    PublicRange("numchildren children nchildren", 0, 20, 1, "children", WIDE),
)  # fmt: skip
_BY_NAME = {name: each for each in PUBLIC_RANGES for name in each.names.split()}


def public_range(column: str) -> PublicRange | None:
    """Return the public range of a column, by its whole name, or None."""
    return _BY_NAME.get(re.sub(r"[^a-z0-9]", "", column.lower()))
