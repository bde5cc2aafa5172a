#!/usr/bin/env python3
"""Time a layer of paged attention as a model runs it: in a CUDA graph, between GEMMs.

A graph is 24 layers of [GEMM that streams 67 MB of weights; attention over this layer's own keys],
less a graph of the GEMMs alone: back to back, attention could find its keys in the L2 cache. The
shape is what `launch_shape` chooses; --search tries others too. Beside it run FlashInfer's fa2, as
its `plan` for graphs has it, and FlashAttention 3; what cannot be loaded is left out. Samples of
every output are checked against torch.

Whatever its rows, a layer reads the keys and values of its requests at least once: 4 * Hkv * D
bytes a token, at no more than 4.8 TB/s on an H200.

Example:
    python scripts/bench_attention.py
    python scripts/bench_attention.py --search --rows 8,ragged --contexts 384 --batches 8
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import OutOfResources

from nanospec.attention import launch, paged_triton
from nanospec.attention.backend import create_attention
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.launch import LaunchShape
from nanospec.attention.triton_backend import HEAD_DIMS
from nanospec.errors import BackendUnavailableError

try:
    import flashinfer
except ImportError:
    flashinfer = None

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance

DTYPE = torch.bfloat16
SEED = 0
LAYERS = 24
GEMM = (16, 4096, 8192)  # rows, inner, outer
CACHE_BYTES = 40e9  # of all layers; where that is too little, layers share their keys
RAGGED = 8  # most rows of a segment in ragged cases
TOLERANCE = 1e-2  # of |error| / |output|; rounding to 16 bits makes 0.002 to 0.003
STEPS = ((16, 2, 3), (16, 2, 4), (32, 2, 3), (32, 4, 4), (64, 4, 3))  # keys, warps, stages tried
LABEL = "{block_rows}x{block_keys} {num_splits} {num_warps} {num_stages}"

# What a forward does once, and what it does in a layer.
Contender = tuple[Callable[[], object], Callable[[int], object]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print a table, then one JSON line."""
    args = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("attention is timed on a GPU, and none is usable here")
    if flashinfer is None:
        print("FlashInfer cannot be imported and is left out", file=sys.stderr)
    bench = Bench(args)
    print(
        f"{'rows':>6} {'context':>7} {'batch':>5} {'us/layer':>8} {'TB/s':>5} {'best':>8} "
        f"{'FlashInfer':>10} {'Flash 3':>7}  rows x keys, splits, warps, stages: chosen; best"
    )
    found = []
    for batch, context, rows in product(args.batches, args.contexts, args.rows.split(",")):
        row = bench_case(bench, Case(bench, rows, context, batch))
        us, best = row["chosen"]["us"], row["best"]
        others = [row[name].get("us") for name in ("flashinfer_fa2", "flash3")]
        fa2_us, flash3_us = ("-" if each is None else f"{each:.1f}" for each in others)
        print(
            f"{rows:>6} {context:>7} {batch:>5} {us:>8.1f} {row['kv_bytes'] / us / 1e6:>5.2f} "
            f"{best['us']:>8.1f} {fa2_us:>10} {flash3_us:>7}  "
            f"{LABEL.format(**row['chosen'])}; {LABEL.format(**best)}",
            flush=True,
        )
        found.append({"rows": rows, "context": context, "batch": batch} | row)
    gemms = {"layers": LAYERS, "gemms_us": bench.gemms_us, "gemms_again_us": bench.time()}
    print(json.dumps(provenance() | {"seed": SEED} | gemms | {"rows": found}))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser.add_argument("--rows", default="1,8,ragged", help="of a segment; ragged: 1 to 8")
    parser.add_argument("--contexts", type=numbers, default="384,2048,8192", help="tokens before")
    parser.add_argument("--batches", type=numbers, default="1,8,32,128,256", help="requests")
    parser.add_argument("--heads", type=int, default=32, help="query heads; default: Qwen3-8B's")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128, choices=HEAD_DIMS)
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--search", action="store_true", help="try other launch shapes too")
    args = parser.parse_args(argv)
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    return args


