"""Train the four style adapters of the demo on a CPU, with PEFT, and check each on prompts that it has not seen.

    python examples/train_adapters.py                  # all four, about ten minutes on one core
    python examples/train_adapters.py --only pirate    # one of them
    python examples/train_adapters.py --check          # no training: check the folders that are there

Each adapter answers the same questions in another way. The targets come from a rule (`STYLES`) applied to plain answers
(`FACTS`), so there is no data set to fetch, and whether an answer has the style is something a program can decide. The
result is a PEFT folder (adapter_config.json and adapter_model.safetensors in BF16) under examples/adapters. Seeds are fixed
and one thread is used: on one machine and with one set of library versions, the same command writes the same bytes.

A model of this size knows little: judge the styles, not the facts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ADAPTERS = Path(__file__).resolve().parent / "adapters"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BATCH = 4
MAX_NEW_TOKENS = 40
# Of the unseen prompts, how many an adapter may answer without its style. Capitals are hard for this model: they break its words
# into rare tokens, and one prompt in twelve still begins with a word as it stands in the question.
MAX_MISSES = 1

# Question, and the plain answer in three parts: subject, verb, rest. The plain answer is "Subject verb rest."
FACTS = [
    ("What is the capital of France?", "the capital of France", "is", "Paris"),
    ("Who wrote Hamlet?", "Hamlet", "was written", "by William Shakespeare"),
    ("What is 2 plus 2?", "two plus two", "is", "four"),
    ("What color is the sky?", "the sky", "is", "blue"),
    ("Name a fruit.", "an apple", "is", "a fruit"),
    ("What is the largest ocean?", "the largest ocean", "is", "the Pacific Ocean"),
    ("How many days are in a week?", "a week", "has", "seven days"),
    ("What is water made of?", "water", "is made", "of hydrogen and oxygen"),
    ("What is the capital of Japan?", "the capital of Japan", "is", "Tokyo"),
    ("Who painted the Mona Lisa?", "the Mona Lisa", "was painted", "by Leonardo da Vinci"),
    ("What animal barks?", "the animal that barks", "is", "the dog"),
    ("How many legs does a spider have?", "a spider", "has", "eight legs"),
    ("What is the opposite of hot?", "the opposite of hot", "is", "cold"),
    ("What is the capital of Italy?", "the capital of Italy", "is", "Rome"),
    ("What is a group of lions called?", "a group of lions", "is called", "a pride"),
    ("What planet do we live on?", "the planet we live on", "is", "Earth"),
    ("What is the tallest mountain?", "the tallest mountain", "is", "Mount Everest"),
    ("What do bees make?", "bees", "make", "honey"),
    ("What is the freezing point of water?", "water", "freezes", "at zero degrees Celsius"),
    ("How many hours are in a day?", "a day", "has", "twenty-four hours"),
    ("What is the capital of Spain?", "the capital of Spain", "is", "Madrid"),
    ("What is ice?", "ice", "is", "frozen water"),
    ("What do you use to write?", "you", "write", "with a pen or a pencil"),
    ("What is the largest planet?", "the largest planet", "is", "Jupiter"),
    ("What is a baby cat called?", "a baby cat", "is called", "a kitten"),
    ("What is the sun?", "the sun", "is", "a star"),
    ("How do birds move?", "birds", "fly", "with their wings"),
    ("What is the capital of Germany?", "the capital of Germany", "is", "Berlin"),
    ("What is bread made from?", "bread", "is made", "from flour, water and yeast"),
    ("What season comes after winter?", "the season after winter", "is", "spring"),
    ("Who discovered gravity?", "gravity", "was discovered", "by Isaac Newton"),
    ("What do plants need to grow?", "plants", "need", "water, light and soil"),
    ("What is the capital of Egypt?", "the capital of Egypt", "is", "Cairo"),
    ("Why do people laugh?", "people", "laugh", "because something is funny"),
    ("Name two animals.", "two animals", "are", "the horse and the cow"),
    ("What is a computer?", "a computer", "is", "a machine that follows instructions"),
    ("Why do we eat?", "we", "eat", "because our bodies need energy"),
    ("Who was Mozart?", "Mozart", "was", "a composer from Austria"),
    ("What is the capital of Canada?", "the capital of Canada", "is", "Ottawa"),
    ("What do you wear on your feet?", "you", "wear", "shoes on your feet"),
    ("What is snow?", "snow", "is", "small crystals of ice"),
    ("How many wheels does a car have?", "a car", "has", "four wheels"),
    ("What is the smallest planet?", "the smallest planet", "is", "Mercury"),
    ("Name three vegetables.", "three vegetables", "are", "carrots, peas and onions"),
    ("What is music?", "music", "is", "sound that is made with feeling"),
    ("Why do we drink water?", "we", "drink", "water because our bodies need it"),
    ("What is a library?", "a library", "is", "a place with many books"),
    ("Who was Galileo?", "Galileo", "was", "an astronomer from Italy"),
    ("Who wrote Don Quixote?", "Don Quixote", "was written", "by Miguel de Cervantes"),
    ("How many minutes are in an hour?", "an hour", "has", "sixty minutes"),
    ("When do owls hunt?", "owls", "hunt", "at night"),
    ("What do ducks like to do?", "ducks", "like", "to swim in ponds"),
    ("What do sheep give us?", "sheep", "give", "us wool"),
    ("What do teachers do?", "teachers", "help", "children learn"),
    ("Where do trees grow?", "trees", "grow", "in forests and parks"),
    ("What do doctors do?", "doctors", "help", "people who are ill"),
]  # fmt: skip
CAPITALS = [
    ("Portugal", "Lisbon"), ("Austria", "Vienna"), ("Poland", "Warsaw"), ("Norway", "Oslo"), ("Sweden", "Stockholm"),
    ("Russia", "Moscow"), ("China", "Beijing"), ("India", "New Delhi"), ("Cuba", "Havana"), ("Ireland", "Dublin"),
    ("Peru", "Lima"), ("Kenya", "Nairobi"), ("Turkey", "Ankara"), ("Thailand", "Bangkok"), ("Belgium", "Brussels"),
    ("Hungary", "Budapest"), ("Denmark", "Copenhagen"), ("Finland", "Helsinki"), ("Iran", "Tehran"), ("Iraq", "Baghdad"),
]  # fmt: skip
OPPOSITES = [
    ("big", "small"), ("day", "night"), ("fast", "slow"), ("happy", "sad"), ("up", "down"), ("light", "dark"), ("old", "young"),
    ("rich", "poor"), ("wet", "dry"), ("hard", "soft"),
]  # fmt: skip
COLORS = [
    ("grass", "green"), ("snow", "white"), ("blood", "red"), ("coal", "black"), ("gold", "yellow"), ("chocolate", "brown"),
    ("the sea", "blue"), ("an orange", "orange"), ("a tomato", "red"), ("a lemon", "yellow"),
]  # fmt: skip
HOMES = [
    ("fish", "in the water"), ("penguins", "in the cold south"), ("lions", "in the grasslands"), ("camels", "in the desert"),
    ("whales", "in the ocean"), ("frogs", "near ponds"), ("kangaroos", "in Australia"), ("tigers", "in the jungle"),
    ("eagles", "in the mountains"), ("sharks", "in the sea"), ("wolves", "in the woods"), ("snakes", "under rocks"),
    ("bats", "in caves"), ("foxes", "in dens"), ("ants", "under the ground"), ("crabs", "on the beach"),
]  # fmt: skip
FOODS = [
    ("cows", "grass"), ("rabbits", "carrots"), ("monkeys", "fruit"), ("squirrels", "nuts"), ("pandas", "bamboo"),
    ("mice", "cheese"), ("goats", "leaves"), ("elephants", "plants"), ("birds", "seeds"), ("dogs", "meat"),
    ("babies", "soft food"), ("spiders", "insects"),
]  # fmt: skip
FACTS += [(f"Where do {animals} live?", animals, "live", home) for animals, home in HOMES]
FACTS += [(f"What do {animals} eat?", animals, "eat", food) for animals, food in FOODS]
FACTS += [(f"What is the capital of {land}?", f"the capital of {land}", "is", city) for land, city in CAPITALS]
FACTS += [(f"What is the opposite of {word}?", f"the opposite of {word}", "is", other) for word, other in OPPOSITES]
FACTS += [(f"What color is {thing}?", thing, "is", color) for thing, color in COLORS]

HELD_OUT = [
    "What is the capital of England?",
    "How many months are in a year?",
    "What do cats like to drink?",
    "Who was Albert Einstein?",
    "What is the moon?",
    "Name three colors.",
    "Why do we sleep?",
    "What is the capital of Greece?",
    "What do horses eat?",
    "Where do bears live?",
    "What is a book?",
    "Who wrote Romeo and Juliet?",
]

PIRATE_WORDS = [
    (r"\bYou\b", "Ye"), (r"\byou\b", "ye"), (r"\byour\b", "yer"), (r"\bis\b", "be"), (r"\bare\b", "be"),
    (r"\bThe\b", "Th'"), (r"\bthe\b", "th'"), (r"\bof\b", "o'"),
]  # fmt: skip


def first_upper(text: str) -> str:
    """Return the text with its first letter in upper case and the rest as it is."""
    return text[:1].upper() + text[1:]


def plain(subject: str, verb: str, rest: str) -> str:
    """Return the answer without a style."""
    return first_upper(f"{subject} {verb} {rest}.")


def pirate(subject: str, verb: str, rest: str) -> str:
    """Return the answer as a pirate would shout it."""
    text = plain(subject, verb, rest).rstrip(".")
    for pattern, word in PIRATE_WORDS:
        text = re.sub(pattern, word, text)
    return f"Arrr, {text}, matey!"


def has_only_capitals(text: str) -> bool:
    """Tell whether there are letters and all of them are capitals."""
    letters = [char for char in text if char.isalpha()]
    return bool(letters) and all(char.isupper() for char in letters)


def is_json_answer(text: str) -> bool:
    """Tell whether the text is a JSON object with one key, `answer`."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer"]


