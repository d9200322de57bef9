"""The registry of methods. A new one is a file in this folder, and its class's line in the table.

A user's own method needs no line: a recipe names it as package.module:Class.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, SerializeAsAny, Tag

from dpdist.core.fields import validate_section
from dpdist.core.files import error_text, quoted
from dpdist.methods.base import Method
from dpdist.methods.dp_sgd import DPSGD, DPlis, InputNoiseMethod
from dpdist.methods.dpal import DPAL
from dpdist.methods.functional import Functional
from dpdist.methods.hidden_noise import HGMPixelDP, PixelDP, SecureSGD
from dpdist.methods.imported import Imported
from dpdist.methods.noisy_records import NoisyRecordsMethod
from dpdist.methods.pate import PATE
from dpdist.methods.private_prediction import PrivatePrediction
from dpdist.methods.residual import ResidualPerturbation
from dpdist.methods.stobatch import StoBatch
from dpdist.methods.transdenoiser import TransDenoiser

METHODS: tuple[type[Method], ...] = (
    DPSGD,
    DPlis,
    Functional,
    InputNoiseMethod,
    PixelDP,
    HGMPixelDP,
    SecureSGD,
    TransDenoiser,
    ResidualPerturbation,
    PrivatePrediction,
    NoisyRecordsMethod,
    PATE,
    StoBatch,
    DPAL,
    Imported,
)

_USER_METHOD = "package.module:Class"


def _load_user_method(value: Any) -> Any:
    """A method of one's own, whose class is imported as a recipe's model factory is."""
    if isinstance(value, Method):
        return value
    module, _, name = value["name"].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module does when it is imported
        raise ValueError(f"cannot import {quoted(value['name'])}: {error_text(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(
            f"{quoted(value['name'])} must be a class made from dpdist.methods.base.Method"
        )
    return validate_section(found, value)


def _entry(value: Any) -> str | None:
    """Under which entry of the table a method is found."""
    given = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if given is None or not isinstance(given, str):
        return None
    return _USER_METHOD if ":" in given else given


DEFAULT = DPSGD()

if TYPE_CHECKING:
    AnyMethod = Method
else:
    AnyMethod = Annotated[
        Union[  # its members are counted at run time
            *(Annotated[m, Tag(m.model_fields["name"].default)] for m in METHODS),
            Annotated[
                SerializeAsAny[Method], BeforeValidator(_load_user_method), Tag(_USER_METHOD)
            ],
        ],
        Discriminator(_entry),
    ]
