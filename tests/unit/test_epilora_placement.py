"""Placements: strategies, explicit files, and the conversions between logical and physical experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.errors import InvalidArgumentError, NotFoundError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from tests.unit.epilora_models import model_spec


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model", num_experts=5)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [
        ("linear", 1, [[0, 1, 2, 3, 4]]),
        ("linear", 2, [[0, 1, 2], [3, 4]]),
        ("linear", 3, [[0, 1], [2, 3], [4]]),
        ("linear", 7, [[0], [1], [2], [3], [4], [], []]),
        ("round_robin", 2, [[0, 2, 4], [1, 3]]),
        ("round_robin", 3, [[0, 3], [1, 4], [2]]),
    ],
)
def test_strategies(model: ModelSpec, strategy: str, num_ranks: int, expected: list[list[int]]) -> None:
    placement = ExpertPlacement.make(strategy, model, num_ranks)
    for layer in (0, 1):
        assert [list(placement.local_experts(layer, rank)) for rank in range(num_ranks)] == expected
        assert placement.physical_experts(layer).tolist() == [expert for experts in expected for expert in experts]
        assert placement.rank_offsets(layer).tolist() == np.cumsum([0, *map(len, expected)]).tolist()
        assert placement.num_copies(layer).tolist() == [1] * 5
    assert placement.strategy == strategy


def _explicit(path: Path, content: Any) -> str:
    file = path / "placement.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_redundant_copies_and_arrays(model: ModelSpec, tmp_path: Path) -> None:
    """Expert 1 on all three ranks, expert 4 on two: physical ids are rank-major."""
    file = _explicit(tmp_path, {"all_layers": [[1, 0], [2, 1, 4], [4, 3, 1]]})
    placement = ExpertPlacement.make(file, model, 3)
    assert placement.strategy == "explicit"
    assert placement.physical_experts(0).tolist() == [1, 0, 2, 1, 4, 4, 3, 1]
    assert placement.rank_offsets(0).tolist() == [0, 2, 5, 8]
    assert placement.num_copies(0).tolist() == [1, 3, 1, 1, 2]
    assert placement.copies(0).tolist() == [[1, 1, 1], [0, 3, 7], [2, 2, 2], [6, 6, 6], [4, 5, 4]]
    assert placement.copies(0).dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        placement.copies(0)[0, 0] = 9


def test_layers_may_differ_and_override(model: ModelSpec, tmp_path: Path) -> None:
    content = {"all_layers": [[0, 1, 2], [3, 4]], "layers": {"1": [[4, 3], [2, 1, 0]]}}
    placement = ExpertPlacement.make(_explicit(tmp_path, content), model, 2)
    assert placement.local_experts(0, 0) == (0, 1, 2)
    assert placement.local_experts(1, 0) == (4, 3)


def test_placement_id_is_of_the_table(model: ModelSpec, tmp_path: Path) -> None:
    linear = ExpertPlacement.make("linear", model, 2)
    same = ExpertPlacement.make(_explicit(tmp_path, {"all_layers": [[0, 1, 2], [3, 4]]}), model, 2)
    assert same.placement_id == linear.placement_id
    others = [ExpertPlacement.make("linear", model, 3), ExpertPlacement.make("round_robin", model, 2)]
    assert len({linear.placement_id, *(other.placement_id for other in others)}) == 3


def test_proto_round_trip(model: ModelSpec, tmp_path: Path) -> None:
    placement = ExpertPlacement.make(_explicit(tmp_path, {"all_layers": [[1, 0, 4], [2, 1, 3]]}), model, 2)
    message = placement.to_proto()
    assert ExpertPlacement.from_proto(message) == placement
    message.layers[0].ranks[0].experts[:] = [0, 1, 4]
    with pytest.raises(InvalidArgumentError, match="says placement_id"):
        ExpertPlacement.from_proto(message)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"all_layers": [[0, 1, 2], [3]]}, r"1 of 5 experts are on no rank, first \[4\]"),
        ({"all_layers": [[0, 1, 2, 3, 4]]}, "lists of 1 ranks, expected 2"),
        ({"all_layers": [[0, 1, 2], [3, 4, 5]]}, r"rank 1 has experts \[5\], expected ids from 0 to 4"),
        ({"all_layers": [[0, 1, 2], [-1, 3, 4]]}, r"rank 1 has experts \[-1\]"),
        ({"all_layers": [[0, 1, 2, 1], [3, 4]]}, r"rank 0 has experts \[1\] more than once"),
        ({"layers": {"0": [[0, 1, 2], [3, 4]]}}, r"1 MoE layers have no placement, first \[1\]"),
        ({"layers": {"2": [[0, 1, 2], [3, 4]]}}, "layer '2' is not an MoE layer of the model, which are"),
        ({"layers": {"x": []}}, "layer 'x' is not an MoE layer"),
        ({"layers": []}, "not an object of layer number"),
        ({"all_layers": [[0, 1.5], [2]]}, "not a list, by rank, of lists"),
        ({"all_layers": [[True, 1], [2]]}, "not a list, by rank, of lists"),
        ({"all_layers": {"0": [1]}}, "not a list, by rank, of lists"),
        ({"rank_lists": []}, r"unknown keys \['rank_lists'\]"),
        ([], "holds list, not an object"),
        ("{", "not a readable JSON file"),
    ],
)
def test_bad_explicit_placements(model: ModelSpec, tmp_path: Path, content: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        ExpertPlacement.make(_explicit(tmp_path, content), model, 2)
    assert caught.value.reason == "BAD_PLACEMENT"


def test_unknown_strategy(model: ModelSpec) -> None:
    with pytest.raises(NotFoundError, match="'diagonal' is neither"):
        ExpertPlacement.make("diagonal", model, 2)


def test_load_spec_round_trip_and_digest(model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    specs = [MoEEPLoadSpec.make(model, placement, rank) for rank in range(2)]
    assert [layer.local_experts for layer in specs[1].layers] == [(3, 4), (3, 4)]
    assert specs[0].placement_id == placement.placement_id
    assert specs[0].digest != specs[1].digest
    again = MoEEPLoadSpec.from_proto(specs[1].to_proto())
    assert again == specs[1]
    assert again.digest == specs[1].digest


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_digest": ""}, "must be set"),
        ({"ep_rank": 2}, "must be below num_ep_ranks"),
        ({"num_expert_tp_ranks": 2}, "experts split inside F are not supported"),
    ],
)
def test_bad_load_specs(model: ModelSpec, change: dict[str, Any], text: str) -> None:
    message = MoEEPLoadSpec.make(model, ExpertPlacement.make("linear", model, 2), 0).to_proto()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgumentError, match=text):
        MoEEPLoadSpec.from_proto(message)


def test_bad_layers_of_load_specs(model: ModelSpec) -> None:
    good = MoEEPLoadSpec.make(model, ExpertPlacement.make("linear", model, 2), 0).to_proto()
    message = type(good)()
    message.CopyFrom(good)
    message.layers[0].local_experts.append(5)
    with pytest.raises(InvalidArgumentError, match=r"layer 0 has local experts \[5\] of 5"):
        MoEEPLoadSpec.from_proto(message)
    message.CopyFrom(good)
    message.layers[1].gate_up_layout = 0
    with pytest.raises(InvalidArgumentError, match="layer 1 has gate_up_layout 0"):
        MoEEPLoadSpec.from_proto(message)
    message.CopyFrom(good)
    message.layers[1].layer = 0
    with pytest.raises(InvalidArgumentError, match="ascending order"):
        MoEEPLoadSpec.from_proto(message)
