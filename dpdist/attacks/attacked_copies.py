"""Attacked copies of inputs: the certified accuracy as DPAL, StoBatch and HGM measure it.

They count an input when its *attacked copy* is answered rightly and certified at the attack's
size. That is no certificate of the clean input: a copy that another attack would find may have
another label, and where the attack failed for want of steps the clean input counts all the same.
It stands here for comparison with the papers' figures.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import Ball, RandomizedClassifier, attack, input_range
from dpdist.attacks.settings import AttackSettings
from dpdist.certification.certificate import Certificate
from dpdist.certification.subject import DatasetLike
from dpdist.certification.table import CertificateTable, CertifiedSizes, attack_noise
from dpdist.certification.worker import KeyedGenerator
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import AttackName, Norm, Positive, Section
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import find_noise_location

DISCLAIMER = "as the paper measures it; not a certificate of the clean input"
_BLOCK = 100  # of inputs attacked together, in the order in which they are chosen


class AttackedCopiesSpec(Section):
    """State one attack of a size, in input units, in a norm: which copies are certified."""

    attack: AttackName
    size: Positive
    norm: Norm = "linf"

    def settings(self, sigma: float | None) -> AttackSettings:
        attacks, sizes = (self.attack,), (self.size,)
        return AttackSettings(norm=self.norm, sizes=sizes, attacks=attacks, sigma=sigma)

    @property
    def folder_name(self) -> str:
        return f"certified-{self.attack}-{self.norm}-{self.size:g}"


class AttackedCopies:
    """A data set of attacked copies of its chosen inputs.

    Each is moved away from its label within the attack's size, through the noise that the
    certificate draws; everything else is the data set's.
    """

    def __init__(
        self,
        spec: AttackedCopiesSpec,
        dataset: DatasetLike,
        model: nn.Module,
        settings: Certificate,
    ) -> None:
        like = attack_noise(settings.noise, settings.sigma or 0.0)
        if like is None:
            raise UserError(
                f"certify.noise: must be gaussian for attacked copies, got {settings.noise}"
            )
        self.spec, self.classes, self.labels = spec, dataset.classes, np.asarray(dataset.labels)
        chosen = np.asarray(settings.indices(len(self.labels)), dtype=np.int64)
        place, asked = find_noise_location(model), spec.settings(like[1])
        if asked.sigma is not None:
            place = place.with_input_noise(asked.sigma)
        classifier = RandomizedClassifier(model.eval().requires_grad_(False), place)
        # Noise for gradients only: it needs no secret, and a continued run makes the same copies.
        source = StreamKeys("attacked", "", "", dataset.fingerprint, str(place.describe()), 0.0)
        self._copies = {
            int(index): copy
            for start in range(0, len(chosen), _BLOCK)
            for index, copy in zip(
                chosen[start : start + _BLOCK],
                self._attack_batch(
                    dataset, chosen[start : start + _BLOCK], classifier, source, asked
                ),
                strict=True,
            )
        }
        named = f"At(attack={spec.attack!r}, size={spec.size!r}, norm={spec.norm!r})"
        digest = hashlib.blake2b(f"{dataset.fingerprint} {named}".encode(), digest_size=16)
        for copy in self._copies.values():
            digest.update(copy.numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def _attack_batch(
        self, dataset: DatasetLike, indices: np.ndarray, classifier: RandomizedClassifier,
        source: StreamKeys, attack_settings: AttackSettings,
    ) -> Tensor:  # fmt: skip
        centers = dataset.batch(indices)
        sizes = torch.full((len(indices),), self.spec.size, dtype=torch.float64)
        return attack(
            self.spec.attack, classifier, Ball(centers, sizes, attack_settings.norm,
                input_range(centers)),
            torch.from_numpy(self.labels[indices]), indices.tolist(), KeyedGenerator(source),
            steps=attack_settings.steps, samples=attack_settings.samples,
            step_scale=attack_settings.step_scale,
        )  # fmt: skip

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """float32 (B, ...): the copies of chosen inputs."""
        named = np.arange(len(self.labels))[indices]
        return torch.stack([self._copies[int(index)] for index in named])

    def summary_rows(
        self, attacked: CertificateTable, clean: CertificateTable | None
    ) -> list[tuple[str, str]]:
        """Name and value: right and certified at the copies, and at the clean inputs where they
        were certified too."""
        numbers = math.prod(next(iter(self._copies.values())).shape)
        tables = [("attacked", attacked)] + ([] if clean is None else [("clean", clean)])
        rows = []
        for of, table in tables:
            for sizes in self._valid_sizes(table, numbers):
                share = float(np.mean(sizes.size_if_correct(table.label) >= self.spec.size))
                name = f"{of}, {sizes.title}, {self.spec.norm} >= {format_exact(self.spec.size)}"
                rows.append((name, f"{format_percent(share)} %"))
        return rows

    def _valid_sizes(self, table: CertificateTable, numbers: int) -> list[CertifiedSizes]:
        found = table.sizes_in_norm(self.spec.norm, numbers)
        return [sizes for sizes in found if sizes.is_valid]
