"""Tile shapes depend on the layer shape and the token bucket, and what ships can be read."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.kernel_tune import fields_of, neighbours
from compute_worker.kernels import MoEConfig, MoEWeights, choose_config, config, token_bucket
from compute_worker.kernels.moe import has_dependent_launch


def _weights(num_experts: int = 128, routed: int | None = None, d: int = 2048, f: int = 768) -> MoEWeights:
    return MoEWeights(
        gate_up_eND=torch.zeros(num_experts, 2 * f, d, dtype=torch.bfloat16, device="meta"),
        down_eDF=torch.zeros(num_experts, d, f, dtype=torch.bfloat16, device="meta"),
        num_routed_experts=routed,
    )


@pytest.mark.parametrize("tokens, bucket", [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_token_bucket_is_the_next_power_of_two(tokens, bucket):
    assert token_bucket(tokens) == bucket


def test_shipped_configurations_load_and_fit_their_shapes():
    folder = Path(config.__file__).parent / "configs"
    files = sorted(folder.glob("*.json"))
    assert files
    for path in files:
        for shape, buckets in json.loads(path.read_text()).items():
            f = int(shape.rsplit("_f", 1)[1])
            for bucket, values in buckets.items():
                loaded = MoEConfig.from_dict(values)
                assert loaded.to_dict() == values, (path.name, shape, bucket)
                assert int(bucket) == token_bucket(int(bucket))
                assert loaded.pair_block_m >= 16
                assert not loaded.gate_up.tma or f % loaded.gate_up.block_n == 0


def test_a_tuned_shape_takes_the_nearest_bucket_and_others_the_rule():
    tuned = _weights()
    by_tokens = {t: choose_config(tuned, num_tokens=t, top_k=8, device_name="NVIDIA H200") for t in (3, 33, 64, 9000)}
    assert by_tokens[33] == by_tokens[64] != by_tokens[3]
    assert by_tokens[9000].fused
    unknown = choose_config(tuned, num_tokens=64, top_k=8, device_name="some other GPU")
    assert unknown == config.rule(tuned, num_tokens=64, top_k=8)


def test_the_rule_counts_rows_per_expert_over_all_ranks():
    """32 local of 256 experts expect an eighth of the rows that 32 of 32 would."""
    whole, part = _weights(32, None), _weights(32, 256)
    assert config.rule(whole, num_tokens=512, top_k=8).fused
    assert config.rule(part, num_tokens=512, top_k=8).block_m == 32
    assert config.rule(part, num_tokens=500, top_k=8) == config.rule(part, num_tokens=512, top_k=8)


def test_a_step_of_columns_that_no_kernel_has_is_refused():
    fine = config.rule(_weights(), num_tokens=4096, top_k=8)
    with pytest.raises(ValueError, match="delta_columns must be 32 or 64, got 48"):
        dataclasses.replace(fine, delta_columns=48)


def test_a_way_of_adding_down_deltas_that_no_kernel_has_is_refused():
    """An unknown one would add none; the epilogue of the split path has no list of columns to go by."""
    split = config.rule(_weights(), num_tokens=8, top_k=8)
    with pytest.raises(ValueError, match="expand_down must be combine, grouped or epilogue, got 'combined'"):
        dataclasses.replace(split, expand_down="combined")
    with pytest.raises(ValueError, match="needs the fused path"):
        dataclasses.replace(split, expand_down="epilogue")


def test_the_tuner_tries_each_way_of_adding_deltas():
    fine = config.rule(_weights(), num_tokens=4096, top_k=8)
    assert {c.delta_columns for c in neighbours(fine, "delta_columns")} == {32, 64} - {fine.delta_columns}
    assert {"delta_columns", "pdl"} <= set(fields_of(fine))


def test_the_tuner_passes_over_what_a_configuration_refuses():
    """Small tiles of the fused path: the one it found best may be swapped or have fewer rows than extra_m."""
    fused = config.rule(_weights(), num_tokens=256, top_k=8)
    assert fused.fused
    assert fused.block_m == 32
    swapped = dataclasses.replace(fused, down=dataclasses.replace(fused.down, swap=True))
    small = dataclasses.replace(fused, block_m=16)
    for field in ("extra_m", "lora_extra_m"):
        assert [getattr(c, field) for c in neighbours(fused, field)] == [16, 32]
        assert [getattr(c, field) for c in neighbours(small, field)] == [16]
        assert list(neighbours(swapped, field)) == []


def test_more_rows_in_a_tile_than_there_is_a_body_for_are_refused():
    fine = config.rule(_weights(), num_tokens=4096, top_k=8)
    with pytest.raises(ValueError, match="lora_extra_m must be 0, 16 or 32 and at most block_m 128, got 64"):
        dataclasses.replace(fine, lora_extra_m=64)
    with pytest.raises(ValueError, match="tail_m must be at most block_m 128, got 256"):
        dataclasses.replace(fine, tail_m=256)
    swapped = dataclasses.replace(fine.down, swap=True)
    with pytest.raises(ValueError, match="extra_m does not go with"):
        dataclasses.replace(fine, extra_m=16, down=swapped)


@pytest.mark.parametrize("capability, expected", [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_launch_early_only_where_the_gpu_can(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    has_dependent_launch.cache_clear()
    try:
        assert has_dependent_launch(torch.device("cuda", 0)) is expected
        assert not has_dependent_launch(torch.device("cpu"))
    finally:
        has_dependent_launch.cache_clear()
