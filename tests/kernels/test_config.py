"""Tile shapes depend on the layer shape and the token bucket, and what ships can be read."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels import MoEConfig, MoEWeights, choose_config, config, token_bucket


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