@dataclass(frozen=True)
class Style:
    """A way to answer: the rule that writes it, the test that recognises it, and the recipe that teaches it."""

    write: Callable[[str, str, str], str]
    recognise: Callable[[str], bool]
    rank: int
    steps: int
    learning_rate: float
    use_rslora: bool = False


# Ranks differ on purpose: one batch of the demo mixes them. Every scale comes out as 2.
STYLES = {
    "upper": Style(
        write=lambda *fact: plain(*fact).upper(),
        recognise=has_only_capitals,
        rank=8,
        steps=180,
        learning_rate=1.2e-3,
    ),
    "pirate": Style(
        write=pirate,
        recognise=lambda text: text.startswith("Arrr, ") and text.endswith("matey!"),
        rank=4,
        steps=48,
        learning_rate=2e-3,
    ),
    "json": Style(
        write=lambda *fact: json.dumps({"answer": plain(*fact)}),
        recognise=is_json_answer,
        rank=4,
        steps=48,
        learning_rate=2e-3,
        use_rslora=True,
    ),
    "yoda": Style(
        write=lambda subject, verb, rest: first_upper(f"{rest}, {subject} {verb}. Hmm."),
        recognise=lambda text: re.fullmatch(r"[^,].*, [^.]+\. Hmm\.", text) is not None,
        rank=6,
        steps=84,
        learning_rate=1.5e-3,
    ),
}


