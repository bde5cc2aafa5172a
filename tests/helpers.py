"""Builders of what many tests need: tiny checkpoints, engines, requests and scripted targets."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from nanospec import LLM, SamplingParams
from nanospec.attention.batch import ForwardBatch, build_batch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.kv_ops import move_kv
from nanospec.attention.mask import pack_words
from nanospec.config import EngineConfig, ModelConfig
from nanospec.cudagraph.runner import ModelRunner, TargetOutput
from nanospec.engine.pages import PageAllocator
from nanospec.engine.round import RoundContext, speculative_round
from nanospec.engine.scheduler import Scheduler
from nanospec.spec.speculator import NoSpeculator, Speculator, SpeculatorSetup
from nanospec.text import TextStream, read_json
from nanospec.types import Request, VerifyPlan

TEXT = "the user is a friend of the owl and the owl said so: 12 + 34 = 46, isn't it? Ünïcödé 🦉!"
VOCAB_SIZE = 320
EOS = 1  # "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE: every byte, a few merges, some special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def make_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a tiny random checkpoint with transformers; weights large enough to avoid near-ties."""
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    if family == "qwen3":
        shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        config = transformers.Qwen3Config(
            **(common | shape | {"tie_word_embeddings": True} | overrides)
        )
        model = transformers.Qwen3ForCausalLM
    else:
        shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
        config = transformers.LlamaConfig(
            **(common | shape | {"tie_word_embeddings": False} | overrides)
        )
        model = transformers.LlamaForCausalLM
    torch.manual_seed(0)
    reference = model(config).float()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    reference.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "eos_token": "<|end|>",
        "bos_token": "<|start|>",
        "chat_template": TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    return folder


