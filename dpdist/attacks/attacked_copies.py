"""Attacked copies of inputs: the certified accuracy as DPAL, StoBatch and HGM measure it.

They count an input if its *attacked copy* is classified correctly and certified at the attack's
size. That does not certify the clean input: a copy that a different attack would find may get a
different label, and if the attack failed for lack of steps, the clean input counts all the same.
This measure is only for comparison with the papers' results.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import Ball, RandomizedClassifier, attack, input_range
from dpdist.certification.certificate import Certificate
from dpdist.certification.subject import DatasetLike
from dpdist.certification.table import CertificateTable, attack_noise
from dpdist.certification.worker import KeyedGenerator
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import AttackName, Norm, Positive, Section
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import find_noise_location

DISCLAIMER = "as the paper measures it; not a certificate of the clean input"
_BLOCK = 100  # inputs attacked together, in the order in which they are chosen


class AttackedCopiesSpec(Section):
    """The attack that makes the copies: its name, and its size in input units of a norm."""

    attack: AttackName
    size: Positive
    norm: Norm = "linf"

    @property
    def folder_name(self) -> str:
        return f"certified-{self.attack}-{self.norm}-{self.size:g}"


class AttackedCopies:
    """A data set of attacked copies of its chosen inputs.

    Each input is moved away from its label within the attack's size, by gradients through the
    certificate's noise; everything else is the data set's.
    """

    def __init__(
        self,
        spec: AttackedCopiesSpec,
        dataset: DatasetLike,
        model: nn.Module,
        settings: Certificate,
    ) -> None:
        noise = attack_noise(settings.noise, settings.sigma or 0.0)
        if noise is None:
            raise UserError(
                f"certify.noise: must be gaussian for attacked copies, got {settings.noise}"
            )
        self.spec, self.classes, self.labels = spec, dataset.classes, np.asarray(dataset.labels)
        location = find_noise_location(model)
        if noise[1] is not None:
            location = location.with_input_noise(noise[1])
        classifier = RandomizedClassifier(model.eval().requires_grad_(False), location)
        # Noise for gradients only: it needs no secret, and a continued run makes the same copies.
        source = StreamKeys("attacked", "", "", dataset.fingerprint, str(location.describe()), 0.0)
        chosen = np.asarray(settings.indices(len(self.labels)), dtype=np.int64)
        self._copies: dict[int, Tensor] = {}
        for start in range(0, len(chosen), _BLOCK):
            indices = chosen[start : start + _BLOCK]
            centers = dataset.batch(indices)
            sizes = torch.full((len(indices),), spec.size, dtype=torch.float64)
            ball = Ball(centers, sizes, spec.norm, input_range(centers))
            targets, names = torch.from_numpy(self.labels[indices]), indices.tolist()
            copies = attack(spec.attack, classifier, ball, targets, names, KeyedGenerator(source))
            self._copies |= zip(names, copies, strict=True)
        named = f"At(attack={spec.attack!r}, size={spec.size!r}, norm={spec.norm!r})"
        digest = hashlib.blake2b(f"{dataset.fingerprint} {named}".encode(), digest_size=16)
        for copy in self._copies.values():
            digest.update(copy.numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Return the copies of chosen inputs: float32 (B, ...)."""
        named = np.arange(len(self.labels))[indices]
        return torch.stack([self._copies[int(index)] for index in named])

    def summary_rows(
        self, attacked: CertificateTable, clean: CertificateTable | None
    ) -> list[tuple[str, str]]:
        """Return name and value of the accuracy certified at the attack's size.

        The rows are of the copies, then of the clean inputs if they were certified too.
        """
        numbers = math.prod(next(iter(self._copies.values())).shape)
        size, rows = format_exact(self.spec.size), []
        for of, table in (("attacked", attacked), ("clean", clean)):
            if table is None:
                continue
            for sizes in table.sizes_in_norm(self.spec.norm, numbers):
                if sizes.is_valid:
                    share = float(np.mean(sizes.size_if_correct(table.label) >= self.spec.size))
                    name = f"{of}, {sizes.title}, {self.spec.norm} >= {size}"
                    rows.append((name, f"{format_percent(share, round_down=True)} %"))
        return rows