class Bench:
    """What all cases share: options, memory for keys and values, GEMMs between the layers."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        torch.manual_seed(SEED)
        size = int(min(CACHE_BYTES, torch.cuda.mem_get_info()[0] / 2)) // 4
        self.keys, self.values = filled(size), filled(size)
        rows, inner, outer = GEMM
        self._x, self._weights = filled(rows, inner), filled(LAYERS, inner, outer)
        self._y = self._x @ self._weights[0]  # a capture must not make cuBLAS's handle
        self.gemms_us = self.time()
        self.has_flash3 = True
        sizes = {"num_layers": 1, "num_pages": 1, "page_size": args.page_size}
        sizes |= {"num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
        try:
            cache = PagedKVCache(**sizes, dtype=DTYPE, device=self.keys.device)
            create_attention("flash3", cache, args.heads)
        except BackendUnavailableError as problem:
            self.has_flash3 = False
            print(f"FlashAttention 3 is left out: {problem}", file=sys.stderr)

    def measure(self, case: "Case", contender: Contender) -> dict[str, float]:
        """Return microseconds per layer, and the error; exit where it is more than rounding."""
        case.out.fill_(float("nan"))
        total = self.time(contender)
        error = case.worst_error()
        if not error < TOLERANCE:
            sys.exit(f"wrong by {error:.1e}: rows {case.qo_lens}, keys {case.kv_lens.tolist()}")
        return {"us": (total - self.gemms_us) / LAYERS, "error": error}

    def time(self, contender: Contender = (lambda: None, lambda index: None)) -> float:
        """Return microseconds per replay of all layers, the median; of GEMMs alone by default."""
        begin, attend = contender
        begin()
        attend(0)  # compiles, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            begin()
            for index in range(LAYERS):
                torch.mm(self._x, self._weights[index], out=self._y)
                attend(index)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def once() -> float:
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) * 1e3

        once()
        num_replays = int(min(50, max(5, 80e3 / once())))
        return statistics.median(once() for _ in range(num_replays))


def filled(*shape: int) -> Tensor:
    """Return random numbers, drawn in parts: so many need more than 32 bits of index."""
    numbers = torch.empty(shape, dtype=DTYPE, device="cuda")
    for part in numbers.view(-1).split(1 << 28):
        part.normal_()
    return numbers


class Case:
    """A batch whose pages lie scattered over the cache, in the same places in every layer."""

    def __init__(self, bench: Bench, rows: str, context: int, num_reqs: int):
        args, generator = bench.args, torch.Generator().manual_seed(num_reqs + context)
        self.max_rows = RAGGED if rows == "ragged" else int(rows)  # as the host of a graph knows it
        qo_lens = torch.full((num_reqs,), self.max_rows)
        if rows == "ragged":
            qo_lens = torch.randint(1, RAGGED + 1, (num_reqs,), generator=generator)
            qo_lens[num_reqs // 2] = RAGGED if num_reqs > 1 else 5
        self.qo_lens = qo_lens.tolist()
        self.qo_indptr = F.pad(qo_lens.cumsum(0), (1, 0)).int()  # [R + 1] int32 host
        self.kv_lens = (qo_lens + context).int()  # [R] int32 host
        page = (args.page_size, args.kv_heads, args.head_dim)
        width = -(-int(self.kv_lens.max()) // args.page_size)
        pages = torch.randperm(num_reqs * width, generator=generator).int()
        self.page_tables = pages.view(num_reqs, width).cuda()
        # [T, Hq, D], not contiguous: in the model, queries are a part of what one GEMM makes.
        qkv = filled(sum(self.qo_lens), args.heads + 2 * args.kv_heads, args.head_dim)
        self.q = qkv[:, : args.heads]
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        size = len(pages) * args.page_size * args.kv_heads * args.head_dim
        self.num_layers = min(LAYERS, len(bench.keys) // size)  # with keys of their own
        if self.num_layers == 0:
            sys.exit(f"the keys of {num_reqs} x {context} tokens do not fit; take fewer")
        self._keys, self._values = (
            each[: self.num_layers * size].view(self.num_layers, len(pages), *page)
            for each in (bench.keys, bench.values)
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, [pages, page size, Hkv, D]."""
        return self._keys[index % self.num_layers], self._values[index % self.num_layers]

    def cache(self) -> PagedKVCache:
        """Return the keys and values of all layers."""
        page_size, num_kv_heads, head_dim = self.layer(0)[0].shape[1:]
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        device = self._keys.device
        cache = PagedKVCache(num_layers=1, num_pages=1, **sizes, dtype=DTYPE, device=device)
        cache.k, cache.v = self._keys.flatten(1, 2), self._values.flatten(1, 2)
        return cache

    def worst_error(self) -> float:
        """Return |error| / |output| of the last layer, which replays leave; of three segments."""
        found = []
        for index in sorted({0, len(self.qo_lens) // 2, len(self.qo_lens) - 1}):
            rows = slice(*self.qo_indptr[index : index + 2].tolist())
            q, kv_len = self.q[rows].float().transpose(0, 1), int(self.kv_lens[index])
            k, v = (
                each[self.page_tables[index]].flatten(0, 1)[:kv_len].float().transpose(0, 1)
                for each in self.layer(LAYERS - 1)
            )
            mask = q.new_ones(q.shape[1], kv_len).tril(kv_len - q.shape[1]).bool()
            want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)
            found.append((self.out[rows].float() - want).norm() / want.norm())
        return torch.stack(found).max().item()  # NaN where one is


def paged(case: Case, shape: LaunchShape) -> Contender:
    """Return nanospec's kernel."""
    num_rows, num_heads, head_dim = case.q.shape
    num_tiles = launch.num_tiles(num_rows, len(case.qo_lens), shape.block_rows)
    tiles = case.page_tables.new_empty(paged_triton.TILE_FIELDS, num_tiles)
    sizes = {"num_rows": num_rows, "num_heads": num_heads, "head_dim": head_dim}
    size = launch.scratch_size(**sizes, num_splits=shape.num_splits)
    indptr, kv_lens = case.qo_indptr.to(tiles.device), case.kv_lens.to(tiles.device)
    segments = {"qo_indptr": indptr, "kv_lens": kv_lens, "block_rows": shape.block_rows}
    batch = {"tiles": tiles, "qo_indptr": indptr, "page_tables": case.page_tables, "words": None}
    batch |= {"is_full": False, "scratch": case.q.new_empty(size, dtype=torch.float32)}

    def attend(index: int) -> None:
        k, v = case.layer(index)
        own = (case.q, k.flatten(0, 1), v.flatten(0, 1), case.out)
        paged_triton.paged_attention(*own, page_size=k.shape[1], shape=shape, **batch)

    return lambda: paged_triton.tile_segments(tiles, **segments), attend


def fa2(case: Case) -> Contender:
    """Return FlashInfer's kernel, whose plan is made here, on the host, before the graph."""
    page_size, num_kv_heads, head_dim = case.layer(0)[0].shape[1:]
    num_pages = (case.kv_lens + page_size - 1) // page_size
    tables = zip(case.page_tables, num_pages.tolist(), strict=True)
    pages = torch.cat([table[:count] for table, count in tables])
    kv_indptr = F.pad(num_pages.cumsum(0), (1, 0)).int()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 30, dtype=torch.uint8, device=pages.device),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros_like(kv_indptr, device=pages.device),
        paged_kv_indptr_buf=torch.zeros_like(kv_indptr, device=pages.device),
        paged_kv_indices_buf=torch.zeros_like(pages),
        paged_kv_last_page_len_buf=torch.zeros_like(num_pages, device=pages.device),
        backend="fa2",
    )
    lens = (case.qo_indptr, kv_indptr, pages, (case.kv_lens - 1) % page_size + 1)
    sizes = (case.q.shape[1], num_kv_heads, head_dim, page_size)
    wrapper.plan(*lens, *sizes, causal=True, q_data_type=DTYPE)
    q = case.q.contiguous()
    return lambda: None, lambda index: wrapper.run(q, case.layer(index), out=case.out)


