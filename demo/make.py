"""Make the demo model: train the tokenizer and the weights from the text in this folder.

    python demo/make.py                # writes demo/model: minutes on a GPU, under two hours on two CPU cores
    python demo/evaluate.py            # measures the answers to phrasings that training never saw

All text comes from `facts/*.toml` and the small grammars beside them; nothing is downloaded.
Runs are seeded; on one machine and one thread count a CPU run repeats exactly.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.demo.batches import batches
from penstock.demo.chatml import END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from penstock.demo.facts import topics
from penstock.demo.tokenizer import train_tokenizer
from penstock.gpu_worker.devices.cpu import computes_in_bf16

MODEL_DIR = Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and in what portions to train."""

    num_tokens: int  # in all
    rows: int  # per batch
    length: int  # tokens per row
    learning_rate: float
    stressed_topics: tuple[str, ...] = ()  # half of the questions about facts are about these


RECIPES = {
    "cuda": Recipe(num_tokens=120_000_000, rows=32, length=1024, learning_rate=2e-3),
    "cpu": Recipe(num_tokens=14_000_000, rows=16, length=512, learning_rate=2e-3),
}


def model_config(vocab_size: int) -> LlamaConfig:
    """The architecture: a small Llama with grouped-query attention and tied embeddings, about 6 M parameters."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
    )


def new_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """The model with random weights, fp32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(model_config(vocab_size))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    device: torch.device,
    seed: int,
    compiled: bool,
) -> None:
    """Train the fp32 model in place with AdamW, a short warm-up and a cosine to zero."""
    torch.nn.Module.to(model, device)
    model.train()
    trunk = torch.compile(model.model) if compiled else model.model
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    per_step = recipe.rows * recipe.length
    num_steps = max(1, math.ceil(recipe.num_tokens / per_step))
    source = batches(tokenizer, seed, recipe.rows, recipe.length, recipe.stressed_topics)
    in_bf16 = device.type == "cuda" or computes_in_bf16()
    bar = tqdm(total=num_steps * per_step, unit="tok", unit_scale=True, desc="training", mininterval=1.0)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(step, num_steps)
        ids, labels = next(source).to(device, non_blocking=True)
        targets = labels[:, 1:]
        learned = targets != -100
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
            hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][learned])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update(per_step)
        if step % 20 == 0 or step == num_steps - 1:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    bar.close()
    model.train(False)


def schedule(step: int, num_steps: int) -> float:
    """Share of the full learning rate at a step: linear warm-up over 3 %, then half a cosine."""
    warm_up = max(1, int(0.03 * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint folder in bf16, as transformers does, with its sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, "cpu", torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.eos_token_id = [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    model.generation_config.pad_token_id = SPECIAL_TOKENS.index(END_OF_TEXT)
    # Nearly greedy: facts come out as learned, stories still differ from one another.
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.3
    model.generation_config.top_p = 0.9
    model.save_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # where it was loaded from is nobody's business
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="checkpoint folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", choices=tuple(RECIPES), help="default: the device's own")
    parser.add_argument("--tokens", type=int, help="train on this many tokens instead of the recipe's number")
    parser.add_argument("--rows", type=int, help="rows per batch instead of the recipe's")
    parser.add_argument("--learning-rate", type=float, help="instead of the recipe's")
    parser.add_argument("--stress", nargs="+", default=[], choices=topics(), help="topics to show more often")
    parser.add_argument("--start-from", type=Path, help="go on from this checkpoint, with its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's choice")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile on a GPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    recipe = RECIPES[options.recipe or device.type]
    if options.tokens:
        recipe = replace(recipe, num_tokens=options.tokens)
    if options.rows:
        recipe = replace(recipe, rows=options.rows)
    if options.learning_rate:
        recipe = replace(recipe, learning_rate=options.learning_rate)
    recipe = replace(recipe, stressed_topics=tuple(options.stress))
    start: Path | None = options.start_from
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start) if start else train_tokenizer(options.seed)
    model = (
        LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        if start
        else new_model(len(tokenizer), options.seed + 1)
    )
    print(json.dumps({"vocabulary": len(tokenizer), "device": str(device), "tokens": recipe.num_tokens}))
    compiled = device.type == "cuda" and not options.no_compile
    train(model, tokenizer, recipe, device, options.seed + 1, compiled)
    save(model, tokenizer, options.output)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {model.num_parameters() / 1e6:.1f} M parameters, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
