"""FedGR's settings, presets and client selection."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.config import from_table, to_table
from fedsieve.errors import FedsieveError
from fedsieve.methods import fedgr
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedgr import PRESETS, Config, Switches
from fedsieve.types import SERVER, ClientId, Streams


def test_defaults_are_table_17_for_cifar_10() -> None:
    cfg = Config()
    assert (cfg.lambda_b, cfg.lambda_r, cfg.epsilon, cfg.beta) == (1.0, 0.1, 0.9, 0.8)
    assert (cfg.gamma_l, cfg.gamma_g, cfg.temperature, cfg.mu) == (0.99, 0.9, 0.5, 0.5)
    hundred = Federation(sizes=(500,) * 100, per_round=10, rounds=500, num_classes=10)
    assert fedgr.warm_up_rounds(cfg, hundred) == 100


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_in_every_switch_and_the_saved_table_names_them(
    preset: fedgr.Preset,
) -> None:
    cfg = Config(preset=preset)
    assert cfg.switches == PRESETS[preset]
    table = to_table(cfg)
    assert {k: table[k] for k in asdict(PRESETS[preset])} == asdict(PRESETS[preset])
    assert from_table(Config, table) == cfg


def test_an_explicit_switch_wins_over_the_preset() -> None:
    cfg = Config(preset="authors", mix="per_sample", ema_double=False)
    assert cfg.switches == replace(PRESETS["authors"], mix="per_sample", ema_double=False)


def test_presets_differ_where_the_programs_do() -> None:
    def differing(a: Switches, b: Switches) -> set[str]:
        return {f.name for f in fields(Switches) if getattr(a, f.name) != getattr(b, f.name)}

    paper, authors, generation_a = PRESETS["paper"], PRESETS["authors"], PRESETS["generation-a"]
    assert differing(PRESETS["published"], paper) == {"mix"}
    assert Config().switches == PRESETS["published"]
    assert differing(paper, authors) == {
        "mix",
        "pseudo_memory",
        "extra_local_obs",
        "ema_double",
        "dr_from",
        "threshold",
    }
    assert differing(authors, generation_a) == {
        "extra_local_obs",
        "ema_double",
        "fixmatch",
        "rep",
    }


@pytest.mark.parametrize(
    "setting",
    [
        {"warmup_rounds": -1},
        {"warmup_passes": 0},
        {"clean_threshold": 1.0},
        {"beta": 0.0},
        {"epsilon": 1.1},
        {"mu": -0.1},
        {"gamma_g": 1.5},
        {"gamma_l": 1.0},
        {"temperature": 0.0},
        {"lambda_b": -1.0},
        {"lambda_r": float("nan")},
        {"preset": "code"},
        {"mix": "batchmean"},
        {"teacher": "ema"},
    ],
)
def test_bad_values_are_refused_by_name(setting: dict[str, object]) -> None:
    (name,) = setting
    with pytest.raises(FedsieveError, match=rf"method\.{name} must be .*, not "):
        Config(**setting)  # type: ignore[arg-type]


def test_no_average_is_kept_that_nobody_reads() -> None:
    assert Config().keeps_ema
    assert not Config(lambda_b=0.0).keeps_ema
    assert Config(lambda_b=0.0, fixmatch="global_or_ema").keeps_ema


# --------------------------------------------------------------------------------------- select


def chosen(
    cfg: Config, clients: int, per_round: int, rounds: range, seed: int = 1
) -> list[tuple[ClientId, ...]]:
    federation = Federation((5,) * clients, per_round, 500, 10)
    server = fedgr.init_server(cfg, {}, federation)
    return [fedgr.select(cfg, server, t, Streams(seed, t, SERVER)) for t in rounds]


def test_warm_up_meets_every_client_once_in_ten_rounds_and_ten_times_in_all() -> None:
    picks = chosen(Config(), 100, 10, range(100))
    for first in range(0, 100, 10):
        assert sorted(sum(picks[first : first + 10], ())) == list(range(100))
    assert set(Counter(sum(picks, ())).values()) == {10}
    assert picks[0:10] != picks[10:20]  # a fresh order in each pass
    assert all(list(pick) == sorted(pick) and len(pick) == 10 for pick in picks)


@given(clients=st.integers(1, 40), per_round=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_pass_meets_every_client_once(clients: int, per_round: int, seed: int) -> None:
    per_round = min(per_round, clients)
    length = -(-clients // per_round)
    picks = chosen(Config(), clients, per_round, range(length), seed)
    assert sorted(sum(picks, ())) == list(range(clients))
    sizes = {len(pick) for pick in picks}
    assert max(sizes) <= per_round
    assert max(sizes) - min(sizes) <= 1


def test_after_the_warm_up_clients_are_drawn_independently() -> None:
    cfg = Config(warmup_rounds=4)
    picks = chosen(cfg, 12, 3, range(4, 40))
    assert all(len(set(pick)) == 3 for pick in picks)
    passes = [sorted(sum(picks[i : i + 4], ())) for i in range(0, 36, 4)]
    assert any(p != list(range(12)) for p in passes)
    assert picks == chosen(cfg, 12, 3, range(4, 40))  # the same seed, the same clients


def test_sampling_with_replacement_may_miss_clients_in_the_warm_up() -> None:
    picks = chosen(Config(warmup_sampling="with_replacement"), 100, 10, range(10))
    assert all(len(set(pick)) == 10 for pick in picks)
    assert len(set(sum(picks, ()))) < 100


def test_a_warm_up_of_no_rounds_is_allowed() -> None:
    federation = Federation((5,) * 4, 2, 10, 3)
    cfg = Config(warmup_rounds=0)
    server = fedgr.init_server(cfg, {}, federation)
    assert fedgr.send(cfg, server, 0, 1).warm_up is False
    assert fedgr.send(Config(warmup_rounds=1), server, 0, 1).warm_up is True
