"""C++ that writes keys and values into a cache for one layer (`cpp/rows.h`), where the decoder does
not do so for all of them. The conventions are those of ops.py.
"""

from torch import Tensor

from kernels.cpp.ops import dense_rows, function, has_key_runs


def store_kv(
    k_cache: Tensor, v_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, rows_T: Tensor, head_rows: int
) -> None:
    """Head h of token t to row rows[t] + h · head_rows of the caches, seen as rows of D. int64
    rows. Keys may lie in runs."""
    k, v = dense_rows(k_TKD), dense_rows(v_TKD)
    function("store_kv", k.dtype)(
        k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr(), rows_T.data_ptr(),
        *k.shape, k.stride(0), v.stride(0), head_rows, has_key_runs(k_cache),
    )  # fmt: skip
