"""Ops of a vision tower: layer norm with a bias, GELU, attention in which all see all.

The book's ops do the rest of a tower: `linear`, `apply_rope`. Attention is asked for through
`kernels.flash_attn_varlen(causal=False)`, which comes here on a CPU.
"""
