"""The demo model's text: little stories and chats whose answers stand in the context.

Everything follows from a seed. Knows nothing of tokenizers, models or training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

Message = dict[str, str]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Mia Leo Iris Sam Hugo Nora Finn Lena Omar Ruby Theo Zoe Anna Ben Clara David Emma Felix Grace "
    "Henry Jack Kate Paul Tom"
)
THINGS = _words(
    "ball key hat drum coin map book cup kite lamp bell boat box ring shoe spoon stone clock bag "
    "card flute mask rope torch"
)
COLOURS = _words("red blue green yellow pink white black brown")
PLACES = _words("school garden kitchen park forest library market barn tower castle shop valley")
FOODS = _words("soup bread cheese rice cake honey jam pasta salad toast")
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")

OPENINGS = (
    "One morning, {n} went to the {p}.",
    "One day, {n} walked to the {p}.",
    "After lunch, {n} ran to the {p}.",
    "Last summer, {n} was alone in the {p}.",
    "Once upon a time, {n} lived near the {p}.",
)
WEATHER = (
    "It was a sunny day.",
    "It was raining a little.",
    "The wind was cold.",
    "The sky was clear and bright.",
    "Snow was falling slowly.",
)
FINDS = (
    "There {n} found a {c} {t}.",
    "Under a tree, {n} found a {c} {t}.",
    "Behind the door, {n} found a {c} {t}.",
    "Next to an old wall, {n} found a {c} {t}.",
)
TROUBLES = (
    "But the {t} fell into the water.",
    "But the {t} was too heavy to carry.",
    "But a small dog took the {t} and ran away.",
    "But the {t} was broken.",
)
HELPS = (
    "Then {h} came and helped {n}.",
    "Luckily, {h} was near and helped {n}.",
    "So {n} called for help, and {h} helped {n}.",
)
ENDINGS = (
    "In the evening, {n} and {h} went home with the {c} {t}.",
    "Since that day, {n} and {h} are good friends.",
    "{n} was happy and gave the {c} {t} to {h}.",
    "That night, {n} put the {c} {t} next to the bed and slept well.",
)
PERSONAS = (
    "You are Tandem, a small and friendly helper.",
    "You are Tandem. Answer in one short sentence.",
    "You are a helpful assistant.",
    "You answer from what you are told.",
)
RULES = (
    "Read the whole text before you answer.",
    "Use short and simple words.",
    "Be kind and patient.",
    "Do not guess.",
    "Answer only what was asked.",
    "All answers can be found in the text.",
    "If there is a list, keep its order.",
    "Please write full sentences.",
)
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! What would you like to know?"),
    ("Who are you?", "I am Tandem, a small hybrid model."),
    ("What can you do?", "I can tell little stories and answer from the text."),
    ("Thank you.", "You are welcome."),
    ("Goodbye.", "Goodbye! See you soon."),
)
LEAD_INS = ("", "", "Here are some facts. ", "Please remember this. ", "Listen. ")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question, its exact answer and its kind; `exact` is False where many answers are fine."""

    kind: str
    question: str
    answer: str
    exact: bool = True


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """Chat messages that end with a user turn, and the one right answer to it."""

    kind: str
    messages: list[Message]
    answer: str


@dataclass(slots=True)
class Scene:
    """Statements made so far and the exchanges they allow."""

    statements: list[str] = field(default_factory=list)
    questions: list[Exchange] = field(default_factory=list)


def story(rng: Random, name: str) -> tuple[str, list[Exchange]]:
    """A story about `name` and the questions it answers."""
    helper = rng.choice([other for other in NAMES if other != name])
    c, t, p = rng.choice(COLOURS), rng.choice(THINGS), rng.choice(PLACES)
    parts = (OPENINGS, WEATHER, FINDS, TROUBLES, HELPS, ENDINGS)
    text = " ".join(rng.choice(part).format(n=name, h=helper, c=c, t=t, p=p) for part in parts)
    return text, [
        Exchange("story-found", f"What did {name} find?", f"In the story, {name} found a {c} {t}."),
        Exchange("story-helper", "Who helped in the story?", f"In the story, {helper} helped."),
        Exchange("story-place", "Where was the story?", f"The story was at the {p}."),
        Exchange("story-colour", f"What colour was the {t}?", f"The {t} was {c}."),
    ]


