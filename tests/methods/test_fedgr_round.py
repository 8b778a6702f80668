"""Whole rounds of FedGR on a CPU: who knows what and when, ablations, limit cases, records."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benches import RecordingBench
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import EagerBench, Setup
from fedsieve.local.plan import Batch, Net, Plan, Sgd
from fedsieve.losses import cross_entropy
from fedsieve.methods import fedgr
from fedsieve.methods.contract import Federation, Sieved
from fedsieve.methods.fedgr import Client, Config, Down, Partition, Partitions, Server, Up
from fedsieve.models import ModelConfig, build_model, read_weights
from fedsieve.serial import decode, encode, values_of
from fedsieve.types import SERVER, ClientId, Outputs, Shard, Streams, Weights

CLASSES = 3
SGD = Sgd(epochs=2, batch_size=8, lr=0.1, momentum=0.5, tail="drop")


def make_model() -> nn.Module:
    rng = np.random.default_rng(0)
    return build_model(ModelConfig(name="small", head="mlp"), 1, 8, 8, CLASSES, rng)


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(None, self.classify(x.flatten(1)))


def make_bench(sgd: Sgd = SGD, model: Any = make_model) -> RecordingBench:
    setup = Setup(make_model=model, views=view_set("digits"), mean=(0.5,), std=(0.25,), sgd=sgd)
    return RecordingBench(EagerBench(setup, torch.device("cpu")))


def make_shard(client: ClientId, n: int = 24, noise: float = 0.0) -> tuple[Shard, Tensor]:
    """Images whose bright band of rows tells the class, and the true labels."""
    rng = np.random.default_rng(client)
    true = rng.integers(CLASSES, size=n)
    images = rng.integers(0, 60, size=(n, 1, 8, 8))
    for row, label in enumerate(true):
        images[row, 0, 3 * label : 3 * label + 2] += 180
    given = true.copy()
    flipped = rng.permutation(n)[: int(noise * n)]
    given[flipped] = (true[flipped] + rng.integers(1, CLASSES, size=len(flipped))) % CLASSES
    ids = torch.from_numpy(1000 * client + rng.permutation(n))
    pixels = torch.from_numpy(images.astype(np.uint8))
    return Shard(client, pixels, torch.from_numpy(given), ids, CLASSES), torch.from_numpy(true)


def start_weights(model: Any = make_model) -> Weights:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return read_weights(model())


def down_with(
    q: Tensor | None, shard: Shard, noise_ratio: float = 0.0, *, warm_up: bool = False
) -> Down:
    partition = None if q is None else Partition(shard.ids, q, noise_ratio)
    return Down(start_weights(), warm_up, partition)


def prepare(cfg: Config, client: Client, down: Down, shard: Shard) -> fedgr.Lesson:
    return fedgr.prepare(cfg, client, down, shard, make_bench(), Streams(1, 5, shard.client))


def run(
    cfg: Config, shards: list[Shard], rounds: int, bench: RecordingBench, per_round: int = 2
) -> tuple[Server, dict[ClientId, Client], list[dict[str, float]]]:
    federation = Federation(tuple(map(len, shards)), per_round, rounds, CLASSES)
    server = fedgr.init_server(cfg, start_weights(), federation)
    clients = {shard.client: fedgr.init_client(cfg, shard) for shard in shards}
    lines = []
    for t in range(rounds):
        ups = {}
        for k in fedgr.select(cfg, server, t, Streams(7, t, SERVER)):
            down = fedgr.send(cfg, server, t, k)
            clients[k], ups[k], _ = fedgr.train(
                cfg, clients[k], down, shards[k], bench, Streams(7, t, k)
            )
        server, metrics = fedgr.merge(cfg, server, t, ups)
        lines.append(dict(metrics))
    return server, clients, lines


def assert_same_weights(first: Weights, second: Weights) -> None:
    assert all(torch.equal(first[name], second[name]) for name in second)


# --------------------------------------------------------------------------------------- warm-up


def test_warm_up_is_plain_training_on_strong_views_when_lambda_r_is_0() -> None:
    shard, _ = make_shard(0, noise=0.3)
    bench = make_bench()
    cfg, rng = Config(lambda_r=0.0), Streams(3, 0, 0)
    down = down_with(torch.zeros(24), shard, 1.0, warm_up=True)  # a sieve that must be ignored
    _, up, metrics = fedgr.train(cfg, fedgr.init_client(cfg, shard), down, shard, bench, rng)
    plain = make_bench().fit(
        Plan(
            start=[down.weights],
            images=shard.images,
            views={"student": "strong"},
            columns={"label": shard.labels},
            loss=plain_loss,
            sgd=SGD,
            rng=rng,
        )
    )
    for name, tensor in plain.weights[0].items():
        torch.testing.assert_close(up.weights[name], tensor)
    assert metrics["loss"] == pytest.approx(plain.loss, rel=1e-5)
    assert metrics["relabelled_share"] == metrics["unlabelled_share"] == metrics["gamma_g"] == 0
    assert metrics["flagged_share"] == 1


def plain_loss(batch: Batch, net: Net) -> Tensor:
    return batch.mean(cross_entropy(net(batch["student"]).logits, batch["label"]))


def test_in_the_warm_up_the_average_starts_at_the_global_model_and_teaches_nothing() -> None:
    shard, _ = make_shard(0)
    cfg = Config()
    stale = {name: tensor + 1 for name, tensor in start_weights().items()}
    client = replace(fedgr.init_client(cfg, shard), ema=stale)
    down = down_with(None, shard, warm_up=True)
    bench = make_bench()
    after, _, _ = fedgr.train(cfg, client, down, shard, bench, Streams(1, 0, 0))
    (plan,) = bench.plans
    assert plan.ema is not None
    assert_same_weights(plan.ema.start, down.weights)
    assert plan.constants["lambda_b"] == 0.0
    assert after.ema is not None  # it moved, and is kept for the first refined round
    assert any(not torch.equal(after.ema[name], w) for name, w in down.weights.items())
    assert after.pseudo is None


def test_the_representation_term_is_active_in_the_warm_up() -> None:
    shard, _ = make_shard(0)
    rng, down = Streams(1, 0, 0), down_with(None, shard, warm_up=True)
    losses = []
    for lambda_r in (0.0, 5.0):
        cfg = Config(lambda_r=lambda_r)
        client = fedgr.init_client(cfg, shard)
        losses.append(fedgr.train(cfg, client, down, shard, make_bench(), rng)[2]["loss"])
    assert losses[1] > losses[0]


def test_the_observed_loss_is_the_global_models_on_raw_images_and_given_labels() -> None:
    shard, _ = make_shard(2, noise=0.5)
    cfg, down = Config(), down_with(None, shard, warm_up=True)
    client = replace(
        fedgr.init_client(cfg, shard), mean_loss=torch.full((24,), 2.0), observations=3
    )
    after, up, _ = fedgr.train(cfg, client, down, shard, make_bench(), Streams(1, 0, 2))
    model = make_model().eval()
    model.load_state_dict(dict(down.weights), strict=False)
    with torch.no_grad():
        z = model((shard.images.float() / 255 - 0.5) / 0.25).logits.double().numpy()
    log_sum = np.log(np.exp(z).sum(axis=1))
    loss = log_sum - z[np.arange(24), shard.labels.numpy()]
    np.testing.assert_allclose(up.losses, (3 * 2.0 + loss) / 4, rtol=1e-4)
    assert after.observations == 4
    assert torch.equal(up.ids, shard.ids)
    assert up.samples == 24


# ------------------------------------------------------------------------------------- refining


def confident_weights(scale: float) -> Weights:
    """The start weights with the last layer scaled: confidence without another decision."""
    scaled = dict(start_weights())
    for name in ("head.classify.weight", "head.classify.bias"):
        scaled[name] = scaled[name] * scale
    return scaled


def test_a_trusted_client_keeps_clean_labels_and_mixes_the_others() -> None:
    shard, _ = make_shard(1)
    q = torch.linspace(0, 1, 24)
    down = replace(down_with(q, shard, 0.5), weights=confident_weights(1000.0))
    lesson = prepare(Config(), fedgr.init_client(Config(), shard), down, shard)
    assert torch.equal(lesson.q, q)
    assert torch.equal(lesson.clean, q >= 0.5)
    classes = lesson.pseudo.where(~lesson.clean, -1)
    assert torch.equal(lesson.pseudo[lesson.clean], shard.labels[lesson.clean])
    assert (classes[~lesson.clean] >= 0).float().mean() > 0.8  # scaled logits are confident
    assert float(lesson.gamma_g) == pytest.approx(0.9)


def test_posteriors_reach_the_sample_they_belong_to_whatever_the_order() -> None:
    shard, _ = make_shard(1)
    q, order = torch.rand(24), torch.randperm(24)
    shuffled = Down(start_weights(), False, Partition(shard.ids[order], q[order], 0.0))
    lesson = prepare(Config(), fedgr.init_client(Config(), shard), shuffled, shard)
    assert torch.equal(lesson.q, q)


@pytest.mark.parametrize(
    ("threshold", "noise_ratio", "distrusted"),
    [
        ("inclusive", 0.79, False),
        ("inclusive", 0.8, True),
        ("strict", 0.8, False),
        ("strict", 0.81, True),
    ],
)
def test_a_distrusted_client_trains_on_pseudo_labels_alone(
    threshold: fedgr.Threshold, noise_ratio: float, distrusted: bool
) -> None:
    shard, _ = make_shard(1)
    down = replace(down_with(torch.ones(24), shard, noise_ratio), weights=confident_weights(1e-3))
    cfg = Config(threshold=threshold)
    lesson = prepare(cfg, fedgr.init_client(cfg, shard), down, shard)
    if distrusted:  # nobody is confident, so there is no label at all
        assert lesson.q.tolist() == [0] * 24
        assert lesson.pseudo.tolist() == [-1] * 24
    else:
        assert lesson.q.tolist() == [1] * 24
        assert torch.equal(lesson.pseudo, shard.labels)


def test_a_client_first_met_after_the_warm_up_trusts_its_labels() -> None:
    shard, _ = make_shard(1)
    down = down_with(None, shard)
    lesson = prepare(Config(), fedgr.init_client(Config(), shard), down, shard)
    assert lesson.noise_ratio == 0
    assert lesson.q.tolist() == [1] * 24
    assert torch.equal(lesson.pseudo, shard.labels)
    assert lesson.ema is not None
    assert_same_weights(lesson.ema, down.weights)


def test_pseudo_labels_are_forgotten_or_remembered() -> None:
    shard, _ = make_shard(1)
    down = replace(down_with(torch.zeros(24), shard, 0.5), weights=confident_weights(1e-3))
    earlier = torch.arange(24) % 4 - 1
    client = replace(fedgr.init_client(Config(), shard), pseudo=earlier)
    forgetful = prepare(Config(), client, down, shard)
    mindful = prepare(Config(pseudo_memory="persistent"), client, down, shard)
    assert forgetful.pseudo.tolist() == [-1] * 24
    assert torch.equal(mindful.pseudo, earlier)


def test_a_clean_flag_leaves_the_given_label_in_the_memory() -> None:
    shard, _ = make_shard(1)
    cfg = Config(pseudo_memory="persistent")
    weights = confident_weights(1e-3)
    flags = (torch.arange(24) < 12).float()
    first = prepare(
        cfg,
        fedgr.init_client(cfg, shard),
        replace(down_with(flags, shard, 0.5), weights=weights),
        shard,
    )
    client = replace(fedgr.init_client(cfg, shard), pseudo=first.table)
    later = prepare(
        cfg, client, replace(down_with(torch.zeros(24), shard, 0.5), weights=weights), shard
    )
    assert torch.equal(later.pseudo, shard.labels.where(flags > 0, -1))


@pytest.mark.parametrize(
    ("dr_from", "flags_clean", "remembered", "gamma"),
    [
        ("same_round", 12, 0, 0.9),  # 12 of 24 clean-flagged: |D^r|/n = ½, not below μ
        ("same_round", 11, 24, 0.0),
        ("previous_participation", 24, 11, 0.0),
        ("previous_participation", 0, 12, 0.9),
        ("previous_participation", 24, None, 0.0),  # first refined participation
    ],
)
def test_the_average_of_a_distrusted_client_is_reset_without_reliable_samples(
    dr_from: fedgr.ReliableFrom, flags_clean: int, remembered: int | None, gamma: float
) -> None:
    shard, _ = make_shard(1)
    q = (torch.arange(24) < flags_clean).float()
    down = replace(down_with(q, shard, 0.9), weights=confident_weights(1e-3))
    cfg = Config(dr_from=dr_from)
    pseudo = None if remembered is None else (torch.arange(24) < remembered).long() - 1
    old = {name: tensor + 1 for name, tensor in down.weights.items()}
    client = replace(fedgr.init_client(cfg, shard), pseudo=pseudo, ema=old)
    lesson = prepare(cfg, client, down, shard)
    assert float(lesson.gamma_g) == pytest.approx(gamma)
    assert lesson.ema is not None
    for name, tensor in down.weights.items():  # w_g + γ·((w_g + 1) − w_g)
        torch.testing.assert_close(lesson.ema[name], tensor + gamma)


def test_double_ema_revises_again_after_the_teachers_pass() -> None:
    shard, _ = make_shard(1)
    down = down_with(torch.ones(24), shard)
    old = {name: tensor + 1 for name, tensor in down.weights.items()}
    lessons = []
    for double in (False, True):
        cfg = Config(ema_double=double)
        client = replace(fedgr.init_client(cfg, shard), ema=old)
        lessons.append(prepare(cfg, client, down, shard))
    once, twice = lessons
    assert torch.equal(once.teacher_logits, twice.teacher_logits)
    assert twice.ema is not None
    for name, tensor in down.weights.items():
        torch.testing.assert_close(twice.ema[name], tensor + 0.81)


def test_a_confident_average_may_vouch_for_the_global_models_class() -> None:
    shard, _ = make_shard(1)
    down = replace(down_with(torch.zeros(24), shard, 0.5), weights=confident_weights(1.0))
    ema = confident_weights(1e5)
    kept = {}
    for fixmatch in ("global", "global_or_ema"):
        cfg = Config(fixmatch=fixmatch)
        client = replace(fedgr.init_client(cfg, shard), ema=ema)
        kept[fixmatch] = prepare(cfg, client, down, shard)
    assert kept["global"].pseudo.tolist() == [-1] * 24  # an untrained model is not confident
    sure = kept["global_or_ema"].pseudo >= 0
    assert sure.float().mean() > 0.8
    weak = make_bench().view("weak", shard.images, Streams(1, 5, 1)("round view"))
    classes = make_bench().forward(down.weights, weak).logits.argmax(dim=1)
    assert torch.equal(kept["global_or_ema"].pseudo[sure], classes[sure])


# ------------------------------------------------------------------------- ablations and switches


def plan_of(cfg: Config, *, warm_up: bool = False) -> tuple[Plan, RecordingBench]:
    shard, _ = make_shard(1)
    bench = make_bench()
    down = down_with(torch.linspace(0, 1, 24), shard, 0.5, warm_up=warm_up)
    fedgr.train(cfg, fedgr.init_client(cfg, shard), down, shard, bench, Streams(1, 5, 1))
    return bench.plans[0], bench


def test_both_phases_share_one_captured_step() -> None:
    warm, refined = plan_of(Config(), warm_up=True)[0], plan_of(Config())[0]
    assert isinstance(warm.loss, partial)
    assert isinstance(refined.loss, partial)
    assert warm.loss.func is refined.loss.func
    assert warm.loss.args == refined.loss.args
    assert hash(warm.loss.args) == hash(refined.loss.args)
    assert warm.columns.keys() == refined.columns.keys()
    assert (warm.constants["lambda_b"], refined.constants["lambda_b"]) == (0.0, 1.0)


def test_views_follow_the_augmentation_ablations() -> None:
    plan, bench = plan_of(Config())
    assert dict(plan.views) == {"student": "strong"}
    assert bench.views == ["raw", "weak"]
    plan, _ = plan_of(Config(student_view="weak"))
    assert dict(plan.views) == {"student": "weak"}
    plan, bench = plan_of(Config(teacher_view="strong", rep="per_batch"))
    assert dict(plan.views) == {"student": "strong", "weak": "strong"}
    assert bench.views == ["raw", "strong"]


def test_without_refining_only_clean_samples_are_trained_on_and_divided_by_b() -> None:
    plan, _ = plan_of(Config(refine_labels=False, mix="batch_mean", lambda_b=0.0, lambda_r=0.0))
    clean = torch.linspace(0, 1, 24) >= 0.5
    assert torch.equal(plan.columns["q"], clean.float())
    assert torch.equal(plan.columns["pseudo"], plan.columns["label"].where(clean, -1))
    images = torch.rand(24, 64)
    z = images[:, :CLASSES]

    def net(x: Tensor) -> Outputs:
        return Outputs(None, x[:, :CLASSES])

    loss = plan.loss(Batch({**plan.columns, "student": images}, {}, None), net)
    expected = F.cross_entropy(z[clean], plan.columns["label"][clean], reduction="sum") / 24
    torch.testing.assert_close(loss, expected)
    distrusted = down_with(clean.float(), make_shard(1)[0], 0.95)
    cfg = Config(refine_labels=False)
    lesson = prepare(cfg, fedgr.init_client(cfg, make_shard(1)[0]), distrusted, make_shard(1)[0])
    assert torch.equal(lesson.q, clean.float())  # irrespective of r_k


def test_ablated_terms_leave_the_plan() -> None:
    plan, _ = plan_of(Config(lambda_b=0.0, lambda_r=0.0))
    assert plan.columns.keys() == {"label", "q", "pseudo"}
    assert plan.ema is None


def test_per_batch_representation_brings_the_frozen_global_model() -> None:
    plan, _ = plan_of(Config(rep="per_batch"))
    assert len(plan.frozen) == 1
    assert_same_weights(plan.frozen[0], start_weights())
    assert "features" not in plan.columns


def test_online_distillation_asks_for_the_current_average() -> None:
    plan, _ = plan_of(Config(teacher="online"))
    assert plan.ema is not None
    assert plan.ema.in_loss
    assert "teacher_logits" not in plan.columns


@pytest.mark.parametrize("sgd", [SGD, replace(SGD, batch_size=32)])
def test_extra_local_observation_is_averaged_in(sgd: Sgd) -> None:
    """With one earlier global observation, the mean is (global + local)/2; without a step the
    local model is the global one, and the mean stays."""
    shard, _ = make_shard(1)
    down = down_with(None, shard, warm_up=True)
    means = []
    for extra in (False, True):
        cfg, bench = Config(extra_local_obs=extra), make_bench(sgd)
        client, up, _ = fedgr.train(
            cfg, fedgr.init_client(cfg, shard), down, shard, bench, Streams(1, 0, 1)
        )
        assert client.observations == 1 + extra
        assert bench.plans[0].observe_after == (1 if extra else None)
        means.append(up.losses)
    observed = bench.fitted[0].observed
    if sgd.batch_size > 24:
        assert observed is None
        torch.testing.assert_close(means[0], means[1])
    else:
        assert observed is not None
        local = F.cross_entropy(observed.logits, shard.labels, reduction="none")
        torch.testing.assert_close(means[1], (means[0] + local) / 2)


def test_a_client_that_sieves_for_itself_uploads_no_losses_and_uses_its_own_fit_later() -> None:
    shard, _ = make_shard(1)
    cfg, bench = Config(sieve_at="client", warmup_rounds=1), make_bench()
    client = fedgr.init_client(cfg, shard)
    down = down_with(None, shard, warm_up=True)
    client, up, _ = fedgr.train(cfg, client, down, shard, bench, Streams(1, 0, 1))
    assert len(up.ids) == len(up.losses) == 0
    torch.testing.assert_close(client.mean_loss, raw_losses(up.weights, shard))
    assert client.partition is not None
    assert fedgr.METHOD.own_sieve(client) == Sieved(
        client.partition.noise_ratio, client.partition.q
    )
    foreign = down_with(torch.zeros(24), shard, 1.0)  # nothing that a server says is used
    lesson = prepare(cfg, client, foreign, shard)
    assert lesson.noise_ratio == client.partition.noise_ratio
    assert torch.equal(lesson.clean, client.partition.q >= 0.5)
    federation = Federation((24,), 1, 2, CLASSES)
    server, metrics = fedgr.merge(cfg, fedgr.init_server(cfg, down.weights, federation), 0, {1: up})
    assert server.partitions == {}
    assert metrics == {}
    frozen = replace(cfg, sieve_after_warmup=False)
    later, _, _ = fedgr.train(frozen, client, foreign, shard, bench, Streams(1, 1, 1))
    assert later.partition is client.partition


def raw_losses(weights: Weights, shard: Shard) -> Tensor:
    """Of a model that has been trained, on raw images in evaluation mode."""
    bench = make_bench()
    raw = bench.view("raw", shard.images, np.random.default_rng(0))
    return F.cross_entropy(bench.forward(weights, raw).logits, shard.labels, reduction="none")


def test_a_client_that_sieves_for_itself_may_observe_its_model_twice_a_round() -> None:
    """After the first epoch and after the last: their mean."""
    shard, _ = make_shard(1)
    cfg, bench = Config(sieve_at="client", extra_local_obs=True), make_bench()
    down = down_with(None, shard, warm_up=True)
    client, up, _ = fedgr.train(
        cfg, fedgr.init_client(cfg, shard), down, shard, bench, Streams(1, 0, 1)
    )
    assert client.observations == 2
    assert bench.plans[0].observe_after == 1
    early = bench.fitted[0].observed
    assert early is not None
    first = F.cross_entropy(early.logits, shard.labels, reduction="none")
    last = raw_losses(up.weights, shard)
    assert not torch.allclose(first, last)
    torch.testing.assert_close(client.mean_loss, (first + last) / 2)


ABLATIONS: list[dict[str, Any]] = [
    {},
    {"preset": "authors"},
    {"preset": "generation-a"},
    {"sieve_at": "client"},
    {"refine_labels": False},
    {"lambda_r": 0.0},
    {"lambda_b": 0.0},
    {"student_view": "weak"},
    {"teacher_view": "strong"},
    {"teacher": "online", "rep": "per_batch"},
    {"warmup_sampling": "with_replacement"},
    {"sieve_after_warmup": False},
]


@pytest.mark.parametrize("setting", ABLATIONS, ids=str)
def test_every_variant_runs_through_both_phases(setting: dict[str, Any]) -> None:
    shards = [make_shard(k, noise=0.4)[0] for k in range(4)]
    server, clients, _ = run(Config(warmup_rounds=2, **setting), shards, 4, make_bench())
    assert all(bool(t.isfinite().all()) for t in server.weights.values())
    assert any(client.observations > 0 for client in clients.values())


# ------------------------------------------------------------------------- timing and aggregation


def test_a_client_works_with_the_sieve_of_its_previous_participation() -> None:
    shards = [make_shard(k, noise=0.4)[0] for k in range(4)]
    cfg, bench = Config(warmup_rounds=2), make_bench()
    federation = Federation((24,) * 4, 2, 10, CLASSES)
    server = fedgr.init_server(cfg, start_weights(), federation)
    assert fedgr.send(cfg, server, 0, 1).partition is None

    def turn(server: Server, t: int, ks: tuple[int, ...]) -> Server:
        ups = {}
        for k in ks:
            client = fedgr.init_client(cfg, shards[k])
            down = fedgr.send(cfg, server, t, k)
            _, ups[k], _ = fedgr.train(cfg, client, down, shards[k], bench, Streams(1, t, k))
        return fedgr.merge(cfg, server, t, ups)[0]

    server = turn(server, 0, (0, 1))
    first = fedgr.send(cfg, server, 1, 1).partition
    assert first is not None
    assert torch.equal(first.ids, shards[1].ids)  # its own samples only
    server = turn(server, 1, (2, 3))
    server = turn(server, 2, (0, 2))
    same = fedgr.send(cfg, server, 3, 1).partition
    assert same is not None
    assert torch.equal(same.ids, first.ids)
    assert torch.equal(same.q, first.q)
    assert same.noise_ratio == first.noise_ratio
    sieved = fedgr.sieve(server)
    assert (set(sieved), len(sieved)) == ({0, 1, 2, 3}, 4)
    p_clean = sieved[1].p_clean
    assert p_clean is not None
    assert torch.equal(p_clean, first.q)
    assert sieved[1].noise_rate == first.noise_ratio


def test_weights_are_averaged_by_samples_and_r_k_is_reported() -> None:
    w = {"w": torch.tensor([0.0]), "bn.running_mean": torch.tensor([10.0])}
    v = {"w": torch.tensor([4.0]), "bn.running_mean": torch.tensor([2.0])}
    losses = torch.tensor([0.1, 0.12, 0.09, 3.0])
    ups = {
        0: Up(w, 3, torch.arange(3), losses[:3]),
        1: Up(v, 1, torch.arange(3, 4), losses[3:]),
    }
    server = fedgr.init_server(Config(), w, Federation((3, 1), 2, 4, 2))
    merged, metrics = fedgr.merge(Config(), server, 0, ups)
    assert float(merged.weights["w"]) == pytest.approx(1.0)
    assert float(merged.weights["bn.running_mean"]) == pytest.approx(8.0)
    assert {k: p.noise_ratio for k, p in merged.partitions.items()} == {0: 0.0, 1: 1.0}
    assert metrics["noise_ratio"] == pytest.approx(0.5)
    assert metrics["mixture_mean_noisy"] == pytest.approx(3.0, abs=1e-3)


def partition_of(ids: list[int], q: list[float], noise_ratio: float) -> Partition:
    return Partition(torch.tensor(ids), torch.tensor(q), noise_ratio)


def test_each_client_has_a_place_among_all_partitions() -> None:
    empty = Partitions.none((2, 0, 3))
    assert (len(empty), dict(empty)) == (0, {})
    first = empty.updated({2: partition_of([7, 5, 6], [0.1, 0.2, 0.3], 1.0)})
    both = first.updated({0: partition_of([1, 0], [0.9, 0.8], 0.0)})
    again = both.updated({2: partition_of([5, 7], [0.6, 0.7], 0.0)})
    assert (list(first), list(both), list(again)) == ([2], [0, 2], [0, 2])
    for partitions, q in ((first, [0.1, 0.2, 0.3]), (both, [0.1, 0.2, 0.3]), (again, [0.6, 0.7])):
        assert torch.equal(partitions[2].q, torch.tensor(q)), "an update leaves the older ones be"
    assert again[2].ids.tolist() == [5, 7]
    assert again[0].ids.tolist() == [1, 0]
    assert (both[2].noise_ratio, again[2].noise_ratio) == (1.0, 0.0)
    for unknown in (1, 3, -1):
        assert unknown not in again
        assert again.get(unknown) is None
    restored = decode(Partitions, encode(again))
    assert list(restored) == [0, 2]
    assert torch.equal(restored[2].q, again[2].q)


def test_a_partition_must_fit_its_place() -> None:
    partitions = Partitions.none((2, 3))
    for client, room in enumerate((2, 3)):
        with pytest.raises(FedsieveError, match=f"of 4 samples, but told of {room} before"):
            partitions.updated({client: partition_of([1, 2, 3, 4], [0.5] * 4, 0.0)})


def test_ten_thousand_partitions_are_two_tensors() -> None:
    """And are sent one at a time: what a site gets is its own part."""
    partitions = Partitions.none((3,) * 10_000)
    tensors, _ = values_of(partitions)
    assert {name: len(tensor) for name, tensor in tensors.items()} == {"ids": 30_000, "q": 30_000}
    one = partitions.updated({9_999: partition_of([4, 5, 6], [0.5, 0.6, 0.7], 0.0)})
    server = Server({}, Federation((3,) * 10_000, 1, 4, 2), one)
    sent = fedgr.send(Config(), server, 1, 9_999).partition
    assert sent is not None
    assert sent.ids.tolist() == [4, 5, 6]
    assert fedgr.send(Config(), server, 1, 9_998).partition is None


def test_a_frozen_sieve_keeps_what_the_warm_up_left() -> None:
    cfg = Config(warmup_rounds=1, sieve_after_warmup=False)
    ups = {0: Up({"w": torch.zeros(1)}, 2, torch.arange(2), torch.tensor([0.1, 5.0]))}
    server, _ = fedgr.merge(cfg, fedgr.init_server(cfg, {}, Federation((2,), 1, 4, 2)), 0, ups)
    kept = server.partitions
    ups = {0: replace(ups[0], losses=torch.tensor([5.0, 0.1]))}
    server, metrics = fedgr.merge(cfg, server, 1, ups)
    assert server.partitions is kept
    assert set(metrics) == {"noise_ratio"}


def test_clients_without_samples_change_nothing_and_no_client_is_refused() -> None:
    shard, _ = make_shard(0, n=0)
    cfg, down = Config(), down_with(None, shard, warm_up=True)
    client = fedgr.init_client(cfg, shard)
    after, up, metrics = fedgr.train(cfg, client, down, shard, make_bench(), Streams(1, 0, 0))
    assert after is client
    assert (up.samples, len(up.losses), metrics["loss"]) == (0, 0, 0.0)
    server = fedgr.init_server(cfg, down.weights, Federation((0,), 1, 2, CLASSES))
    merged, numbers = fedgr.merge(cfg, server, 0, {0: up})
    assert merged.weights is down.weights
    assert (merged.partitions, numbers) == ({}, {})
    with pytest.raises(FedsieveError, match="round 3"):
        fedgr.merge(cfg, server, 3, {})


# ------------------------------------------------------------------------------- robustness, audit


def test_a_client_smaller_than_a_batch_returns_the_global_model_and_still_uploads() -> None:
    shard, _ = make_shard(1, n=5)
    down = down_with(torch.zeros(5), shard, 1.0)
    cfg = Config()
    client, up, metrics = fedgr.train(
        cfg, fedgr.init_client(cfg, shard), down, shard, make_bench(), Streams(1, 9, 1)
    )
    assert_same_weights(up.weights, down.weights)
    assert len(up.losses) == up.samples == 5
    assert metrics["loss"] == 0
    assert client.ema is not None


def test_a_model_without_features_is_refused_unless_lambda_r_is_0() -> None:
    shard, _ = make_shard(1)
    weights = start_weights(NoFeatures)
    down = Down(weights, False, None)
    for lambda_r in (0.1, 0.0):
        cfg = Config(lambda_r=lambda_r)
        arguments = (cfg, fedgr.init_client(cfg, shard), down, shard)
        bench = make_bench(model=NoFeatures)
        if lambda_r > 0:
            with pytest.raises(FedsieveError, match="returns features"):
                fedgr.train(*arguments, bench, Streams(1, 0, 1))
        else:
            assert np.isfinite(fedgr.train(*arguments, bench, Streams(1, 0, 1))[2]["loss"])


def test_other_samples_than_remembered_are_refused() -> None:
    shard, _ = make_shard(1)
    client = fedgr.init_client(Config(), make_shard(1, n=20)[0])
    with pytest.raises(FedsieveError, match="remembers 20 samples but now holds 24"):
        fedgr.train(Config(), client, down_with(None, shard), shard, make_bench(), Streams(1, 0, 1))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_noise_and_nothing_but_noise_are_survived(noise: float) -> None:
    shards = [make_shard(k, noise=noise)[0] for k in range(2)]
    server, _, lines = run(Config(warmup_rounds=1), shards, 3, make_bench())
    assert all(bool(t.isfinite().all()) for t in server.weights.values())
    assert all(0 <= line["noise_ratio"] <= 1 for line in lines)


def test_suspicion_is_the_mean_of_sieve_and_model() -> None:
    shard, _ = make_shard(1)
    q = torch.linspace(0, 1, 24)
    down = down_with(q, shard)
    bench, client = make_bench(), fedgr.init_client(Config(), shard)
    probabilities = bench.forward(down.weights, shard.images).logits.softmax(dim=1).numpy()
    given = probabilities[np.arange(24), shard.labels.numpy()]
    found = fedgr.suspect(Config(), client, down, shard, bench)
    np.testing.assert_allclose(found.p_wrong, 1 - (q.numpy() + given) / 2, rtol=1e-5)
    assert found.suggested.tolist() == probabilities.argmax(axis=1).tolist()
    alone = fedgr.suspect(Config(), client, replace(down, partition=None), shard, bench)
    np.testing.assert_allclose(alone.p_wrong, 1 - given, rtol=1e-5)
    own = replace(client, partition=down.partition)
    own_sieve = fedgr.suspect(
        Config(sieve_at="client"), own, replace(down, partition=None), shard, bench
    )
    assert torch.equal(own_sieve.p_wrong, found.p_wrong)


@pytest.fixture(scope="module")
def noisy_run() -> tuple[list[tuple[Shard, Tensor]], Server, dict[ClientId, Client]]:
    made = [make_shard(k, n=48, noise=0.1 + 0.2 * k) for k in range(3)]
    cfg = Config(warmup_rounds=6)
    shards = [shard for shard, _ in made]
    server, clients, _ = run(cfg, shards, 9, make_bench(), per_round=3)
    return made, server, clients


def test_the_sieve_and_the_audit_find_the_wrong_labels(noisy_run: Any) -> None:
    made, server, clients = noisy_run
    cfg = Config(warmup_rounds=6)
    wrong, p_wrong, fixed = [], [], []
    for shard, true in made:
        down = fedgr.send(cfg, server, 9, shard.client)
        found = fedgr.suspect(cfg, clients[shard.client], down, shard, make_bench())
        wrong.append(shard.labels != true)
        p_wrong.append(found.p_wrong)
        fixed.append(found.suggested == true)
    is_wrong, score = torch.cat(wrong), torch.cat(p_wrong)
    pairs = score[is_wrong][:, None] > score[~is_wrong][None]
    assert pairs.float().mean() > 0.9  # the area under the ROC curve
    assert torch.cat(fixed).float().mean() > 0.8
    rates = [fedgr.sieve(server)[k].noise_rate for k in range(3)]
    assert rates[0] < rates[2]
    labels = fedgr.refined(clients[2])
    shard, true = made[2]
    assert labels is not None
    assert (labels == true).float().mean() > (shard.labels == true).float().mean()


def test_nothing_but_weights_size_ids_and_losses_leaves_a_site(noisy_run: Any) -> None:
    assert [f.name for f in fields(Up)] == ["weights", "samples", "ids", "losses"]
    assert [f.name for f in fields(Down)] == ["weights", "warm_up", "partition"]
    _, _, clients = noisy_run
    assert fedgr.refined(fedgr.init_client(Config(), make_shard(0)[0])) is None
    assert clients[0].partition is None


def test_every_record_survives_its_bytes(noisy_run: Any) -> None:
    made, server, clients = noisy_run
    shard = made[0][0]
    cfg = Config(warmup_rounds=6)
    down = fedgr.send(cfg, server, 9, 0)
    _, up, _ = fedgr.train(cfg, clients[0], down, shard, make_bench(), Streams(7, 9, 0))
    fresh = fedgr.init_client(cfg, shard)
    own = replace(clients[1], partition=server.partitions[1])
    for record in (server, clients[0], own, fresh, down, replace(down, partition=None), up):
        back = decode(type(record), encode(record))
        assert encode(back) == encode(record)
        assert type(back) is type(record)
    restored = decode(Server, encode(server))
    assert_same_weights(fedgr.METHOD.weights(restored), fedgr.METHOD.weights(server))
    assert restored.partitions.keys() == server.partitions.keys()
    assert torch.equal(restored.partitions[2].q, server.partitions[2].q)
