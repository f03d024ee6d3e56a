"""The fixed prompts of the reference set. All text was written for this file.

Prompts of an exact length in tokens are cut from paragraphs that `paragraph` strings together from `SENTENCES` with
a fixed seed; the others are used whole.
"""

from __future__ import annotations

import random

# Length in tokens -> how many prompts of that length.
SMOLLM2_LENGTHS = {1: 4, 2: 4, 15: 3, 16: 3, 17: 3, 31: 3, 32: 3, 33: 3, 64: 3, 255: 2, 256: 2, 257: 2, 512: 2, 2048: 2}
# Gemma's local layers see 512 tokens: lengths around that, some that pass it while they are answered, and beyond it.
GEMMA3_LENGTHS = {
    1: 1,
    2: 2,
    15: 1,
    16: 1,
    17: 1,
    33: 2,
    64: 1,
    255: 1,
    490: 2,
    511: 1,
    512: 1,
    513: 1,
    700: 2,
    1100: 1,
}

SENTENCES = [
    "The lighthouse keeper counted the ships twice before he wrote the number down.",
    "A narrow road climbs from the harbour to the old observatory.",
    "Water boils at a lower temperature when the air pressure drops.",
    "Nobody on the night train seemed to know why it had stopped.",
    "She keeps a notebook in which every page is a different shade of green.",
    "The committee met on Thursday and agreed on nothing at all.",
    "Bread dough rises because yeast turns sugar into gas.",
    "In winter the lake freezes from its edges towards the middle.",
    "The engineer replaced the smallest gear and the whole clock ran again.",
    "Three hundred people signed the letter, and two of them regretted it.",
    "Copper conducts electricity well, which is why cables are made of it.",
    "My neighbour plays the cello badly but with great conviction.",
    "The map was wrong about the river, the bridge and the name of the village.",
    "To sort a list, compare two items at a time and swap them if needed.",
    "Every spring the storks come back to the same chimney.",
    "The museum closed early, so we read the plaques through the window.",
    "A good question is often worth more than a quick answer.",
    "Salt was once so valuable that soldiers were paid with it.",
    "The library smells of paper, dust and a little of oranges.",
    "If the valve sticks, turn the pump off and wait for ten minutes.",
    "Our cat sleeps on the warmest machine in the house.",
    "The desert looks empty until you sit still for an hour.",
    "He learned to juggle in the year when nothing else went well.",
    "Light takes about eight minutes to travel from the sun to the earth.",
    "The recipe asks for two eggs, but one is enough.",
    "Behind the theatre there is a door that is painted on the wall.",
    "Glass is made by melting sand together with soda and lime.",
    "The children built a raft and named it after their teacher.",
    "An honest mechanic told us that the noise was only a loose screw.",
    "When the power failed, the orchestra kept playing from memory.",
    "The ferry leaves at nine, at noon and whenever the captain feels like it.",
    "Moss grows where the stone stays damp.",
]

CHATS = [
    [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    [{"role": "user", "content": "Explain in two sentences why the sky looks blue."}],
    [{"role": "user", "content": "Give me three names for a small sailing boat."}],
    [
        {"role": "system", "content": "You answer with one word only."},
        {"role": "user", "content": "Which planet is closest to the sun?"},
    ],
    [
        {"role": "user", "content": "I have seven apples and eat two. How many are left?"},
        {"role": "assistant", "content": "You have five apples left."},
        {"role": "user", "content": "And if I buy four more?"},
    ],
    [{"role": "user", "content": "Write a short poem about a teapot that is tired."}],
    [
        {"role": "system", "content": "You are a patient teacher of physics."},
        {"role": "user", "content": "What happens to a gas when it is compressed quickly?"},
    ],
    [{"role": "user", "content": "Translate into Spanish: the window is open."}],
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "List the steps to repair a flat bicycle tyre."}],
]

OTHER_LANGUAGES = [
    "Am Morgen liegt der Nebel noch über den Feldern, und die Brücke ist kaum zu sehen. Später",
    "Le boulanger ouvre sa porte à cinq heures, quand la rue dort encore. Ensuite, il",
    "La abuela guarda las cartas en una caja azul que nadie puede abrir. Un día,",
    "Старый мост скрипит, когда по нему проезжает поезд. Вчера вечером",
    "Η βάρκα γύρισε στο λιμάνι πριν από τη βροχή, και ο ψαράς",
    "図書館の窓から海が見えます。今日は風が強いので、",
    "山上的小屋没有电，但是晚上可以看到很多星星。我们",
    "도서관 앞에 있는 나무는 백 년이 넘었습니다. 봄이 되면",
    "القطار يصل في المساء، والمسافرون ينتظرون على الرصيف. ثم",
    "रसोई में चाय की खुशबू है और बाहर बारिश हो रही है। तभी",
    "הספינה יצאה מהנמל בזמן, אבל הקברניט",
    "Prší už třetí den a řeka pomalu stoupá. Žlutý kůň 🐎 stojí",
]

CODE = [
    'def moving_average(values, width):\n    """Mean of each window of `width` values."""\n    total = 0.0\n',
    "fn largest_gap(times: &[u64]) -> u64 {\n    let mut gap = 0;\n    for pair in times.windows(2) {\n",
    "SELECT room, COUNT(*) AS visits\nFROM bookings\nWHERE cancelled = 0\nGROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    int total = 0;\n    for (int i = 1; i <= 10; i++) {\n",
    "class Shelf:\n    def __init__(self, capacity):\n        self.books = []\n        self.capacity = capacity\n\n"
    "    def add(self, book):\n",
    'const queue = [];\nfunction push(job) {\n  if (queue.length >= 16) {\n    throw new Error("',
    '{"name": "harbour", "depth_m": 12.5, "berths": [1, 2, 3], "open": true, "owner":',
    'for file in *.log; do\n  lines=$(wc -l < "$file")\n  echo',
]


def paragraph(seed: int, num_sentences: int) -> str:
    """`num_sentences` of SENTENCES in an order drawn from `seed`."""
    draw = random.Random(seed)
    return " ".join(draw.choice(SENTENCES) for _ in range(num_sentences))
