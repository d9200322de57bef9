"""Networks as everybody writes them: which train, by which call, and that their sums are right.

Each trains two steps; the first sum equals one-by-one autograd with the same draws. What needs a
call has it in the table; what does not train is listed with the cure that its error names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.one_by_one import one_by_one
from torch import Tensor, nn
from torch.nn import functional

import dpdist
from dpdist import FlatClipping, GradientEngine, UserError
from dpdist.core.optional_imports import import_torchvision
from dpdist.gradients.engine import cross_entropy
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss, objective_of
from dpdist.gradients.sampling import Blocks
from dpdist.randomness.keys import derive_key

KEY, COUNT, CLASSES, WORDS = derive_key(bytes(32), "ordinary"), 6, 3, 50


@dataclass(frozen=True)
class Case:
    """make: builds the network. kind: of its records. loss: default: cross-entropy of classes."""

    make: Callable[[], nn.Module]
    kind: str = "rows"
    loss: Any = cross_entropy
    settings: dict[str, Any] = field(default_factory=dict)


class _Of(nn.Module):
    """A network by a function of its parts and an input."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _sequence(
    layer: Callable[[], nn.Module], run: Callable[..., Tensor]
) -> Callable[[], nn.Module]:
    return lambda: _Of(run, layer=layer(), head=nn.Linear(6, CLASSES))


def _convolutions(*more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *more, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, **options), 2,
        enable_nested_tensor=False,
    )  # fmt: skip


def _vae_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    mean, spread = module[0](inputs).chunk(2, 1)
    drawn = mean + spread.exp() * torch.randn_like(mean)
    divergence = (mean.square() + (2 * spread).exp() - 2 * spread).sum(1) / 2
    return (module[1](drawn) - inputs).square().sum(1) + divergence


def _diffusion_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    times, noise = torch.rand(len(inputs), 1), torch.randn_like(inputs)
    noisy = (1 - times) * inputs + times * noise
    return (module(torch.cat([noisy, times], 1)) - noise).square().mean(1)


def _flat(module: nn.Module, x: Tensor) -> Tensor:
    """Rows of all records in one dimension, which no hook can cut."""
    return module.head(module.layer(x).reshape(-1, 2)).view(len(x), -1, CLASSES).mean(1)


def _relative(module: nn.Module, x: Tensor) -> Tensor:
    place = torch.arange(5)
    bias = module.table(place[:, None] - place[None] + 4)  # no dimension of the batch
    return (module.head(x) + bias.mean((0, 1))).mean(1)


def _by_cell(module: nn.Module, x: Tensor) -> Tensor:
    """The last state of a cell that begins with one of its own."""
    state = None
    for step in x.unbind(1):
        state = module.layer(step, state)
    return module.head(state[0] if isinstance(state, tuple) else state)


