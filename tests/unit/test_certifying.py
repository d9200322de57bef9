"""Any classifier, certified by object: the same table as by command, from whatever it comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from support import foreign
from torch import nn

import dpdist
from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.importing import ForeignModel, TestData, import_model
from dpdist.runs.folder import RunFolder

SETTINGS = dpdist.Cohen(sigma=0.2, n=600, n0=50, seed="a", max_inputs=6)
SPEC = models.ModelSpec("linear", (4,), 3)


def network() -> nn.Module:
    module = models.initialize(SPEC, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    return module


def points() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((9, 4), dtype=np.float32)
    return x, network()(torch.from_numpy(x)).argmax(1).numpy()


def test_radii_are_those_of_cohens_own_formula() -> None:
    table = dpdist.certify(network(), points(), SETTINGS, executor="local")
    for row in table.to_pandas().to_dict("records"):
        p = float(beta.ppf(0.001, row["k"], 600 - row["k"] + 1))
        radius = 0.2 * norm.ppf(p) if p > 0.5 else 0.0
        assert row["radius"] == pytest.approx(max(radius, 0.0), abs=1e-12)
    assert table.certified_accuracy(0.0) == np.mean(table.prediction == table.label)
    bounds = table.population_bounds([0.0, 0.1])
    assert [each.radius for each in bounds] == [0.0, 0.1]
    assert bounds == dpdist.population_bounds(table, [0.0, 0.1])
    assert table.to_arrow().num_rows == 6 and isinstance(table, dpdist.CertificateTable)


def test_data_of_every_kind_are_the_same_inputs(tmp_path: Path) -> None:
    module, (x, y) = network(), points()
    given = [
        (x, y),
        (torch.from_numpy(x), torch.from_numpy(y)),
        torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        [(torch.from_numpy(each), int(label)) for each, label in zip(x, y, strict=True)],
    ]
    tables = [dpdist.certify(module, each, SETTINGS, executor="local").to_arrow() for each in given]
    assert all(table.equals(tables[0], check_metadata=False) for table in tables[1:3])
    assert [table["label"].to_pylist() for table in tables] == 4 * [y[:6].tolist()]


def test_batchnorm_and_dropout_are_in_evaluation_mode_and_the_module_stays_as_it_was() -> None:
    module = foreign.Net().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    settings = dpdist.Cohen(sigma=0.1, n=200, seed="a", max_inputs=2)
    found = dpdist.certify(module, "digits", settings, executor="local")
    assert module.training
    other = dpdist.certify(module.eval(), "digits", settings, executor="local")
    assert found.to_arrow().equals(other.to_arrow())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
def test_runs_releases_paths_and_names(tmp_path: Path, here: None) -> None:
    torch.save(foreign.trained().state_dict(), tmp_path / "net.pt")
    folder = RunFolder(tmp_path / "mine")
    import_model(
        ForeignModel("support.foreign:net", tmp_path / "net.pt", mean=(0.3,), std=(0.4,)),
        TestData("digits"), folder, certify={"sigma": 0.2, "n": 200, "n0": 20},
    )  # fmt: skip
    dpdist.write_release(folder, not_private=True)
    release = dpdist.load(folder.release_folder, trusted_factory="support.foreign:net")
    few = dpdist.Cohen(sigma=0.2, n=200, n0=20, seed="a", max_inputs=3)
    model = folder.model_folder
    tables = [
        dpdist.certify(folder, None, few),
        dpdist.certify(folder.path, "digits", few),
        dpdist.certify(release, None, few),
        dpdist.certify(folder.release_folder, None, few, trusted_factory="support.foreign:net"),
        dpdist.certify(model, "digits", few, trusted_factory="support.foreign:net"),
    ]
    assert all(table.to_arrow().equals(tables[0].to_arrow()) for table in tables[1:])
    own = dpdist.certify(
        folder, data.load(data.DataSource("digits", 10), "test").first(4), executor="local"
    )
    assert (own.sigma, own.n, len(own.index)) == (0.2, 200, 4)
    assert len(dpdist.certify("support.foreign:constant", "digits", few).index) == 3


def test_a_model_that_looks_at_its_batch_is_refused() -> None:
    with pytest.raises(UserError, match="its batch"):
        dpdist.certify(lambda x: x[:, :3] - x[:, :3].mean(0), points(), SETTINGS, executor="local")


# ---- TorchScript, which has no gradients to switch off and no pickle


@pytest.mark.parametrize(
    "script",
    [lambda it: torch.jit.trace(it, torch.zeros(1, 4)), torch.jit.script],
    ids=["trace", "script"],
)
def test_torchscript_is_certified_as_the_module_it_was_made_from(script) -> None:
    few = SETTINGS.model_copy(update={"sigma": 1e-4, "n": 100})
    given, module = points(), script(network().eval())
    table = dpdist.certify(module, given, few, executor="local")
    assert table.prediction.tolist() == given[1][:6].tolist()
    assert table.radius.min() > 0 and table.to_arrow()["k"].to_pylist() == [100] * 6


def test_a_script_that_draws_is_refused() -> None:
    """A trace of dropout in training mode keeps the draws: its eval() changes nothing."""
    module = nn.Sequential(network(), nn.Dropout(0.5)).train()
    trace = torch.jit.trace(module, torch.rand(1, 4), check_trace=False)
    with pytest.raises(UserError):
        dpdist.certify(trace, points(), SETTINGS, executor="local")
    script = torch.jit.script(module)  # has a mode, which stays the caller's
    dpdist.certify(script, points(), SETTINGS.model_copy(update={"n": 100}), executor="local")
    assert script.training


# ---- units: what is certified is what was trained


class Normalized(nn.Module):
    """A network of normalized inputs behind the normalization that a data loader does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in CONSTANTS)
        return self.inner((x - mean) / std)