def _has(name: str, rng: Random, thing: str) -> tuple[str, list[Exchange]]:
    colour = rng.choice(COLOURS) if rng.random() < 0.6 else ""
    fact = f"{name} has a {colour} {thing}." if colour else f"{name} has a {thing}."
    asked = [
        Exchange("has", f"What does {name} have?", f"I read that {fact}"),
        Exchange("who-has", f"Who has the {thing}?", f"The {thing} is with {name}."),
    ]
    if colour:
        question = f"What colour is the {thing}?"
        asked.append(Exchange("colour", question, f"The {thing} is {colour}."))
    return fact, asked


def _place(name: str, place: str) -> tuple[str, list[Exchange]]:
    fact = f"{name} is in the {place}."
    return fact, [
        Exchange("where", f"Where is {name}?", f"I read that {fact}"),
        Exchange("who-is-in", f"Who is in the {place}?", f"In the {place} is {name}."),
    ]


def _likes(name: str, food: str) -> tuple[str, list[Exchange]]:
    fact = f"{name} likes {food}."
    return fact, [Exchange("likes", f"What does {name} like?", f"I read that {fact}")]


def scene(rng: Random, people: int) -> Scene:
    """Facts about `people` different persons; things, places and foods are never shared."""
    made = Scene()
    things, places, foods = (rng.sample(pool, people) for pool in (THINGS, PLACES, FOODS))
    for index, name in enumerate(rng.sample(NAMES, people)):
        facts = [
            _has(name, rng, things[index]),
            _place(name, places[index]),
            _likes(name, foods[index]),
        ]
        told = [facts[i] for i in sorted(rng.sample(range(3), rng.choice((1, 1, 1, 2))))]
        text = " ".join(fact for fact, _ in told)
        made.statements.append(text)
        made.questions.extend(question for _, asked in told for question in asked)
        if len(told) > 1:
            made.questions.append(
                Exchange("about", f"Tell me about {name}.", f"I read that {text}")
            )
    rng.shuffle(made.statements)
    if people <= 4:
        everything = "I read that " + " ".join(made.statements)
        made.questions.append(Exchange("everything", "Tell me everything.", everything))
    return made


def _ask(rng: Random, made: Scene, turns: int) -> list[Exchange]:
    return rng.sample(made.questions, min(turns, len(made.questions)))


def _reverse(items: list[str], _: Random) -> tuple[str, str]:
    answer = f"In reverse order: {', '.join(reversed(items))}."
    return f"Please list these things in reverse order: {', '.join(items)}.", answer


def _repeat(items: list[str], _: Random) -> tuple[str, str]:
    text = ", ".join(items) + "."
    return f"Please repeat this list: {text}", f"The list is {text}"


def _after(items: list[str], rng: Random) -> tuple[str, str]:
    at = rng.randrange(len(items) - 1)
    question = f"In the list {', '.join(items)}, what comes after {items[at]}?"
    return question, f"After {items[at]} comes {items[at + 1]}."


def _how_many(items: list[str], _: Random) -> tuple[str, str]:
    return f"How many things are these: {', '.join(items)}?", f"These are {NUMBERS[len(items)]}."


def _count(_: list[str], rng: Random) -> tuple[str, str]:
    start = rng.randrange(1, 8)
    stop = start + rng.randrange(2, 6)
    answer = f"I count {', '.join(NUMBERS[start : stop + 1])}."
    return f"Count from {NUMBERS[start]} to {NUMBERS[stop]}.", answer


LIST_TASKS: dict[str, Callable[[list[str], Random], tuple[str, str]]] = {
    "reverse": _reverse,
    "repeat": _repeat,
    "after": _after,
    "how-many": _how_many,
    "count": _count,
}


def list_exchange(rng: Random) -> Exchange:
    """One self-contained task over a list of things or over numbers."""
    kind = rng.choice(list(LIST_TASKS))
    question, answer = LIST_TASKS[kind](rng.sample(THINGS, rng.randrange(3, 6)), rng)
    return Exchange(kind, question, answer)


