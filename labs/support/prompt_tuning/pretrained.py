"""Given: a small model that learns four skills in a few seconds, and is then frozen.

A question is four letters and "=". During training, a sign (`SIGNS`) before the letters said which
skill was meant; your examples contain no signs. The skills are thus in the model's weights, and a
prompt has to elicit them, as prompt tuning does with large models.

    model = load()                         # GPT in fp32, a new copy of the trained model
    pairs = examples("next", 300, seed=0)  # [([0, 1, 2, 3, 16], [1, 2, 3, 4]), …]: abcd=bcde
"""

import copy
import functools

import torch
from torch.nn import functional as F

from labs.support.prompt_tuning.reference import right_batch
from utils.models.gpt import GPT, GPTConfig
from utils.training.optimizer import make_optimizer

torch.set_num_threads(1)  # such small tensors gain nothing from a second thread

LETTERS = 16  # tokens 0 … 15 are the letters a … p
EQUALS, END, FIRST_SIGN = 16, 17, 18
LENGTH = 4  # letters of a question
SKILLS = {  # letters (B, LENGTH) -> answers (B, some)
    "copy": lambda letters: letters,
    "next": lambda letters: (letters + 1) % LETTERS,
    "previous": lambda letters: (letters - 1) % LETTERS,
    "last": lambda letters: letters[:, -1:],
}
SIGNS = {name: FIRST_SIGN + number for number, name in enumerate(SKILLS)}
CONFIG = GPTConfig(
    vocab_size=FIRST_SIGN + len(SKILLS), hidden_size=48, layers=2, heads=4, max_positions=64
)
STEPS, ROWS, NOISE = 180, 8, 8  # rows per skill and step; maximum letters before the sign


def letters(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` of the 65,536 questions, int64 (count, LENGTH)."""
    return torch.randint(LETTERS, (count, LENGTH), generator=generator)


def is_held_out(row: torch.Tensor) -> torch.Tensor:
    """Whether questions (…, LENGTH) are held out for measuring; one in four is."""
    return (row * torch.tensor([1, 3, 5, 7])).sum(dim=-1) % 4 == 0


def examples(name: str, count: int, seed: int, held_out: bool = False) -> list:
    """`count` pairs (question, answer) of a skill, as lists of tokens, without the end token."""
    generator = torch.Generator().manual_seed(seed)
    rows = letters(8 * count, generator)
    rows = rows[is_held_out(rows) == held_out][:count]
    answers = SKILLS[name](rows)
    return [(row + [EQUALS], answer) for row, answer in zip(rows.tolist(), answers.tolist())]


def text(tokens: list[int]) -> str:
    """Spell the tokens: abcd=bcde. Signs and end tokens are left out."""
    return "".join("=" if t == EQUALS else chr(ord("a") + t) for t in tokens if t <= EQUALS)


# ---- how the model was trained


def _lesson(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (B, T) of all skills: noise, sign, letters, "=", answer, end."""
    pairs = []
    for name, answer_to in SKILLS.items():
        asked = letters(ROWS, generator)
        width = int(torch.randint(NOISE + 1, (), generator=generator))
        noise = torch.randint(LETTERS, (ROWS, width), generator=generator)
        for before, row, answer in zip(*(x.tolist() for x in (noise, asked, answer_to(asked)))):
            pairs.append(([*before, SIGNS[name], *row, EQUALS], answer))
    return right_batch(pairs, END)


@functools.cache
def _trained() -> GPT:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(CONFIG)
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    optimizer = make_optimizer(model, "muon")
    peaks = [(group, group["lr"]) for part in optimizer.parts for group in part.param_groups]
    for step in range(STEPS):
        for group, peak in peaks:
            group["lr"] = peak * min(1, (step + 1) / 20, (STEPS - step) / (0.4 * STEPS))
        tokens, targets = _lesson(generator)
        counts = targets != -100
        logits = model.lm_head(model.model(tokens)[counts])
        F.cross_entropy(logits, targets[counts]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def load() -> GPT:
    """A copy of the trained model, in fp32; the first call takes a few seconds."""
    return copy.deepcopy(_trained())