NATIVE = {
    "linear": Case(lambda: nn.Linear(6, CLASSES)),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))),
    "mlp-dropout": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES))
    ),
    "mlp-batchnorm": Case(
        lambda: dpdist.prepare(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        )
    ),
    "alpha-dropout": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(0.1), nn.Linear(8, CLASSES))
    ),
    "functional-dropout": Case(
        lambda: _Of(lambda m, x: m.head(functional.dropout(m.layer(x), 0.2)),
                    layer=nn.Linear(6, 6), head=nn.Linear(6, CLASSES))
    ),
    "gaussian-noise": Case(
        lambda: _Of(lambda m, x: m.head(x + 0.1 * torch.randn_like(x)), head=nn.Linear(6, CLASSES))
    ),
    "weight-norm": Case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))),
    "spectral-norm": Case(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, CLASSES))),
    "weight-norm-by-hook": Case(
        lambda: dpdist.prepare(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, CLASSES))))
    ),
    "spectral-norm-by-hook": Case(
        lambda: dpdist.prepare(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, CLASSES))))
    ),
    "rrelu": Case(
        lambda: dpdist.prepare(
            nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, CLASSES))
        )
    ),
    "squeeze": Case(
        lambda: _Of(lambda m, x: m.head(m.layer(x[:, None]).squeeze()),
                    layer=nn.Conv1d(1, 1, 1), head=nn.Linear(6, CLASSES))
    ),
    "cnn": Case(_convolutions, "images"),
    "cnn-dropout2d": Case(lambda: _convolutions(nn.Dropout2d(0.2)), "images"),
    "cnn-batchnorm": Case(lambda: dpdist.prepare(_convolutions(nn.BatchNorm2d(8))), "images"),
    "cnn-public-statistics": Case(
        lambda: dpdist.prepare(_convolutions(nn.BatchNorm2d(8)), batch_norm="eval"), "images"
    ),
    "lstm": Case(
        _sequence(lambda: nn.LSTM(6, 6, batch_first=True),
                  lambda m, x: m.head(m.layer(x)[0][:, -1])), "series",
    ),
    "lstm-dropout": Case(
        _sequence(lambda: nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True),
                  lambda m, x: m.head(m.layer(x)[0][:, -1])), "series",
    ),
    "gru-dropout": Case(
        _sequence(lambda: nn.GRU(6, 6, 2, dropout=0.3, batch_first=True),
                  lambda m, x: m.head(m.layer(x)[0][:, -1])), "series",
    ),
    "lstm-time-first": Case(
        _sequence(lambda: nn.LSTM(6, 6), lambda m, x: m.head(m.layer(x.transpose(0, 1))[0])[-1]),
        "series",
    ),
    "gru-time-first-dropout": Case(
        _sequence(lambda: nn.GRU(6, 6, 2, dropout=0.3),
                  lambda m, x: m.head(m.layer(x.transpose(0, 1))[0])[-1]), "series",
    ),
    "rnn-cell": Case(_sequence(lambda: nn.RNNCell(6, 6), _by_cell), "series"),
    "gru-cell": Case(_sequence(lambda: nn.GRUCell(6, 6), _by_cell), "series"),
    "lstm-cell": Case(_sequence(lambda: nn.LSTMCell(6, 6), _by_cell), "series"),
    "encoder-layer": Case(
        _sequence(lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
                  lambda m, x: m.head(m.layer(x).mean(1))), "series",
    ),
    "encoder": Case(_sequence(_encoder, lambda m, x: m.head(m.layer(x).mean(1))), "series"),
    "encoder-norm-first": Case(
        _sequence(lambda: _encoder(norm_first=True, activation="gelu"),
                  lambda m, x: m.head(m.layer(x).mean(1))), "series",
    ),
    "encoder-time-first": Case(
        _sequence(lambda: nn.TransformerEncoderLayer(6, 2, 8),
                  lambda m, x: m.head(m.layer(x.transpose(0, 1)).mean(0))), "series",
    ),
    "decoder-layer": Case(
        _sequence(lambda: nn.TransformerDecoderLayer(6, 2, 8, batch_first=True),
                  lambda m, x: m.head(m.layer(x, x).mean(1))), "series",
    ),
    "view-through-the-batch": Case(
        lambda: _Of(_flat, layer=nn.Conv1d(5, 3, 1), head=nn.Linear(2, CLASSES)), "series"
    ),
    "relative-positions": Case(
        lambda: _Of(_relative, table=nn.Embedding(9, CLASSES), head=nn.Linear(6, CLASSES)), "series"
    ),
    "bag-of-words": Case(
        lambda: _Of(lambda m, x: m.head(m.layer(x).mean(1)),
                    layer=nn.Embedding(WORDS, 6), head=nn.Linear(6, CLASSES)), "tokens",
    ),
    "embedding-max-norm": Case(
        lambda: dpdist.prepare(
            _Of(lambda m, x: m.head(m.layer(x).mean(1)),
                layer=nn.Embedding(WORDS, 6, max_norm=1.0), head=nn.Linear(6, CLASSES))
        ), "tokens",
    ),
    "vae": Case(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(2, 6)), loss=OwnLoss(_vae_loss)),
    "diffusion": Case(lambda: nn.Linear(7, 6), loss=OwnLoss(_diffusion_loss)),
    "criterion-smoothed": Case(
        lambda: nn.Linear(6, CLASSES), loss=objective_of(nn.CrossEntropyLoss(label_smoothing=0.1))
    ),
    "criterion-weighted": Case(
        lambda: nn.Linear(6, CLASSES),
        loss=objective_of(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))),
    ),
    "shared-depth": Case(
        lambda: _Of(lambda m, x: m.head(x + m.layer(x) * torch.empty(()).bernoulli_(0.5)),
                    layer=nn.Linear(6, 6), head=nn.Linear(6, CLASSES)),
        settings={"rounding": "fixed-row"},
    ),
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "resnet18": {}, "mobilenet_v2": {}, "mobilenet_v3_small": {}, "efficientnet_b0": {},
    "mnasnet0_5": {},
    "shufflenet_v2_x0_5": {}, "regnet_x_400mf": {}, "densenet121": {}, "squeezenet1_1": {},
    "googlenet": {"aux_logits": False, "init_weights": False}, "convnext_tiny": {}, "swin_t": {},
    "swin_v2_t": {}, "vgg11_bn": {},
}  # fmt: skip
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {}, "convnext_atto": {}, "mobilenetv3_small_050": {}, "ghostnet_050": {},
    "mobilevit_xxs": {}, "edgenext_xx_small": {}, "efficientnet_lite0": {}, "regnetx_002": {},
    "vit_tiny_patch16_224": {"img_size": 40, "patch_size": 8, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": 40, "patch_size": 8, "depth": 2},
    "cait_xxs24_224": {"img_size": 40, "patch_size": 8, "depth": 2},
}  # fmt: skip
_TINY = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_labels": CLASSES,
}  # fmt: skip
# By family: what its configuration calls otherwise. Of the second table a causal model.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {}, "albert": {"embedding_size": 8}, "electra": {"embedding_size": 8},
    "distilbert": {"dim": 16, "hidden_dim": 16, "n_layers": 2, "n_heads": 2},
    "camembert": {}, "xlm-roberta": {}, "ernie": {}, "rembert": {},
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2}, "llama": {}, "mistral": {}, "qwen2": {},
    "qwen3": {}, "gemma": {}, "phi": {}, "gpt_neox": {}, "stablelm": {}, "olmo": {}, "cohere": {},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16}, "bloom": {"n_layer": 2, "n_head": 2},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "starcoder2": {}, "granite": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                  "shared_expert_intermediate_size": 8},
}  # fmt: skip
# A second to a minute each, of layers that quicker ones have as well.
IN_NIGHTLY = {"vgg11_bn", "swin_t", "swin_v2_t", "convnext_tiny", "densenet121", "googlenet", *TIMM}
IN_CI = {
    "gru-cell", "mlp-dropout",
    "cnn-batchnorm", "lstm-dropout", "lstm-time-first", "gru-time-first-dropout",
    "encoder", "decoder-layer", "view-through-the-batch", "relative-positions", "vae",
    "shared-depth", "criterion-weighted", "squeeze", "spectral-norm", "weight-norm-by-hook",
    "rrelu",
}  # fmt: skip
# What does not train as it is, and the cure that the error names.
CURES: dict[str, tuple[Case, str]] = {
    "rrelu": (  # draws for negative numbers only, so that records shift the draws of others
        Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, CLASSES))),
        r"dpdist\.prepare",
    ),
    "spectral-norm-by-hook": (
        Case(lambda: nn.utils.spectral_norm(nn.Linear(6, CLASSES))), r"dpdist\.prepare",
    ),
    "lstm-projection": (
        Case(_sequence(lambda: nn.LSTM(6, 6, proj_size=3, batch_first=True),
                       lambda m, x: m.layer(x)[0][:, -1]), "series"), r"torch\.nn\.Linear",
    ),
    "batchnorm": (Case(lambda: _convolutions(nn.BatchNorm2d(8)), "images"), r"dpdist\.prepare"),
    "shared-depth": (
        Case(NATIVE["shared-depth"].make), r"resources\.rounding: fixed-row"
    ),
}  # fmt: skip