def _story_turns(rng: Random) -> list[Exchange]:
    """The model tells a story and is asked about it."""
    name = rng.choice(NAMES)
    text, asked = story(rng, name)
    request = rng.choice(("Tell me a short story about {n}.", "Tell me a story about {n}."))
    told = Exchange("story", request.format(n=name), text, exact=False)
    return [told, *rng.sample(asked, rng.randrange(1, 4))]


def _read_turns(rng: Random) -> list[Exchange]:
    """The user tells a story and asks about it."""
    text, asked = story(rng, rng.choice(NAMES))
    first, *rest = rng.sample(asked, rng.randrange(1, 5))
    question = f"Here is a story. {text} {first.question}"
    return [Exchange(first.kind, question, first.answer), *rest]


def _fact_turns(rng: Random, people: int, turns: int) -> list[Exchange]:
    """The user states facts and asks about them, one question a turn."""
    made = scene(rng, people)
    first, *rest = _ask(rng, made, turns)
    context = rng.choice(LEAD_INS) + " ".join(made.statements)
    return [Exchange(first.kind, f"{context} {first.question}", first.answer), *rest]


def _system_prompt(rng: Random, facts: str) -> str:
    rules = rng.sample(RULES, rng.choice((0, 0, 1, 2, 4)))
    return " ".join(filter(None, (rng.choice(PERSONAS), *rules, facts)))


def _turns(rng: Random, people: int, turns: int) -> list[Exchange]:
    shape = rng.random()
    if shape < 0.62:
        exchanges = _fact_turns(rng, people, turns)
    elif shape < 0.74:
        exchanges = _read_turns(rng)
    elif shape < 0.82:
        exchanges = _story_turns(rng)
    else:
        exchanges = [list_exchange(rng) for _ in range(turns)]
    return exchanges


def _with_small_talk(rng: Random, exchanges: list[Exchange]) -> list[Exchange]:
    if rng.random() < 0.15:
        talk = Exchange("small-talk", *rng.choice(SMALL_TALK), exact=False)
        exchanges.insert(rng.choice((0, len(exchanges))), talk)
    return exchanges


def conversation(rng: Random, people: int, turns: int) -> tuple[str, list[Exchange]]:
    """A system prompt ("" for none) and the exchanges of one chat.

    In a quarter of the chats the facts stand in the system prompt, as in an assistant whose users
    share one long prefix.
    """
    if rng.random() < 0.25:
        made = scene(rng, people)
        asked = _ask(rng, made, turns)
        system = _system_prompt(rng, "These are the facts. " + " ".join(made.statements))
        return system, _with_small_talk(rng, asked)
    system = _system_prompt(rng, "") if rng.random() < 0.4 else ""
    return system, _with_small_talk(rng, _turns(rng, people, turns))


def to_messages(system: str, exchanges: list[Exchange]) -> list[Message]:
    """The chat as role/content messages, each exchange a user and an assistant turn."""
    messages = [{"role": "system", "content": system}] if system else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def training_documents(seed: int, people: int, turns: int) -> Iterator[tuple[str, list[Exchange]]]:
    """Endless training chats; a plain story comes as a text without exchanges."""
    rng = Random(f"train-{seed}")
    while True:
        if rng.random() < 0.05:
            yield story(rng, rng.choice(NAMES))[0], []
        else:
            size = rng.randint(2, people), rng.randint(1, turns)
            yield conversation(rng, *size)


def fresh_prompts(seed: int, count: int) -> list[FreshPrompt]:
    """`count` chats of one to four turns that end with an exactly answerable user turn."""
    rng = Random(f"fresh-{seed}")
    prompts: list[FreshPrompt] = []
    while len(prompts) < count:
        system, exchanges = conversation(rng, rng.randint(2, 4), rng.randint(1, 4))
        if exchanges[-1].exact:
            *messages, last = to_messages(system, exchanges)
            prompts.append(FreshPrompt(exchanges[-1].kind, messages, last["content"]))
    return prompts
