"""Greedy texts of 64 tokens beside those of transformers, float32, on random tiny models, on several meshes; and cached logits beside uncached.

    pip install -e '.[parity]' && python -m experiments.generate.parity [FAMILY ...]

Goal: the same token wherever the likeliest two of transformers' logits differ by more than 1e-3. After a nearer choice that differs, texts are
two; none has been seen. Log-probabilities are of the last mesh, beside those of the whole text read at once: largest difference.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers as hf

from experiments.adopt import parity
from meshtrain.config import load
from meshtrain.generate import programs
from meshtrain.generate.programs import Decoding
from meshtrain.generate.request import Sampling
from meshtrain.mesh import fake_devices, make_mesh
from meshtrain.reader import read_model

TOKENS, NEAR = 64, 1e-3
LENGTHS = (5, 23)  # of the prompts: within a bucket and a window, beyond both
MESHES = {"1": {}, "tensor 2": {"tensor": 2}, "data 2 x tensor 2": {"data": 2, "tensor": 2}}


def theirs(model: Any, prompt: np.ndarray) -> tuple[list[int], list[float]]:
    """The text that transformers writes, and by how much each of its tokens was the likeliest."""
    with torch.no_grad():
        said = model.generate(
            torch.tensor(prompt)[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = [torch.topk(logits[0], 2).values for logits in said.logits]
    return said.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]


def ours(run: Decoding, prompts: list[np.ndarray]) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Texts, and log-probabilities by id; the second joins when the first has four tokens."""
    state = run.empty()
    texts: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[np.ndarray]] = [[] for _ in prompts]

    def note(slot: int, picked: Any, at: Any) -> None:
        chosen, _, ids, values = (np.asarray(x)[at] for x in picked)
        texts[slot].append(int(chosen))
        by_id = np.zeros(len(ids), np.float32)
        by_id[ids] = values
        logprobs[slot].append(by_id)

    for slot, prompt in enumerate(prompts):
        state, picked = run.prefill(state, slot, prompt, Sampling())
        note(slot, picked, ())
        for _ in range(4 if slot + 1 < len(prompts) else TOKENS):
            state, picked = run.decode(state, likeliest=True)
            for running in range(slot + 1):
                note(running, picked, running)
    return [text[:TOKENS] for text in texts], [found[:TOKENS] for found in logprobs]


def uncached(directory: Path, prompt: np.ndarray, text: list[int]) -> np.ndarray:
    model = read_model(directory)
    whole = np.array([*prompt, *text])[None, :-1]
    return np.asarray(jax.nn.log_softmax(model(whole)))[0, len(prompt) - 1 :]


def compared(name: str, model: Any) -> bool:
    prompts = [np.random.default_rng(n).integers(0, parity.WORDS, n).astype(np.int32) for n in LENGTHS]
    right = [theirs(model, prompt) for prompt in prompts]
    least = min(min(margins) for _, margins in right)
    good = True
    with tempfile.TemporaryDirectory() as where:
        model.save_pretrained(where)
        line = f"{name:28}{least:>10.1e}"
        for sizes in MESHES.values():
            run = Decoding(read_model(where, mesh=make_mesh(load({"mesh": sizes}))), 2, max(LENGTHS) + TOKENS)
            texts, logprobs = ours(run, prompts)
            same = 0
            for text, (wanted, margins) in zip(texts, right, strict=True):
                first = next((n for n in range(TOKENS) if text[n] != wanted[n]), TOKENS)
                same += first
                good &= first == TOKENS or margins[first] <= NEAR
            line += f"{same:>12} of {2 * TOKENS}"
        off = max(
            float(np.abs(np.stack(found) - uncached(Path(where), prompt, text)).max())
            for prompt, text, found in zip(prompts, texts, logprobs, strict=True)
        )
        good &= off < 1e-4
    print(f"{line}{off:>12.1e}", flush=True)
    return good


def main() -> int:
    fake_devices(4)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # all of it
    programs.MOST_LIKELY = parity.WORDS
    print(
        f"{'transformers ' + hf.__version__:28}{'margin':>10}"
        + "".join(f"{name:>19}" for name in MESHES)
        + f"{'logprobs':>12}"
    )
    good = True
    for name, model in parity.models():
        parity.randomise(model)
        if sys.argv[1:] and not any(name.startswith(word) for word in sys.argv[1:]):
            continue
        good &= compared(name, model.eval())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
