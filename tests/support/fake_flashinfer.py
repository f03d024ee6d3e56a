"""FlashInfer's entry points, computed with plain torch, and as strict about their arguments as the library is.

What is checked here was read in flashinfer-python 0.6.18 and 0.7.4, where checks are spread over Python, bindings and
kernels. Axes: B blocks, K key/value heads, S slots of a block, D head dimension, T tokens, H query heads, P positions.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.host_device import HostDevice

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


class FakeFlashInfer:
    """Stands in for the module `flashinfer`."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:
        return _Prefill(self, *args, **kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:
        return _Decode(self, *args, **kwargs)

    def silu_and_mul(self, input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._activate(input, out, torch.nn.functional.silu)

    def gelu_tanh_and_mul(self, input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._activate(input, out, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        assert is_neox and head_size in HEAD_DIMS and cos_sin_cache.dtype == torch.float32
        assert cos_sin_cache.is_contiguous() and positions.is_contiguous()
        assert positions.dtype in (torch.int32, torch.int64) and len(positions) == len(query) == len(key)
        assert query.dtype == key.dtype and query.dtype in DTYPES
        assert query.stride(-1) == key.stride(-1) == 1

        def kernel() -> None:
            cos_T1h, sin_T1h = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
            for heads in (query, key):
                heads_TYD = heads.view(len(heads), -1, head_size)
                low, high = heads_TYD.float().chunk(2, dim=-1)
                heads_TYD.copy_(torch.cat([low * cos_T1h - high * sin_T1h, high * cos_T1h + low * sin_T1h], dim=-1))

        self.device.launch(kernel)

    def _activate(self, input: torch.Tensor, out: torch.Tensor, function: Any) -> torch.Tensor:
        # The kernel takes rows to lie one after the other, whatever the strides say.
        assert input.is_contiguous() and out.is_contiguous() and len(input) == len(out) > 0
        assert input.shape[1] == 2 * out.shape[1] and input.dtype == out.dtype and input.dtype in DTYPES

        def kernel() -> None:
            gate, up = input.float().chunk(2, dim=-1)
            out.copy_(function(gate) * up)

        self.device.launch(kernel)
        return out


class _Wrapper:
    """What both wrappers share: the plan, and attention by what it says."""

    def __init__(self, library: FakeFlashInfer, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and workspace.dim() == 1 and not workspace[:4096].any()
        assert kv_layout == "HND" and backend == "fa2"
        self._library = library
        self._planned: dict[str, Any] | None = None
        self._schedule = torch.empty(0)

    def _plan(
        self,
        query_starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        library = self._library
        assert not library.device.is_recording, "a plan cannot be recorded"
        for tensor in (query_starts, indptr, indices, last_page_len):
            # A plan reads them on the host: on the device they would cost a wait.
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        num_sequences = len(last_page_len)
        assert len(indptr) == len(query_starts) == num_sequences + 1
        assert indptr[0] == query_starts[0] == 0 and indptr[-1] == len(indices)
        assert (indptr.diff() > 0).all() and (query_starts.diff() > 0).all()
        assert (last_page_len >= 1).all() and (last_page_len <= page_size).all()
        assert num_qo_heads % num_kv_heads == 0 and head_dim in HEAD_DIMS and window_left >= -1
        assert q_data_type == kv_data_type and q_data_type in DTYPES
        self._planned = {
            "shape": (int(query_starts[-1]), num_qo_heads, head_dim),
            "page": (num_kv_heads, page_size, head_dim),
            "window_left": window_left,
            "sm_scale": sm_scale,
            "dtype": q_data_type,
        }
        # The schedule that the kernel follows is made here and copied to where it stays; tables alone are not enough.
        self._schedule = torch.cat([query_starts, indptr, last_page_len])
        library.device.queue_copy()

    def _run(self, q: torch.Tensor, paged_kv_cache: Any, out: torch.Tensor, tables: Any) -> torch.Tensor:
        planned = self._planned
        assert planned is not None, "run before plan"
        k, v = paged_kv_cache
        assert q.dtype == k.dtype == v.dtype == out.dtype == planned["dtype"]
        assert q.shape == out.shape == planned["shape"] and q.stride(-1) == 1 and out.is_contiguous()
        assert k.shape == v.shape and k.shape[1:] == planned["page"]
        assert k.stride() == v.stride() and k.stride(-1) == 1

        def kernel() -> None:
            query_starts, indptr, _indices, last_page_len = tables
            schedule = torch.cat([query_starts, indptr, last_page_len])
            assert torch.equal(schedule, self._schedule), "the tables are not those that were planned for"
            _attend(q, k, v, out, *tables, planned)

        self._library.device.launch(kernel)
        return out


class _Prefill(_Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper, without CUDA graphs."""

    def __init__(
        self, library: FakeFlashInfer, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str
    ) -> None:
        super().__init__(library, float_workspace_buffer, kv_layout, backend)
        self._tables: tuple[torch.Tensor, ...] = ()

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *sizes: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        self._tables = tuple(
            tensor.clone() for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        )
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **options)

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        assert not self._library.device.is_recording, "this wrapper's tables are not at fixed addresses"
        return self._run(q, paged_kv_cache, out, self._tables)


class _Decode(_Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper, in its mode for CUDA graphs."""

    def __init__(
        self,
        library: FakeFlashInfer,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor,
        paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
        backend: str,
    ) -> None:
        super().__init__(library, float_workspace_buffer, kv_layout, backend)
        # Without tensor cores only some numbers of query heads a key/value head have a kernel.
        assert use_cuda_graph and use_tensor_cores
        self._batch_size = len(paged_kv_last_page_len_buffer)
        assert len(paged_kv_indptr_buffer) == self._batch_size + 1
        query_starts = torch.arange(self._batch_size + 1, dtype=torch.int32)
        self._tables = (
            query_starts,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert all(table.dtype == torch.int32 for table in self._tables)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *sizes: int, **options: Any
    ) -> None:
        assert len(last_page_len) == self._batch_size, "the batch size is fixed"
        self._plan(self._tables[0], indptr, indices, last_page_len, *sizes, **options)
        _, indptr_buffer, indices_buffer, last_page_len_buffer = self._tables
        assert len(indices) <= len(indices_buffer)
        indptr_buffer.copy_(indptr)
        indices_buffer[: len(indices)] = indices
        last_page_len_buffer.copy_(last_page_len)

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        return self._run(q, paged_kv_cache, out, self._tables)


def _attend(
    q_THD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    out_THD: torch.Tensor,
    query_starts: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    planned: dict[str, Any],
) -> None:
    page_size = k_BKSD.shape[2]
    for sequence in range(len(last_page_len)):
        begin, end = query_starts[sequence : sequence + 2].tolist()
        pages = indices[int(indptr[sequence]) : int(indptr[sequence + 1])].long()
        num_positions = (len(pages) - 1) * page_size + int(last_page_len[sequence])
        k_KPD, v_KPD = (x[pages].transpose(0, 1).flatten(1, 2)[:, :num_positions].float() for x in (k_BKSD, v_BKSD))
        group = q_THD.shape[1] // len(k_KPD)
        q_HTD = q_THD[begin:end].transpose(0, 1).float()
        scores_HTP = q_HTD @ k_KPD.repeat_interleave(group, 0).transpose(1, 2) * planned["sm_scale"]
        query_positions = torch.arange(num_positions - (end - begin), num_positions).unsqueeze(1)
        distance_TP = query_positions - torch.arange(num_positions)
        hidden_TP = distance_TP < 0
        if planned["window_left"] >= 0:
            hidden_TP |= distance_TP > planned["window_left"]
        weights_HTP = scores_HTP.masked_fill(hidden_TP, float("-inf")).softmax(dim=-1)
        out_THD[begin:end] = (weights_HTP @ v_KPD.repeat_interleave(group, 0)).transpose(0, 1)