def _vision(name: str, options: dict[str, Any]) -> Case:
    def make() -> nn.Module:
        models = import_torchvision("models")
        return dpdist.prepare(models.get_model(name, weights=None, num_classes=CLASSES, **options))

    return Case(make, "pictures")


def _timm(name: str, options: dict[str, Any]) -> Case:
    def make() -> nn.Module:
        import_torchvision("models")  # which timm imports as well
        timm = pytest.importorskip("timm")
        return dpdist.prepare(
            timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        )

    return Case(make, "pictures")


def _text(family: str, options: dict[str, Any], kind: str) -> Case:
    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(family, **{**_TINY, **options})
        return getattr(transformers, kind).from_config(config).train()

    return Case(make, "documents", OwnLoss(language_model_loss))


ALL = {
    **NATIVE,
    **{name: _vision(name, options) for name, options in VISION.items()},
    **{name: _timm(name, options) for name, options in TIMM.items()},
    **{f"{name}-classifier": _text(name, options, "AutoModelForSequenceClassification")
       for name, options in CLASSIFIERS.items()},
    **{f"{name}-causal": _text(name, options, "AutoModelForCausalLM")
       for name, options in CAUSAL.items()},
}  # fmt: skip


def _records(case: Case, name: str) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(COUNT) % CLASSES
    if case.kind in ("tokens", "documents"):
        tokens = torch.randint(3, WORDS, (COUNT, 7), generator=generator)
        if case.kind == "tokens":
            return tokens, targets
        labels = targets if name.endswith("classifier") else tokens
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}, (
            targets
        )
    shape = {"rows": (6,), "series": (5, 6), "images": (3, 9, 9), "pictures": (3, 40, 40)}[
        case.kind
    ]
    return torch.rand(COUNT, *shape, generator=generator), targets


