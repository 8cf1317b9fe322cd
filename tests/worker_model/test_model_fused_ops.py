"""Norms and rotary embeddings of real families: replaced where the kernels compute the same, and only there."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need triton")

import triton
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_moe import modeling_qwen3_moe

from compute_worker.fused_norms import replace_rms_norms
from compute_worker.fused_rotary import replace_rotary

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    _DEVICE.type == "cpu" and not triton.knobs.runtime.interpret, reason="kernels run on a GPU or interpreted"
)


def _norm(module, dtype):
    module = module.to(_DEVICE, dtype)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        module.weight.copy_(torch.rand(module.weight.shape, generator=g) + 0.3)
    return module


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "family", [modeling_qwen3_moe.Qwen3MoeRMSNorm, DeepseekV3RMSNorm, Llama4TextRMSNorm, modeling_gpt_oss.GptOssRMSNorm]
)
def test_rms_norms_of_families_are_replaced(family, dtype):
    """Wherever they round, and whatever they call eps; the weight is read at each call."""
    model = nn.Sequential(_norm(family(96, eps=1e-5), dtype))
    x = torch.randn((3, 2, 96), generator=torch.Generator().manual_seed(2)).to(_DEVICE, torch.float16)
    before = model(x)
    assert replace_rms_norms(model) == 1
    after = model(x)
    assert after.dtype == before.dtype
    assert (after != before).float().mean() <= (1 if after.dtype == torch.float32 else 0.01)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=0)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(model(x), 2 * after)


@pytest.mark.parametrize(
    "norm",
    [
        Qwen3_5MoeRMSNorm(96),  # 1 + weight
        Qwen3_5MoeRMSNormGated(96),  # takes a gate, too
        nn.LayerNorm(96),  # subtracts the mean
        nn.LayerNorm(96, bias=False),
        nn.BatchNorm1d(96),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_other_norms_stay(norm):
    norm = _norm(norm, torch.float32).eval()
    own = norm.forward
    assert replace_rms_norms(norm) == 0
    assert norm.forward == own


def test_a_qwen3_model_keeps_its_answers(monkeypatch):
    name = "apply_rotary_pos_emb"
    original = getattr(modeling_qwen3_moe, name)
    # On a GPU a runner of another test may have replaced it already.
    original = getattr(original, "_original", original)
    monkeypatch.setattr(modeling_qwen3_moe, name, original)  # undone after the test
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(_DEVICE).eval()
    ids = torch.tensor([[3, 9, 27, 31, 2]], device=_DEVICE)
    with torch.no_grad():
        before = model(ids).logits
        assert replace_rms_norms(model) == 2 * 4 + 1
        assert replace_rotary(model)
        assert getattr(modeling_qwen3_moe, name) is not original
        after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert replace_rotary(model), "a second time it is there already"
    # What the kernel does not cover: a fifth argument by place, dtypes that differ.
    q, k, angles = torch.rand(1, 5, 3, 16), torch.rand(1, 5, 2, 16), torch.rand(1, 5, 16)
    q, k, angles = (x.to(_DEVICE, torch.float16) for x in (q, k, angles))
    fused = getattr(modeling_qwen3_moe, name)
    for args in ((q, k, angles, angles, 2), (q.float(), k, angles, angles, 2)):
        for ours, theirs in zip(fused(*args), original(*args), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_other_rotations_stay(monkeypatch):
    """gpt-oss gives half as many angles; a family of interleaved pairs computes something else."""

    class Interleaved(nn.Linear):
        pass

    def interleaved(q, k, cos, sin):
        def turn(x):
            return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) * sin

        return turn(q), turn(k)

    model = Interleaved(2, 2).to(_DEVICE)
    assert not replace_rotary(model)
    for function in (modeling_gpt_oss.apply_rotary_pos_emb, interleaved):
        monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
        assert not replace_rotary(model)
        assert globals()["apply_rotary_pos_emb"] is function