CONSTANTS = ((0.5, 0.3), (0.25, 0.2))
FEW = dpdist.Cohen(sigma=0.1, n=200, n0=20, seed="a", radii=(0.05, 0.1))


def images() -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """A network of normalized images of 2 channels, images in 0 to 1, and what it says of them."""
    module = models.initialize(models.ModelSpec("linear", (2, 3, 3), 3), 5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    x = np.random.default_rng(1).random((40, 2, 3, 3), dtype=np.float32)
    return module, x, Normalized(module)(torch.from_numpy(x)).argmax(1).numpy()


def columns(table: dpdist.CertificateTable) -> list[list[object]]:
    return [table.to_arrow()[name].to_pylist() for name in ("selected", "radius", "prediction")]


def test_normalization_becomes_part_of_the_model_by_object_as_by_command(tmp_path: Path) -> None:
    module, x, y = images()
    found = dpdist.certify(module, (x, y), FEW, normalize=CONSTANTS, executor="local")
    assert found.clean_accuracy == 1.0 and found.input_range == (x.min(), x.max())
    torch.save(module.state_dict(), tmp_path / "net.pt")
    name = "test_certifying:fresh_images_network"
    by_name = dpdist.certify(
        name, (x, y), FEW, normalize=CONSTANTS, weights=tmp_path / "net.pt", executor="local"
    )
    assert by_name.clean_accuracy == 1.0
    other = models.initialize(models.ModelSpec("linear", (2, 3, 3), 3), 9)
    before = [each.clone() for each in other.parameters()]
    loaded = dpdist.certify(
        other, (x, y), FEW, normalize=CONSTANTS, weights=tmp_path / "net.pt", executor="local"
    )
    assert columns(loaded) == columns(found)  # the same weights, so the same digest and draws
    assert all(map(torch.equal, other.parameters(), before))


def fresh_images_network(num_classes: int = 3) -> nn.Module:
    return models.initialize(models.ModelSpec("linear", (2, 3, 3), num_classes), 7)


# ---- a finished table is of the classifier that was asked about


class Scaled(nn.Module):
    """Answers turned round by a plain attribute, or by another `forward`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = network(), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def test_another_attribute_or_forward_is_another_classifier(tmp_path: Path) -> None:
    """The same weights and the same words of the module: what it does was not in its digest."""
    given, folder = points(), tmp_path / "certs"
    before = dpdist.certify(Scaled(1.0), given, SETTINGS, folder=folder, executor="local")
    again = dpdist.certify(Scaled(1.0), given, SETTINGS, folder=folder, executor="local")
    assert again.to_arrow() == before.to_arrow() and before.certified_accuracy(0.0) > 0.5
    turned = Scaled(1.0)
    turned.forward = lambda x: -turned.inner(x)  # type: ignore[method-assign]
    for other in (Scaled(-1.0), turned):
        with pytest.raises(UserError, match="model was"):
            dpdist.certify(other, given, SETTINGS, folder=folder, executor="local")
        found = dpdist.certify(other, given, SETTINGS, executor="local")
        assert found.certified_accuracy(0.0) < 0.5