def _engine(case: Case) -> GradientEngine:
    torch.manual_seed(0)
    engine = GradientEngine(
        case.make(), case.loss, clipping=FlatClipping(0.1), micro_batch=4, blocks=Blocks(1, 8)
    )
    engine.rounding = case.settings.get("rounding", "standard")
    return engine


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in IN_CI:
        return []
    return [pytest.mark.slow, *([pytest.mark.nightly] if name in IN_NIGHTLY else [])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in ALL])
def test_an_ordinary_network_trains_and_its_sum_is_that_of_one_by_one(name):
    case = ALL[name]
    if case.kind == "documents":
        pytest.importorskip("transformers")
    engine = _engine(case)
    inputs, targets = _records(case, name)
    ids = 3 * torch.arange(COUNT) + 2
    if case.kind == "documents":
        engine.validate(inputs, targets)
    before = torch.cat([p.detach().flatten().clone() for p in engine.parameters])
    for step in range(2):
        key = derive_key(KEY, "step", step)
        found = engine.clipped_sum(inputs, targets, draw_key=key, record_ids=ids).flat
        expected = one_by_one(engine, inputs, targets, ids, key)
        assert found.norm() > 0
        assert (found - expected).norm() <= 0.006 * expected.norm() + 1e-6  # the clip's slack
        noise = torch.randn(engine.size, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            for parameter, part in zip(
                engine.parameters, (found + 0.01 * noise).split(engine._sizes), strict=True
            ):
                parameter -= 0.01 * part.view_as(parameter).to(parameter)
    after = torch.cat([p.detach().flatten() for p in engine.parameters])
    assert after.isfinite().all() and not torch.equal(before, after)


@pytest.mark.parametrize("name", CURES)
def test_what_does_not_train_names_its_cure(name):
    case, cure = CURES[name]
    inputs, targets = _records(case, name)
    with pytest.raises(UserError, match=cure):
        _engine(case).clipped_sum(inputs, targets, draw_key=KEY, record_ids=torch.arange(COUNT))
