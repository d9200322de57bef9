"""The certification of a release: by what it names, without its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.base.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.release.reading import Release


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
    from dpdist.certification.catalogue import settings_of
    from dpdist.certification.job import TABLE, certify
    from dpdist.cluster.packages import check_nodes
    from dpdist.randomness.places import smoothing_of
    from dpdist.training.job import PACKAGES
    from dpdist.training.records import source_at

    dataset = data.load(source_at(release.about.data, data_root), "test")
    usual = release.about.certificate
    sigma = given["sigma"] or (None if usual is None else usual.sigma)
    sigma = smoothing_of(release.model, sigma, release.path)
    chosen = settings_of(given | {"sigma": sigma}, usual)
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
