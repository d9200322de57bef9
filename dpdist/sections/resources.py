"""The recipe's section `resources`: where and how it runs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dpdist.base.fields import (
    Count,
    CountOrZero,
    Cpus,
    Gpus,
    Positive,
    Processes,
    Section,
    of_key,
)


class WorkerRange(Section):
    """As many training workers as the cluster has room for, more or fewer as hosts come and go."""

    min: Processes
    max: Processes

    @model_validator(mode="after")
    def _in_order(self) -> WorkerRange:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} and {self.max}")
        return self


def _how_many(value: Any) -> str:
    return "range" if isinstance(value, dict | WorkerRange) else "number"


AnyWorkers = Annotated[
    Annotated[Processes, Tag("number")] | Annotated[WorkerRange, Tag("range")],
    Discriminator(_how_many),
]


class ResourcesRecipe(Section):
    """Where and how it runs; may change between a run and its continuation."""

    workers: AnyWorkers = Field(
        default=1, description="or {min: 1, max: 8}: as many as there is room for at any time"
    )
    cpus_per_worker: Cpus = 1
    gpus_per_worker: Gpus = 0
    release: Literal["whole", "sharded"] = Field(
        default="whole",
        description="sharded: every worker noises and updates its part, with less memory",
    )
    wire: Literal["float64", "float32"] = Field(default="float64", description="clipped sums")
    noise: Literal["host", "device"] = Field(default="host", description="where a step's is drawn")
    micro_batch: Count | None = Field(
        default=None, description="physical batch; default: chosen to fit"
    )
    checkpoint_seconds: Positive = 30
    max_failures: CountOrZero = 3
    certify_actors: Processes | None = Field(
        default=None, description="default: one for each CPU, or for each GPU's share"
    )
    certify_gpus: Gpus | None = Field(
        default=None,
        description="GPUs of each certifying actor, also a share; default: 1 where there are GPUs",
    )
    archive: str | None = Field(
        default=None, description="copy the run to s3://BUCKET/PREFIX (gs://, file://) as it goes"
    )
    archive_private: bool = Field(
        default=False,
        description="the private state too, so that a lost run folder can be brought back",
    )

    @model_validator(mode="after")
    def _whole_shares(self) -> ResourcesRecipe:
        each = (self.cpus_per_worker, self.gpus_per_worker)
        if self.elastic and any(amount != int(amount) for amount in each):
            raise of_key(
                "workers",
                "a range needs whole cpus_per_worker and gpus_per_worker: Ray divides a host's by "
                "a worker's without rest, and miscounts shares",
            )
        return self

    @model_validator(mode="after")
    def _closed_archive(self) -> ResourcesRecipe:
        # Not a rule of the field: its complaint would repeat a password.
        address = self.archive
        if address is not None and not re.fullmatch(r"(s3|gs|file)://[^@\s]+", address):
            raise ValueError(
                "archive must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER, "
                "without credentials: those come from the environment"
            )
        if self.archive_private and address is None:
            raise ValueError("archive_private needs archive, the place to copy to")
        return self

    @property
    def elastic(self) -> bool:
        """Whether the number of training workers may change while they train."""
        return isinstance(self.workers, WorkerRange)

    @property
    def least(self) -> int:
        """The number of training workers without which nothing is trained."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def most(self) -> int:
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def span(self) -> str:
        """How many training workers, in words."""
        return f"{self.least:,} to {self.most:,}" if self.elastic else f"{self.most:,}"

    @property
    def cpus(self) -> float:
        """CPUs without which nothing is trained."""
        return self.least * self.cpus_per_worker
