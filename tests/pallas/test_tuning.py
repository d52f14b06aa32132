"""Configs: chosen from a table or a user's file, and found by a search that only takes what is faster and gives the same bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from jaxarena.__main__ import main
from jaxarena.pallas import configs, project_bf16, project_int8, project_kept, project_two_words, tuning
from jaxarena.pallas.configs import Product, Tuned
from jaxarena.pallas.frame import TileConfig

SMALL = TileConfig(tile_m=128, tile_n=128, warpgroups=2, stages=5, buffers=2)
PRODUCT = Product("project_bf16", 128, 128, 128, 2)


@pytest.fixture(autouse=True)
def nothing_in_use() -> Iterator[None]:
    yield
    configs.clear()


@pytest.mark.parametrize(
    ("kernel", "config_for"),
    [
        ("project_bf16", project_bf16.config_for),
        ("project_int8", project_int8.config_for),
        ("project_two_words", project_two_words.config_for),
        ("dweight_kept", project_kept.config_for),
    ],
)
def test_a_file_decides_for_its_products_alone(kernel: str, config_for: Callable[..., TileConfig], tmp_path: Any) -> None:
    mine = dataclasses.replace(SMALL, stages=3, group=2)
    before = config_for(8192, 2048, 1024, 132)
    assert before != mine
    path = tmp_path / "tuned.json"
    found = [Tuned(Product(kernel, 8192, 2048, 1024, 132), mine, 0.5, 0.75)]
    configs.write(path, found, {"device": "a GPU"})
    assert config_for(8192, 2048, 1024, 132) == before
    assert configs.load(path) == found
    assert config_for(8192, 2048, 1024, 132) == mine
    assert config_for(8192, 2048, 1024, 114) != mine
    assert config_for(8192, 2048, 2048, 132) == before
    configs.clear()
    assert config_for(8192, 2048, 1024, 132) == before


def _row(**changed: Any) -> dict[str, Any]:
    row = {**PRODUCT._asdict(), "config": dataclasses.asdict(SMALL), "milliseconds": 1.0, "default_milliseconds": 1.0}
    return row | changed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "JSONDecodeError"),
        ("{}", "KeyError: 'configs'"),
        (json.dumps({"configs": [_row(config=dataclasses.asdict(SMALL) | {"group": 3}), _row(m="many")]}), "ValueError"),
        (json.dumps({"configs": [_row(config={})]}), "TypeError"),
        (json.dumps({"configs": [_row(config=dataclasses.asdict(SMALL) | {"stages": 0})]}), "stages must be at least 1, got 0"),
    ],
)
def test_a_bad_file_is_refused_and_nothing_of_it_used(text: str, message: str, tmp_path: Any) -> None:
    untuned, path = project_bf16.config_for(*PRODUCT[1:]), tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.json is no file of tuned configs: .*{message}"):
        configs.load(path)
    assert project_bf16.config_for(*PRODUCT[1:]) == untuned


def test_neighbours_differ_in_a_field_and_are_valid() -> None:
    found = list(tuning.neighbours(SMALL))
    assert len(found) == len(set(found)) and SMALL not in found
    for other in found:
        assert 1 <= len(tuning._difference(SMALL, other)) <= 2
    assert {c.group for c in found} == {4, 8, 16}
    assert {(c.cluster_m, c.cluster_n) for c in found} == {(1, 1), (2, 1), (1, 2)}


class Machine:
    """Compiles launches that give ``result`` of their config, and says that they take what it ``cost``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[TileConfig], float], result: Callable[[TileConfig], Any]):
        self.compiled: list[TileConfig] = []
        self.cost, self.result = cost, result
        monkeypatch.setattr(tuning, "_compiled", self.compile)

    def compile(self, config: TileConfig, *_: Any) -> Callable[[], Any]:
        self.compiled.append(config)
        result = self.result(config)

        def call(asks: str = "") -> Any:
            return self.cost(config) if asks == "cost" else [result]

        return call

    def seconds(self, *calls: Callable[..., Any]) -> list[float]:
        return [call("cost") for call in calls]


def test_the_search_climbs_to_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda c: 1 + abs(c.stages - 9) + abs(c.group - 2) + 5 * (not c.in_turn), lambda _: jnp.zeros(3))
    found = tuning.tune(PRODUCT, trials=1000, seconds=machine.seconds, say=lambda _: None)
    assert (found.config.stages, found.config.group, found.config.in_turn) == (9, 2, True)
    assert found.milliseconds == pytest.approx(1000.0 / 8)  # of the eight copies of so small a weight
    assert found.default_milliseconds > found.milliseconds


def test_the_search_refuses_other_bits_and_what_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(config: TileConfig) -> Any:
        if config.stages > 5:
            raise ValueError("too much shared memory")
        return jnp.full(3, float(config.in_turn))

    said: list[str] = []
    machine = Machine(monkeypatch, lambda c: 10.0 - c.stages - c.in_turn, result)
    found = tuning.tune(PRODUCT, trials=1000, seconds=machine.seconds, say=said.append)
    assert (found.config.stages, found.config.in_turn) == (5, False)
    assert any("in_turn=True: refused: other bits" in line for line in said)
    assert any("refused: too much shared memory" in line for line in said)


def test_trials_bound_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda c: 1.0 / c.stages, lambda _: jnp.zeros(3))
    default = project_bf16.config_for(*PRODUCT[1:])
    found = tuning.tune(PRODUCT, trials=0, seconds=machine.seconds, say=lambda _: None)
    assert found.config == default and set(machine.compiled) == {default}
    tuning.tune(PRODUCT, trials=3, seconds=machine.seconds, say=lambda _: None)
    assert len(set(machine.compiled)) == 4


@pytest.mark.parametrize(
    ("product", "trials", "message"),
    [
        (PRODUCT._replace(kernel="project"), 1, "kernel must be one of project_bf16, .*got project"),
        (PRODUCT, -1, "trials must be at least 0, got -1"),
        (PRODUCT._replace(n=100), 0, "project_bf16: .*got 100 columns"),
    ],
)
def test_what_cannot_be_tuned_is_said(product: Product, trials: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuning.tune(product, trials=trials)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(tuning.KERNELS))
def test_every_kernel_runs_with_the_operands_made_for_it(kernel: str) -> None:
    product = Product(kernel, 128, 128, 128, 2)
    rows, columns, launch = tuning.KERNELS[kernel].operands(product, True)
    result = launch(SMALL if kernel != "project_two_words" else dataclasses.replace(SMALL, piece=32), rows, columns)
    assert result.shape == (128, 128)
    assert float(jnp.std(result.astype(jnp.float32))) == pytest.approx(128**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["tune", "--shape", "8192x8192", "--out", "x.json"], "--shape must be MxNxK, such as 8192x8192x2048, got 8192x8192"),
        (["tune", "--shape", "128x128x128", "--out", "x.json"], "tune needs an NVIDIA GPU of compute capability 9.0, got cpu"),
    ],
)
def test_the_command_says_what_is_wrong(line: list[str], message: str, capsys: Any) -> None:
    assert main(line) == 2
    assert message in capsys.readouterr().err
