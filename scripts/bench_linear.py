#!/usr/bin/env python3
"""Time linear layers of a few rows as a model runs them, in CUDA graphs: cuBLASLt, and our kernels.

A graph is one product many times over, each time with other weights, of which there are more than
the L2 cache holds; the graphs of both are replayed in turns. Then all layers of the model, twice:
the products alone, and with norms and SwiGLU between them, whose time our kernels use to ask for
weights. --search tries other launch shapes for our kernel. Every output is checked.

Whatever its rows, a product reads its weights at least once, at no more than 4.8 TB/s on an H200.

Example:
    python scripts/bench_linear.py
    python scripts/bench_linear.py --search
    python scripts/bench_linear.py --search 2,4 --products o,down
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product as combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import OutOfResources

from nanospec.device import prefer_faster_products
from nanospec.models import layers_triton, linear_triton
from nanospec.models.linear_triton import LaunchShape

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance
from shapes import SHAPES

DTYPE = torch.bfloat16
SEED = 0
COPIES_BYTES = 300e6  # of the weights of one product, at least; the L2 cache has 50 MB
LAUNCHES = 24  # of a graph
REPLAYS = 9
TOLERANCE = 1e-2  # of |error| / |output|; rounding to 16 bits makes 0.002 to 0.003
SEARCH_SECONDS = 100.0
THREADS = 14  # that compile
LABEL = (
    "{kind} {padded_rows:>2} {block_outputs:>2}x{block_inputs:<4} {num_warps} {num_stages} {how}"
)

Run = Callable[[Tensor, Tensor], Tensor]  # of rows and weights


@dataclass(frozen=True)
class Product:
    """A linear layer of the model; `is_swiglu`: with SwiGLU after it."""

    name: str
    outputs: int
    inputs: int
    is_swiglu: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self.outputs * self.inputs * DTYPE.itemsize


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print tables, then one JSON line."""
    args = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("linear layers are timed on a GPU, and none is usable here")
    torch.manual_seed(SEED)
    prefer_faster_products()
    model = SHAPES[args.model][0]
    wanted = args.products.split(",") if args.products else None
    bench = Bench(model)
    found: dict[str, Any] = {"products": [], "layers": [], "search": []}
    print(f"{'':>14} {'T':>2} {'Lt us':>9} {'TB/s':>5} {'own us':>7} {'TB/s':>5}  launch shape")
    for product, num_rows in combinations(products_of(model), args.rows):
        if wanted is None or product.name in wanted:
            found["products"].append(row := bench_product(bench, product, num_rows))
            print_product(product, row)
    if wanted is None:
        for num_rows in args.rows:
            found["layers"].append(row := bench_layers(bench, num_rows))
            print(
                "{T:>2} rows, all layers, ms: products {products}, with norms {layers}".format(
                    **row
                )
            )
    if args.search:
        searched = [each for each in products_of(model) if each.is_swiglu or each.name != "gate_up"]
        searched = [each for each in searched if wanted is None or each.name in wanted]
        found["search"] = search(bench, searched, args.search)
    print(json.dumps(provenance() | {"seed": SEED, "model": args.model} | found))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def numbers(text: str) -> list[int]:
        found = [int(each) for each in text.split(",")]
        if not all(1 <= each <= linear_triton.MAX_ROWS for each in found):
            raise argparse.ArgumentTypeError(f"1 to {linear_triton.MAX_ROWS} rows are possible")
        return found

    parser.add_argument("--model", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--rows", type=numbers, default="1,2,4,7,8,12,16", help="T")
    parser.add_argument("--products", help="qkv,o,gate_up,gate_up+swiglu,down; default: all")
    parser.add_argument(
        "--search",
        type=numbers,
        nargs="?",
        const="1,2,4,8,16",
        help=f"try other launch shapes, for these rows; {SEARCH_SECONDS:.0f} s at most",
    )
    return parser.parse_args(argv)


def products_of(model: dict[str, Any]) -> list[Product]:
    """Return the products of a layer."""
    hidden, width = model["hidden_size"], 2 * model["intermediate_size"]
    heads = model["num_attention_heads"] * model["head_dim"]
    kv_heads = model["num_key_value_heads"] * model["head_dim"]
    return [
        Product("qkv", heads + 2 * kv_heads, hidden),
        Product("o", hidden, heads),
        Product("gate_up", width, hidden),
        Product("gate_up+swiglu", width, hidden, is_swiglu=True),
        Product("down", hidden, width // 2),
    ]


def cublas(product: Product) -> Run:
    """Return the product by cuBLASLt; SwiGLU is a kernel of ours after it."""
    return (lambda x, w: layers_triton.swiglu(F.linear(x, w))) if product.is_swiglu else F.linear


def own(product: Product, shape: LaunchShape | None = None) -> Run:
    """Return the product by our kernel, launched in a shape."""
    run = linear_triton.linear_swiglu if product.is_swiglu else linear_triton.linear
    return lambda x, w: run(x, w, shape)


class Bench:
    """What all measurements share: weights."""

    def __init__(self, model: dict[str, Any]):
        self.model = model
        self._weights: dict[tuple[int, int], list[Tensor]] = {}

    def rows(self, num_rows: int, width: int) -> Tensor:
        """Return random rows [T, width]."""
        return torch.randn(num_rows, width, dtype=DTYPE, device="cuda")

    def weights(self, product: Product) -> list[Tensor]:
        """Return copies of the weights, which differ and are too many for the cache."""
        size = (product.outputs, product.inputs)
        if size not in self._weights:
            count = max(3, -int(-COPIES_BYTES // product.num_bytes))
            self._weights[size] = [self.rows(*size) / size[1] ** 0.5 for _ in range(count)]
            torch.cuda.synchronize()  # weights may be read ahead of kernels that run
        return self._weights[size]

    def weight(self, product: Product, index: int) -> Tensor:
        """Return one of them, another than for the index before."""
        weights = self.weights(product)
        return weights[index % len(weights)]

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of what is run; it has run once before, so that nothing is compiled."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def times(
        self, product: Product, x: Tensor, runs: Sequence[Run], replays: int = REPLAYS
    ) -> list[float]:
        """Return microseconds of the product run by each, in turns; exit where one is wrong."""
        want = cublas(product)(x, self.weight(product, 0)).float()

        def all_launches(run: Run) -> None:
            for index in range(LAUNCHES):
                run(x, self.weight(product, index))

        graphs = []
        for run in runs:
            error = ((run(x, self.weight(product, 0)).float() - want).norm() / want.norm()).item()
            if not error < TOLERANCE:
                sys.exit(f"{product} is wrong by {error:.1e} for {len(x)} rows")
            graphs.append(self.capture(lambda run=run: all_launches(run)))
        return [each / LAUNCHES for each in in_turns(graphs, replays)]


def in_turns(graphs: Sequence[torch.cuda.CUDAGraph], replays: int = REPLAYS) -> list[float]:
    """Return microseconds of each graph, the median of replays."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays + 1):
        for graph, times in zip(graphs, found, strict=True):
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3)
    return [statistics.median(times[1:]) for times in found]


def bench_product(bench: Bench, product: Product, num_rows: int) -> dict[str, Any]:
    """Return what was measured of a product."""
    x = bench.rows(num_rows, product.inputs)
    theirs, ours = bench.times(product, x, [cublas(product), own(product)])
    shape = chosen_shape(product, num_rows)
    sizes = {"outputs": product.outputs, "inputs": product.inputs}
    measured = {"cublas_us": theirs, "own_us": ours, "shape": asdict(shape)}
    return {"product": product.name, "T": num_rows} | sizes | measured


def print_product(product: Product, row: dict[str, Any]) -> None:
    """Print a line of the table."""
    theirs, ours = row["cublas_us"], row["own_us"]
    rates = [product.num_bytes / us / 1e6 for us in (theirs, ours)]
    print(
        f"{product.name:>14} {row['T']:>2} {theirs:>9.2f} {rates[0]:>5.2f} {ours:>7.2f} "
        f"{rates[1]:>5.2f}  {label(LaunchShape(**row['shape']))}",
        flush=True,
    )


def chosen_shape(product: Product, num_rows: int) -> LaunchShape:
    """Return the shape that the model uses."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"outputs": product.outputs, "inputs": product.inputs}
    return linear_triton.launch_shape(num_rows=num_rows, num_sms=num_sms, **sizes)


def label(shape: LaunchShape) -> str:
    """Return a shape in short: kernel, rows, tile, warps, stages, and how it starts."""
    how = "early" if shape.overlaps else "not early"
    return LABEL.format(**asdict(shape), kind="dot" if shape.uses_dot else "fma", how=how)


def bench_layers(bench: Bench, num_rows: int) -> dict[str, Any]:
    """Return milliseconds of all layers by cuBLASLt and by our kernels, attention left out."""
    qkv, o, gate_up, fused, down = products_of(bench.model)
    hidden, eps = bench.model["hidden_size"], bench.model["rms_norm_eps"]
    x, heads = bench.rows(num_rows, hidden), bench.rows(num_rows, o.inputs)
    middle, norm = bench.rows(num_rows, down.inputs), bench.rows(1, hidden)[0]

    def products(by: Callable[[Product], Run]) -> None:
        for layer in range(bench.model["num_hidden_layers"]):
            for product, rows in ((qkv, x), (o, heads), (gate_up, x), (down, middle)):
                by(product)(rows, bench.weight(product, layer))

    def layers(by: Callable[[Product], Run]) -> None:
        stream, delta = x, None
        for layer in range(bench.model["num_hidden_layers"]):
            stream, normed = layers_triton.add_rms_norm(stream, delta, norm, eps)
            by(qkv)(normed, bench.weight(qkv, layer))
            delta = by(o)(heads, bench.weight(o, layer))
            stream, normed = layers_triton.add_rms_norm(stream, delta, norm, eps)
            delta = by(down)(
                by(fused)(normed, bench.weight(fused, layer)), bench.weight(down, layer)
            )

    row: dict[str, Any] = {"T": num_rows}
    for what in (products, layers):
        graphs = [bench.capture(lambda by=by, what=what: what(by)) for by in (cublas, own)]
        theirs, ours = in_turns(graphs)
        row[what.__name__] = {"cublas": round(theirs / 1e3, 3), "own": round(ours / 1e3, 3)}
    return row


def search(bench: Bench, products: Sequence[Product], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the best three launch shapes for each product and T, and print them."""
    start, found = time.monotonic(), []
    compile_all(bench, products, rows)
    print(f"best shapes; compiled in {time.monotonic() - start:.0f} s", flush=True)
    for num_rows, product in combinations(rows, products):
        if time.monotonic() - start > SEARCH_SECONDS:
            print(f"no time is left for {product.name}, {num_rows} rows", file=sys.stderr)
            continue
        x, tried = bench.rows(num_rows, product.inputs), []
        for shape in fitting(product, num_rows):
            try:
                us = bench.times(product, x, [own(product, shape)], replays=5)[0]
                tried.append((us, shape))
            except OutOfResources:
                continue
        tried.sort(key=lambda each: each[0])
        best = [{"us": us} | asdict(shape) for us, shape in tried[:3]]
        found.append({"product": product.name, "T": num_rows, "tried": len(tried), "best": best})
        print(f"{product.name:>14} {num_rows:>2}", flush=True)
        for us, shape in tried[:3]:
            print(f"{us:>20.2f} us  {label(shape)}", flush=True)
    print(f"searched for {time.monotonic() - start:.0f} s", flush=True)
    return found


def compile_all(bench: Bench, products: Sequence[Product], rows: Sequence[int]) -> None:
    """Compile what will be searched: a kernel knows its tiles, but not the size of the weights."""

    def once(product: Product, num_rows: int, shape: LaunchShape) -> None:
        try:
            own(product, shape)(bench.rows(num_rows, product.inputs), bench.weights(product)[0])
        except OutOfResources as problem:
            print(f"{label(shape)} is left out: {problem}", file=sys.stderr)

    jobs = {
        (shape, product.is_swiglu): (product, num_rows, shape)
        for num_rows, product in combinations(rows, products)
        for shape in fitting(product, num_rows)
    }
    for product in products:
        bench.weights(product)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: once(*job), jobs.values()))
    torch.cuda.synchronize()


def fitting(product: Product, num_rows: int) -> list[LaunchShape]:
    """Return the chosen shape, and others worth trying."""
    others = [
        shape
        for shape in (*dot_shapes(num_rows), *fma_shapes(num_rows))
        if product.outputs % shape.block_outputs == 0 and product.inputs % shape.block_inputs == 0
    ]
    return list(dict.fromkeys([chosen_shape(product, num_rows), *others]))


def dot_shapes(num_rows: int) -> Iterator[LaunchShape]:
    """Yield shapes for tensor cores, with 36 to 110 KiB of weights in flight per program."""
    if num_rows == 1:  # 11 % slower than without them, whatever the shape
        return
    tiles = combinations((16, 32, 64), (128, 256, 512), (2, 4, 8), (3, 4, 6))
    for outputs, inputs, warps, stages in tiles:
        size = outputs * inputs  # numbers of 2 bytes
        if size < 4096 or not 36 << 10 <= 2 * size * stages <= 110 << 10:
            continue
        if (outputs == 64 and warps != 4) or (warps == 8 and size < 16384):
            continue
        for rows in (8, 16) if num_rows == 8 else (8 if num_rows < 8 else 16,):
            shape = LaunchShape(
                uses_dot=True,
                padded_rows=rows,
                block_outputs=outputs,
                block_inputs=inputs,
                num_warps=warps,
                num_stages=stages,
            )
            yield shape
            yield replace(shape, overlaps=False)


def fma_shapes(num_rows: int) -> Iterator[LaunchShape]:
    """Yield shapes without tensor cores, with 16 to 64 sums per thread."""
    if num_rows not in (1, 2, 4):
        return
    tiles = combinations((2, 4, 8), (512, 1024, 2048), (2, 4, 8), (2, 4))
    for outputs, inputs, warps, stages in tiles:
        loads = outputs * inputs // (32 * warps)
        if loads >= 16 and 16 <= loads * num_rows <= 64:
            yield LaunchShape(  # without an early start all are slower by 1 us
                uses_dot=False,
                padded_rows=num_rows,
                block_outputs=outputs,
                block_inputs=inputs,
                num_warps=warps,
                num_stages=stages,
            )


if __name__ == "__main__":
    main()
