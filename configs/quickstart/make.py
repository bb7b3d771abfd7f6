"""Makes everything the quickstart starts from: the tokenizer, the tiny start model and the parquet files, those of configs/sft_tiny.toml and
configs/dpo_tiny.toml too.

    python configs/quickstart/make.py [FOLDER]

The task: put five letters in alphabetical order, `sort: gdbca` -> `abcdg`. The start model has been taught by the examples of a
careless teacher, who sorts by exchanging neighbours and mostly stops too early; so it has seen what sorting is, but greedy
decoding finishes only about a third of the words. Reinforcement learning, which sees nothing but right or wrong, has to do
better than the teacher.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are
the same bytes each time, and on the same kind of machine the weights are too.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

ALPHABET = "abcdefghijkl"
LETTERS = 5
TRAIN_ROWS, VALIDATION_ROWS = 8192, 256
PAD, END = "<|pad|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
INSTRUCTION = "sort: "
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PASSES = (0, 1, 1, 2, 4)  # over the word, one drawn for each of the teacher's examples; four always suffice
SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_LR = 160, 128, 3e-3


def make_tokenizer(characters: str = ALPHABET, phrases: Sequence[str] = (INSTRUCTION,)) -> Qwen2Tokenizer:
    """Return a tokenizer with one token per character, one per phrase and one per chat marker."""
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, END, *ROLES, *characters])},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=ROLES,
        chat_template=TEMPLATE,
        model_max_length=256,
    )
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def draw_words(seed: int, count: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Return `count` different words of LETTERS letters that are not in `without`."""
    source, words = random.Random(seed), dict[str, None]()
    while len(words) < count:
        word = "".join(source.choices(ALPHABET, k=LETTERS))
        if word not in without:
            words[word] = None
    return list(words)


def write_rows(path: Path, words: list[str]) -> None:
    rows = [
        {
            "data_source": "sort_letters",
            "prompt": [{"role": "user", "content": INSTRUCTION + word}],
            "env_class": "sort_letters",
            "reward_spec": {"method": "rule", "ground_truth": "".join(sorted(word))},
        }
        for word in words
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_conversations(path: Path, words: list[str]) -> None:
    """Write the right answers, as supervised fine-tuning learns them."""
    rows = [
        {
            "conversations": [
                {"role": "user", "content": INSTRUCTION + word},
                {"role": "assistant", "content": "".join(sorted(word))},
            ]
        }
        for word in words
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_pairs(path: Path, words: list[str]) -> None:
    """Write right answers beside wrong ones of the careless teacher, as DPO learns from them; words that are in order have none."""
    source, rows = random.Random(6), []
    for word in words:
        wrong = [answer for passes in range(LETTERS) if (answer := careless(word, passes)) != "".join(sorted(word))]
        if wrong:
            answers = {"chosen": "".join(sorted(word)), "rejected": source.choice(wrong)}
            row = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
            rows.append({"prompt": [{"role": "user", "content": INSTRUCTION + word}], **row})
    pq.write_table(pa.Table.from_pylist(rows), path)


def spoilt(word: str, source: random.Random) -> str:
    """Return letters that are in order, but not those of the word: some are others, and sometimes one is missing or said twice."""
    letters = list(word)
    for place in source.sample(range(LETTERS), source.randint(1, LETTERS)):
        letters[place] = source.choice(ALPHABET)
    length = source.choice([LETTERS - 1, LETTERS, LETTERS, LETTERS, LETTERS + 1])
    return "".join(sorted([*letters, source.choice(word)][:length]))


def write_comparisons(path: Path, words: list[str]) -> None:
    """Write pairs of which a reward model learns: right answers beside letters in a wrong order, and beside other letters in order.

    Without the second kind a model learns that letters should be in order, and a policy that it pays learns to say the same ones always.
    """
    source, rows = random.Random(7), []
    for word in words:
        right = "".join(sorted(word))
        wrong = [
            careless(word, source.randrange(LETTERS)),
            "".join(source.sample(word, LETTERS)),
            *(spoilt(word, source) for _ in range(2)),
        ]
        for answer in wrong:
            if answer != right:
                answers = {"chosen": right, "rejected": answer}
                row = {name: [{"role": "assistant", "content": said}] for name, said in answers.items()}
                rows.append({"prompt": [{"role": "user", "content": INSTRUCTION + word}], **row})
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return the untrained network: two layers of width 64, two heads of 32 (the narrowest that vLLM runs on a CPU)."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def careless(word: str, passes: int) -> str:
    """Return the teacher's answer: `passes` times over the word, exchanging neighbours that are in the wrong order."""
    letters = list(word)
    for _ in range(passes):
        for left, right in itertools.pairwise(range(len(letters))):
            letters[left], letters[right] = sorted((letters[left], letters[right]))
    return "".join(letters)


def encode_prompts(tokenizer: Qwen2Tokenizer, words: list[str]) -> torch.Tensor:
    """Return the prompt ids [B, prompt length], up to where the answer starts."""
    chats = [[{"role": "user", "content": INSTRUCTION + word}] for word in words]
    return torch.tensor(
        [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    )


def encode_answers(tokenizer: Qwen2Tokenizer, answers: list[str]) -> torch.Tensor:
    """Return the ids [B, LETTERS + 1] of answers with the end marker."""
    return torch.tensor([tokenizer(answer + END).input_ids for answer in answers])


def learn(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, words: list[str]) -> None:
    """Take a few supervised steps on the teacher's answers, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    source = random.Random(4)
    prompts = encode_prompts(tokenizer, words)
    answers = encode_answers(tokenizer, [careless(word, source.choice(PASSES)) for word in words])
    for step in range(SUPERVISED_STEPS):
        rows = torch.arange(step * SUPERVISED_BATCH, (step + 1) * SUPERVISED_BATCH) % len(words)
        ids = torch.cat([prompts[rows], answers[rows]], dim=1)
        logits = model(ids).logits[:, prompts.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, words: list[str]) -> float:
    """Return the share of `words` that greedy decoding sorts."""
    ids = prompts = encode_prompts(tokenizer, words)
    answers = encode_answers(tokenizer, ["".join(sorted(word)) for word in words])
    for _ in range(answers.shape[1]):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return (ids[:, prompts.shape[1] :] == answers).all(1).float().mean().item()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    validation = draw_words(1, VALIDATION_ROWS)
    train = draw_words(2, TRAIN_ROWS, frozenset(validation))
    write_rows(folder / "data" / "train.parquet", train)
    write_rows(folder / "data" / "validation.parquet", validation)
    write_conversations(folder / "data" / "sft_train.parquet", train)
    write_conversations(folder / "data" / "sft_validation.parquet", validation)
    write_pairs(folder / "data" / "dpo_train.parquet", train)
    write_pairs(folder / "data" / "dpo_validation.parquet", validation)
    write_comparisons(folder / "data" / "reward_train.parquet", train)
    write_comparisons(folder / "data" / "reward_validation.parquet", validation)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    learn(model, tokenizer, draw_words(3, 8192, frozenset(validation)))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(f"{model.num_parameters()} parameters, greedy score {score(model, tokenizer, validation):.3f} on validation")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