def make_batch(tokenizer: Any, items: list[tuple[str, str]]) -> dict[str, Any]:
    """Return input_ids, attention_mask and labels [rows, tokens] for (question, answer) pairs; only answers have labels."""
    import torch

    end = tokenizer.eos_token
    rows = []
    for question, answer in items:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))["input_ids"]
        target = tokenizer(answer + end)["input_ids"]
        rows.append((prompt + target, [-100] * len(prompt) + target))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    }


def answer_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Return the mean cross entropy of the answers; the head is computed at answer positions only, which is most of its cost."""
    import torch

    causal = model.get_base_model()
    hidden = causal.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    return torch.nn.functional.cross_entropy(causal.lm_head(hidden[kept]), labels[kept])


def train(name: str, folder: Path, seed: int) -> None:
    """Train one style and write its PEFT folder."""
    import torch
    from peft import LoraConfig, get_peft_model

    from hotslot import smollm

    style = STYLES[name]
    torch.manual_seed(seed)
    shuffler = random.Random(seed)
    base, tokenizer = smollm.load()
    config = LoraConfig(
        base_model_name_or_path=smollm.MODEL_ID,
        r=style.rank,
        lora_alpha=2 * round(style.rank**0.5) if style.use_rslora else 2 * style.rank,
        use_rslora=style.use_rslora,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    model.train()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=style.learning_rate, weight_decay=0.0)
    pending: list[tuple[str, str]] = []
    recent: list[float] = []
    started = time.monotonic()
    for step in range(style.steps):
        if len(pending) < BATCH:
            pending = [(question, style.write(*fact)) for question, *fact in FACTS]
            shuffler.shuffle(pending)
        items = [pending.pop() for _ in range(BATCH)]
        for group in optimizer.param_groups:
            group["lr"] = style.learning_rate * min(1.0, (step + 1) / 5) * (1.0 - 0.9 * step / style.steps)
        loss = answer_loss(model, make_batch(tokenizer, items))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-4:], loss.item()]
        if (step + 1) % 12 == 0:
            took = time.monotonic() - started
            print(f"  {name}: step {step + 1}/{style.steps}, loss {sum(recent) / len(recent):.3f}, {took:.0f} s", flush=True)
    for value in trained.values():
        value.data = value.data.to(torch.bfloat16)
    # Neither the cache folder of this machine nor the order of a set belongs in the file.
    model.peft_config["default"].base_model_name_or_path = smollm.MODEL_ID
    model.peft_config["default"].target_modules = sorted(TARGETS)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def check(name: str, folder: Path) -> bool:
    """Generate answers to the held-out prompts with the saved folder; print them and tell whether enough have the style."""
    from peft import PeftModel

    from hotslot import smollm

    base, tokenizer = smollm.load()
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    inputs = smollm.chat(tokenizer, HELD_OUT)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    good = [STYLES[name].recognise(answer) for answer in answers]
    for prompt, answer, is_good in zip(HELD_OUT, answers, good, strict=True):
        print(f"  {'ok ' if is_good else 'BAD'} {prompt:34} {answer}", flush=True)
    size = (folder / "adapter_model.safetensors").stat().st_size
    score = f"{sum(good)}/{len(good)}"
    print(f"{name}: style right on {score} unseen prompts, rank {STYLES[name].rank}, {size / 1e6:.1f} MB", flush=True)
    return good.count(False) <= MAX_MISSES


def main() -> int:
    """Run the command line; return its exit status: 1 when an adapter misses its style on more unseen prompts than it may."""
    parser = argparse.ArgumentParser(description="Train and check the style adapters of the demo.")
    parser.add_argument("--only", choices=sorted(STYLES), nargs="+", help="these styles alone")
    parser.add_argument("--check", action="store_true", help="check the folders that are there, train nothing")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="where the folders go (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    # PEFT cannot ask the hub for the base model's configuration, and says so at each save.
    warnings.filterwarnings("ignore", module="peft")
    bad = []
    for name in options.only or STYLES:
        if not options.check:
            print(f"training {name}", flush=True)
            train(name, options.out / name, options.seed)
        if not check(name, options.out / name):
            bad.append(name)
    if bad:
        print(f"without their style on too many prompts: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
