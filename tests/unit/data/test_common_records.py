"""One comparison finds a record that two data sets share, whatever form each keeps it in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import dpdist
from dpdist import Privacy, PrivateTraining, UserError
from dpdist.data.protocol import UserRecords, Users, count_common

COUNT, SIDE = 24, 4
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
OTHERS = np.random.default_rng(1).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
LABELS = np.arange(COUNT) % 2


def to_tensor(picture: Any) -> torch.Tensor:
    array = torch.from_numpy(np.array(picture))
    return array.permute(2, 0, 1).float().div(255)


def augmented(picture: Any) -> torch.Tensor:
    """Shift and brighten at random, as a training transform does."""
    moved = torch.roll(to_tensor(picture), int(torch.randint(1, SIDE, ())), 2)
    return moved + torch.rand(())


class Pictures(Dataset):
    """Keep pictures as torchvision's data sets do."""

    def __init__(self, pixels: np.ndarray = PIXELS, transform: Any = augmented) -> None:
        self.data, self.targets, self.transform = pixels, LABELS, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = Image.fromarray(self.data[index])
        return self.transform(picture) if self.transform else picture, int(self.targets[index])


class OwnTransform(Pictures):
    """Transform in a place of its own, which no name tells."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return augmented(self.data[index]), int(self.targets[index])


class FileSamples(Dataset):
    """Keep pictures in files, as torchvision's ImageFolder does, transformed in its own way."""

    def __init__(self, folder: Any) -> None:
        self.samples = [(str(folder / f"{number}.png"), 0) for number in range(COUNT)]
        for (path, _), pixels in zip(self.samples, PIXELS, strict=True):
            Image.fromarray(pixels).save(path)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return augmented(Image.open(self.samples[index][0])), 0


FLOATS = torch.stack([to_tensor(each) for each in PIXELS])
PRIVATE = {
    "a transform": lambda folder: Pictures(),
    "a part of several": lambda folder: Subset(
        ConcatDataset([Pictures(OTHERS), Pictures()]), range(2 * COUNT)
    ),
    "a loader": lambda folder: DataLoader(Pictures(), batch_size=4, shuffle=True),
    "a transform of its own": lambda folder: OwnTransform(),
    "files": FileSamples,
}
PUBLIC = {
    "floats": (FLOATS, LABELS),
    "bytes": (torch.from_numpy(PIXELS).permute(0, 3, 1, 2), LABELS),
    "flat": (FLOATS.flatten(1), LABELS),
    "another transform": Pictures(transform=lambda picture: to_tensor(picture) - 0.5),
    "its own random transform": Pictures(),
}


@pytest.mark.parametrize("public", PUBLIC)
@pytest.mark.parametrize("private", PRIVATE)
def test_no_form_hides_a_shared_record(private, public, tmp_path):
    given = dpdist.as_records(PUBLIC[public])
    records = dpdist.as_records(PRIVATE[private](tmp_path))
    assert count_common(given, records) == count_common(records, given) == COUNT
    assert count_common(dpdist.as_records(Pictures(OTHERS[:3])), given) == 0


def test_columns_and_order_tell_records_apart():
    ages, others = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0, 1.0, 5.0])
    named = dpdist.as_records(({"age": ages, "sex": others}, torch.zeros(3)))
    swapped = dpdist.as_records(({"age": ages[:1], "sex": others[:1]}, torch.zeros(1)))
    assert count_common(swapped, named) == count_common(named, swapped) == 1  # not (0, 1)
    far = dpdist.as_records((torch.tensor([[1e9], [1e9 + 1]], dtype=torch.double), torch.zeros(2)))
    near = dpdist.as_records((torch.tensor([[1e9 + 1]], dtype=torch.double), torch.zeros(1)))
    assert count_common(far, near) == 1


def test_the_records_of_users_are_compared_one_by_one():
    """Whichever side they are on, and whatever a step draws of a user."""
    given = dpdist.as_records(PUBLIC["bytes"])
    users = UserRecords(dpdist.as_records((FLOATS, LABELS)), Users.from_values(LABELS, 2))
    assert count_common(given, users) == count_common(users, given) == COUNT


def test_bytes_beside_a_column_of_numbers_are_fractions_too():
    ages, pixels = torch.arange(float(COUNT)), torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    kept = dpdist.as_records(({"age": ages, "scan": pixels}, LABELS))
    scaled = dpdist.as_records(({"age": ages[:5], "scan": FLOATS[:5]}, LABELS[:5]))
    assert count_common(kept, scaled) == count_common(scaled, kept) == 5


@pytest.mark.parametrize("private", ["a part of several", "a loader"])
def test_evaluation_data_among_augmented_private_records_are_refused(private, tmp_path):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"eval_data: .* 3"):
        PrivateTraining(
            model, optimizer, PRIVATE[private](tmp_path), loss="cross-entropy",
            privacy=Privacy(noise_multiplier=1.0, delta=1e-3), batch_size=6, steps=2,
            eval_data=(FLOATS[:3], torch.from_numpy(LABELS[:3])), folder=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