def flash3(case: Case) -> Contender:
    """Return FlashAttention 3, through the backend that calls it."""
    cache = case.cache()
    attention = create_attention("flash3", cache, case.q.shape[1])
    device, num_rows = case.q.device, len(case.q)
    positions = torch.arange(num_rows, device=device)
    batch = ForwardBatch(
        token_ids=positions,
        positions=positions,
        slots=positions,
        qo_indptr=case.qo_indptr.to(device),
        kv_lens=case.kv_lens.to(device),
        page_tables=case.page_tables,
        logit_rows=positions[:0],
        max_rows=case.max_rows,
    )

    def attend(index: int) -> None:
        case.out = attention._read(index % case.num_layers, case.q)

    return lambda: attention.begin(batch), attend


def bench_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Return what was measured of a case."""
    args, num_rows = bench.args, len(case.q)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    heads = {"num_heads": args.heads, "num_kv_heads": args.kv_heads, "num_sms": num_sms}
    rows = {"num_rows": num_rows, "num_reqs": len(case.qo_lens), "max_rows": case.max_rows}
    chosen = launch.launch_shape(**rows, **heads)
    tried = {chosen: bench.measure(case, paged(case, chosen))}
    for shape in variants(chosen, tried, args.heads // args.kv_heads, case) if args.search else ():
        try:
            tried[shape] = tried.get(shape) or bench.measure(case, paged(case, shape))
        except OutOfResources as problem:
            print(f"{LABEL.format(**asdict(shape))} is left out: {problem}", file=sys.stderr)
    shapes = [asdict(shape) | own for shape, own in tried.items()]
    return {
        "num_rows": num_rows,
        "layers_with_own_keys": case.num_layers,
        "kv_bytes": int(case.kv_lens.sum()) * 4 * args.kv_heads * args.head_dim,
        "chosen": shapes[0],
        "best": min(shapes, key=lambda shape: shape["us"]),
        "shapes": shapes,
        "flashinfer_fa2": bench.measure(case, fa2(case)) if flashinfer else {},
        "flash3": bench.measure(case, flash3(case)) if bench.has_flash3 else {},
    }


def variants(
    chosen: LaunchShape, tried: dict[LaunchShape, dict[str, float]], group: int, case: Case
) -> Iterator[LaunchShape]:
    """Yield other steps and splits together, then other tiles of the best `tried` so far."""
    for splits in sorted({max(chosen.num_splits // 2, 1), chosen.num_splits}):
        for keys, warps, stages in STEPS:
            yield replace(
                chosen, block_keys=keys, num_warps=warps, num_stages=stages, num_splits=splits
            )
    best = min(tried, key=lambda shape: tried[shape]["us"])
    if case.max_rows > 1:  # 16 and 64 rows with the group's heads
        yield replace(best, block_rows=max(1, 16 // group))
        yield replace(best, block_rows=max(best.block_rows, 64 // group), num_warps=4)


if __name__ == "__main__":
    main()
