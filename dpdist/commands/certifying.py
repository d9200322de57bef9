"""The certification of a release: by what it names, without its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.base.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import nn

    from dpdist.certification.certificate import Certificate
    from dpdist.release.reading import Release


def chosen_settings(
    given: dict[str, Any], usual: Certificate | None, model: nn.Module, where: Path
) -> Certificate:
    """Return the certificate that options ask for, the usual one where nothing else is asked for.

    Args:
        given: options by name, None where one is not given.
        usual: of the recipe or release.
        model: what is certified: noise of its own and smoothing exclude each other.
        where: it lies, for complaints.

    Raises:
        UserError: an option belongs to another certificate, or to another model.
    """
    from dpdist.certification.catalogue import settings_of
    from dpdist.randomness.places import smoothing_of

    sigma = smoothing_of(model, sigma_of(given, usual), where)
    return settings_of(given | {"sigma": sigma}, usual)


def sigma_of(given: dict[str, Any], usual: Certificate | None) -> float | None:
    """Return the noise on the input that is asked for, if any."""
    return given["sigma"] or (None if usual is None else usual.sigma)


def certify_release(
    release: Release,
    given: dict[str, Any],
    data_root: Path | None,
    output: Path | None,
    actors: int | None,
) -> tuple[pa.Table, Path]:
    """Certify the test split that a release names, with its settings where nothing else is asked
    for."""
    from dpdist import data, pipeline
    from dpdist.base import console
    from dpdist.certification.job import TABLE, certify
    from dpdist.cluster.packages import check_nodes
    from dpdist.training.job import PACKAGES
    from dpdist.training.records import source_at

    dataset = data.load(source_at(release.about.data, data_root), "test")
    chosen = chosen_settings(given, release.about.certificate, release.model, release.path)
    output = output or Path("certificates", release.name, chosen.folder_name)
    if release.path.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"--output: {output} lies in the release, which stays as it was published")
    output.parent.mkdir(parents=True, exist_ok=True)
    with pipeline.session(output.parent / "ray.log"):
        check_nodes(PACKAGES, output.parent.resolve())
        with console.progress(f"certifying, {chosen.folder_name}", "inputs", "draws") as show:
            table = certify(
                release.path,
                dataset,
                chosen,
                output,
                actors=actors,
                progress=show,
                trusted_factory=release.trusted_factory,
            )
    return table, output / TABLE