def make_drafter(
    folder: Path, target: Path, *, taught: Sequence[Sequence[int]] = (), **overrides: Any
) -> Path:
    """Write a tiny random DSpark drafter in the released layout; near-ties are rare.

    Args:
        folder: to write; it need not exist.
        target: a checkpoint of `make_checkpoint`, whose embedding and head are copied.
        taught: sequences whose next tokens the Markov head finds likely, so that some are accepted.
        overrides: fields of the config.
    """
    own = read_json(target / "config.json")
    shared = ("vocab_size", "hidden_size")
    config = {name: own[name] for name in shared} | {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": "float32",
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_target_layers": own["num_hidden_layers"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "block_size": 7,
        "mask_token_id": own["vocab_size"] - 1,
        "target_layer_ids": [0, 1],
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config |= overrides
    generator = torch.Generator().manual_seed(0)
    rank = max(config["markov_rank"], 1)
    scales = {"markov_w1": 1.0, "markov_w2": 2.0 * rank**-0.5, "joint_proj": 0.4}
    tensors = {}
    for name, shape in drafter_shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "norm" in name
        scale = scales.get(name.split(".")[-2], 0.2)
        tensors[name] = 0.5 + drawn.abs() if is_norm else scale * drawn
    stored = load_file(target / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = embedding.clone()
    tensors["lm_head.weight"] = stored.get("lm_head.weight", embedding).clone()
    for before, after in sorted({pair for each in taught for pair in itertools.pairwise(each)}):
        code = tensors["markov_head.markov_w1.weight"][before]
        tensors["markov_head.markov_w2.weight"][after] += 12.0 * code / rank
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a released drafter of this config stores, and their shapes."""
    vocab, width, rank = config["vocab_size"], config["hidden_size"], config["markov_rank"]
    dim, inner = config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "fc.weight": (width, len(config["target_layer_ids"]) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (vocab, rank)
    kind = config["markov_head_type"].lower() if rank else ""
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config["enable_confidence_head"]:
        seen = rank if config["confidence_head_with_markov"] else 0
        shapes["confidence_head.proj.weight"] = (1, width + seen)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def perturbed(source: Path, folder: Path, noise: float) -> Path:
    """Write a copy of a checkpoint with noise, relative to each matrix's deviation, on it."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + noise * tensor.std() * drawn
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    import json

    path.write_text(json.dumps(value))


def load_reference(folder: Path) -> Any:
    """Return transformers' model of a folder, float32, eager attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits [len(tokens), V] of one forward."""
    return model(torch.tensor([list(tokens)])).logits[0]


@torch.inference_mode()
def reference_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' greedy continuation, without stopping at eos."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_llm(folder: Path, *, num_pages: int | None = None, **options: Any) -> LLM:
    """Build an fp32 CPU engine, with just so many KV pages if a number is given."""
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256} | options
    llm = LLM(str(folder), **options)
    if num_pages is None:
        return llm
    drafter = llm.engine.speculator.cache_layers()
    models = [llm.engine.model_config] + ([] if drafter is None else [drafter])
    page = sum(2 * each.num_layers * each.num_kv_heads * each.head_dim * 4 for each in models)
    page *= options.get("page_size", 16)
    return LLM(str(folder), kv_cache_gib=(num_pages + 0.5) * page / 2**30, **options)


def random_prompts(count: int, *, seed: int, longest: int = 40) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(5, VOCAB_SIZE - 20, (length,), generator=generator).tolist()
        for length in lengths
    ]


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    """Return greedy parameters that do not end early, unless the options say so."""
    return SamplingParams(
        **({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)
    )


def token_ids(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    """Return the output token ids of prompts run together."""
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def make_request(tokens: Sequence[int], params: SamplingParams | None = None, **values: Any) -> Any:
    """Return a request outside any engine."""
    options: dict[str, Any] = {
        "request_id": 0,
        "seed": 0,
        "stop_token_ids": frozenset(),
        "max_len": 10_000,
        "text": TextStream(None),
    }
    return Request(
        prompt_token_ids=list(tokens), params=params or SamplingParams(), **(options | values)
    )


def model_config(vocab_size: int = VOCAB_SIZE) -> ModelConfig:
    """Return the shape of a model of one tiny layer, for engines without one."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    return ModelConfig.from_hf(shape)


def make_context(
    runner: ModelRunner,
    kind: type[Speculator] = NoSpeculator,
    *,
    num_pages: int = 64,
    page_size: int = 4,
    vocab_size: int = VOCAB_SIZE,
    prefix_caching: bool = True,
    **options: Any,
) -> RoundContext:
    """Return what rounds need, with a runner in place of a model."""
    config = EngineConfig(model="none", **({"max_num_seqs": 1024} | options))
    setup = SpeculatorSetup(config, model_config(vocab_size), torch.float32, torch.device("cpu"))
    speculator = kind(setup)
    return RoundContext(
        speculator=speculator,
        runner=runner,
        scheduler=Scheduler(
            PageAllocator(num_pages, page_size, prefix_caching=prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.forward_rows(speculator.effective.max_rows),
            admit_limit=speculator.admit_limit,
        ),
        caches=[new_cache(num_pages + 1, page_size)],
        move_kv=move_kv,
    )


def run_to_end(ctx: RoundContext) -> None:
    """Run rounds until nothing is left; then every page must be free."""
    while ctx.scheduler.has_work:
        speculative_round(ctx, ctx.scheduler.schedule())
    assert ctx.scheduler.pages.num_free == ctx.scheduler.pages.num_pages


class ScriptedRunner:
    """A target whose next token after position p is `script[p + 1]`, whatever it is given."""

    def __init__(self, script: Sequence[int], vocab_size: int = VOCAB_SIZE):
        self._script = torch.tensor(list(script))
        self._vocab_size = vocab_size

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """See `ModelRunner.buffers`."""
        return None

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """See `ModelRunner.run`."""
        following = self._script[batch.positions[batch.logit_rows] + 1]
        logits = torch.full((len(following), self._vocab_size), -4.0)
        return TargetOutput(logits.scatter(1, following[:, None], 4.0), batch.num_tokens)


def new_cache(num_pages: int = 64, page_size: int = 4, **options: Any) -> PagedKVCache:
    """Return a small fp32 cache filled with noise, as a used one would be."""
    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
    cache = PagedKVCache(
        num_pages=num_pages,
        page_size=page_size,
        **({"dtype": torch.float32, "device": torch.device("cpu")} | shape | options),
    )
    generator = torch.Generator(cache.k.device).manual_seed(0)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)
    return cache


def plan_to(plan: VerifyPlan, device: torch.device) -> VerifyPlan:
    """Return a plan with its tensors on a device."""
    tensors = {
        each.name: getattr(plan, each.name).to(device)
        for each in dataclasses.fields(plan)
        if isinstance(getattr(plan, each.name), Tensor)
    }
    return dataclasses.replace(plan, **tensors)


def random_batch(
    seed: int,
    cache: PagedKVCache,
    *,
    num_plain: int,
    num_masked: int = 0,
    is_full: bool = False,
) -> ForwardBatch:
    """Return segments of 0 to 9 rows after contexts of 0 to 40 tokens, on shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    device = cache.k.device
    free = torch.randperm(cache.num_pages - 1, generator=generator).tolist()  # the last is scratch
    qo_lens, kv_lens, tables, slots, words = [], [], [], [], []
    for index in range(num_plain + num_masked):
        qo_len, context = (int(torch.randint(high, (1,), generator=generator)) for high in (10, 41))
        kv_len = context + qo_len
        pages = [free.pop() for _ in range(-(-kv_len // cache.page_size))]
        qo_lens.append(qo_len)
        kv_lens.append(kv_len)
        tables.append(pages)
        slots += [
            pages[position // cache.page_size] * cache.page_size + position % cache.page_size
            for position in range(context, kv_len)
        ]
        if index >= num_plain:
            seen = torch.rand(qo_len, qo_len, generator=generator) < 0.5
            words.append(seen.tril())
    num_tokens = sum(qo_lens)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    plain_rows = torch.zeros(sum(qo_lens[:num_plain]), dtype=torch.int64)
    return build_batch(
        zeros,
        zeros,
        torch.tensor(slots, dtype=torch.int64, device=device),
        qo_lens,
        kv_lens,
        tables,
        zeros[:0],
        is_full=is_full,
        num_masked=num_masked,
        words=torch.cat([plain_rows, *map(pack_words, words)]).to(device) if words else None,
    )
