"""The functions of liger-kernel 0.8.5 that the package calls, with their arguments, as formulas for any device."""

from types import ModuleType

import torch


class LigerRMSNormFunction:
    @staticmethod
    def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        wide = X.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(X.dtype) * W


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        return torch.nn.functional.silu(a) * b


class LigerRopeFunction:
    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        """q (1, heads, tokens, size), k likewise, cos and sin (1, tokens, size)."""
        assert q.shape[0] == k.shape[0] == cos.shape[0] == 1
        assert q.shape[2:] == k.shape[2:] == cos.shape[1:] == sin.shape[1:]

        def turned(heads):
            first, second = heads.chunk(2, dim=-1)
            return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

        return turned(q), turned(k)


def ops() -> ModuleType:
    """A module in place of `liger_kernel.ops`."""
    module = ModuleType("liger_kernel.ops")
    for function in (LigerRMSNormFunction, LigerSiLUMulFunction, LigerRopeFunction):
        setattr(module, function.__name__, function)
    return module
